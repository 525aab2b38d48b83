"""Plans: candidates keep the target and the budget; written configs can be trained."""

import csv
import tomllib

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.cli import command, plan as plan_command
from jaxdp_episodic.tools.cli.plan import relocated
from jaxdp_episodic.tools.plan.plan import (
    Candidate,
    advice,
    effective_steps,
    in_epochs,
    make_plan,
    possible_designs,
    training_config,
)
from jaxdp_episodic.tools.plan.question import (
    Compute,
    EpisodeShape,
    Learning,
    PlanRequest,
    read_plan,
)
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.run.assemble import plan as trainers_plan
from training_runs import PLAN

CLASSES = jde.Population.from_sizes([20] * 40, level_names=("class", "example"))
POOL = {"ways": 4, "shots": 1, "examples": (3,), "population": 20}
COMPUTE = {"episodes_per_step": 4, "total_episodes": 200}
COMPUTE |= {"fewest_steps": 20, "most_steps": 60}
SMALL = {"epsilon": 4.0, "delta": 1e-5, "compute": Compute(**COMPUTE)}


@pytest.fixture(scope="module")
def pool_plan():
    # Each kind of step costs seconds to compile.
    request = PlanRequest(episode=EpisodeShape(**POOL), schemes=("poisson",), **SMALL)
    return request, make_plan(request, CLASSES)


def column(plan, name):
    """The numbers of all candidates."""
    return np.array([getattr(one, name) for one in plan.candidates])


def spent(one, *, scale=1.0, **changes):
    """Epsilon of a candidate, with its noise scaled."""
    step = jde.GaussianStep(
        one.design.sampling(one.episodes_per_step),
        noise_multiplier=scale * one.noise_multiplier,
        **{"clip_unit": one.design.clip_unit} | changes,
    )
    return float(jde.epsilon(step, num_steps=one.num_steps, delta=1e-5, method="rdp"))


def test_every_candidate_keeps_to_privacy_and_budget(pool_plan):
    compute, plan = pool_plan[0].compute, pool_plan[1]
    assert plan.left_out == {}
    assert {one.design.scheme for one in plan.candidates} == {"poisson"}
    assert {one.design.is_multistage for one in plan.candidates} == {True, False}
    assert np.all(column(plan, "total_episodes") <= compute.total_episodes)
    assert np.all(column(plan, "episodes_per_step") <= compute.episodes_per_step)
    assert {20, 60} <= {*column(plan, "num_steps")} <= {*range(20, 61)}
    rng = np.random.default_rng(0)
    for place in rng.choice(len(plan.candidates), 6, replace=False):
        one = plan.candidates[place]
        assert spent(one) <= 4.0 < spent(one, scale=0.999)
        expected = one.episodes_per_step / one.noise_multiplier
        assert one.signal_to_noise == pytest.approx(expected)


def test_the_recommendation_is_the_cheapest_of_the_nearly_best(pool_plan):
    _, plan = pool_plan
    best, worth = plan.recommended, column(plan, "effective_steps")
    near = worth >= 0.98 * worth.max()
    assert best.effective_steps >= 0.98 * worth.max()
    assert best.total_episodes == column(plan, "total_episodes")[near].min()
    assert best.design.is_multistage and best in plan.best
    designs = dict.fromkeys(one.design for one in plan.candidates)
    assert [one.design for one in plan.best] == [*designs]


def test_the_front_has_every_undominated_candidate(pool_plan):
    _, plan = pool_plan
    names = ("signal_to_noise", "num_steps", "total_episodes")
    rows = np.array([[-1.0], [-1.0], [1.0]]) * [column(plan, name) for name in names]
    costs = np.unique(rows, axis=1)  # equal points are listed once
    front = {tuple(c) for c in rows[:, plan.is_on_front].T}
    for point in costs.T:
        no_worse = np.all(costs <= point[:, None], axis=0)
        is_beaten = np.any(no_worse & np.any(costs < point[:, None], axis=0))
        assert (tuple(point) in front) != is_beaten


def test_without_any_gain_there_is_no_picture(tmp_path, pool_plan, monkeypatch):
    nothing = [one._replace(effective_steps=0.0) for one in pool_plan[1].candidates]
    plan = pool_plan[1]._replace(candidates=nothing, recommended=nothing[0])
    monkeypatch.setattr(plan_command, "make_plan", lambda *_: plan)
    text = PLAN.replace("[train]", "[train]\nnoise = 'gaussian'")
    (tmp_path / "plan.toml").write_text(text)
    o = command.Options(file=tmp_path / "plan.toml", out=tmp_path)
    assert "no picture: no setting gains anything" in plan_command.do_plan(o)


@pytest.mark.parametrize(
    ("noise", "is_one", "alignment", "expected"),
    [
        (1e-9, False, 1.0, 200),
        (1e4, False, 0.5, 200 * 0.25 * 50**2 / (100 * 1e8)),
        (1e4, True, 1.0, 200 / (100 * 1e8)),
    ],
)
def test_effective_steps_at_extremes(noise, is_one, alignment, expected):
    learning = Learning(effective_dimension=100, alignment=alignment)
    found = effective_steps(200, 50.0, noise, learning, is_one=is_one)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("number", "is_cheaper"), [(1, True), (8, False)])
def test_epochs_are_compared_at_the_best_poisson_setting(number, is_cheaper):
    tree = jde.Population.from_sizes([20] * 8, level_names=("class", "example"))
    request = PlanRequest(
        episode=EpisodeShape(shots=1, examples=(20,)), privacy_unit="class", **SMALL
    )
    designs = possible_designs(request, tree)
    poisson, whole, epochs, *_ = designs
    assert poisson.poisson_of(epochs) and not whole.poisson_of(epochs)
    one = Candidate(
        poisson, number, number, 60, 1.0, 1.0, total_episodes=60, effective_steps=1
    )
    asked = np.array([2.0]), np.array([30])
    if not is_cheaper:
        with pytest.raises(ValueError, match="every unit takes part in every step"):
            in_epochs(epochs, asked, [one])
        return
    (episodes, steps), gain = in_epochs(epochs, asked, [one])
    assert (episodes.tolist(), steps.tolist()) == ([1.0], [60])
    assert gain.startswith("at 1 episodes, 60 steps and noise ")
    assert float(gain.split(",")[-2].split()[-1]) < 3.9
    assert gain.endswith("Poisson sampling 4")
    # Without a Poisson candidate the settings are unchanged.
    (episodes, steps), gain = in_epochs(epochs, asked, [])
    assert (episodes.tolist(), steps.tolist(), gain) == ([2.0], [30], "")


@pytest.mark.slow
def test_all_schemes_side_by_side():
    plan = make_plan(PlanRequest(episode=EpisodeShape(**POOL), **SMALL), CLASSES)
    # An example drawn into episodes costs more in epochs, and the plan says how much.
    assert list(plan.left_out.values()) == [["grouped classes, epochs"]]
    schemes = {one.design.scheme for one in plan.candidates}
    assert schemes == {"poisson", "epochs", "without replacement", "independent"}
    assert plan.recommended.design.scheme == "poisson"


@pytest.mark.slow
def test_written_config_is_what_was_planned(tmp_path, capsys, monkeypatch, pool_plan):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    _, plan = pool_plan
    assert read_plan(path).population == CLASSES
    # The same question: planning twice would only take time.
    monkeypatch.setattr(plan_command, "make_plan", lambda *_: plan)
    assert cli.run(["plan", str(path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "* recommended" in printed and "recommended.toml" in printed
    mapping = tomllib.loads((tmp_path / "out" / "recommended.toml").read_text())
    config = TrainingConfig.from_dict({"type": "TrainingConfig", **mapping})
    budget = trainers_plan(config, config.data.load("train", None))
    assert budget.step.population is None  # all inputs are public
    with (tmp_path / "out" / "plan.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (best,) = [row for row in rows if row["is_recommended"] == "True"]
    assert budget.num_steps == int(best["num_steps"])
    # The plan calibrates by Rényi DP, which is quick; the trainer exactly.
    planned = float(best["noise_multiplier"])
    assert 0.8 * planned < budget.step.noise_multiplier <= planned * (1 + 1e-5)
    assert (tmp_path / "out" / "plan.png").stat().st_size > 10_000
    # Any other candidate can be written as well.
    description = read_plan(path)
    for one in (plan.candidates[0], plan.candidates[-1]):
        table = training_config(plan._replace(recommended=one), description)
        text = to_toml(table)
        TrainingConfig.from_dict({"type": "TrainingConfig", **tomllib.loads(text)})


def test_bounds_of_people_are_in_the_config(tmp_path, pool_plan):
    _, plan = pool_plan
    path = tmp_path / "plan.toml"
    text = PLAN.replace('"example"', '"person"', 1) + "[people]\nclasses = 3\n"
    owned = 'small = true\nowner = "typeface"'
    path.write_text(text.replace("small = true", owned) + "examples = 1\n")
    table = training_config(plan, read_plan(path))
    config = TrainingConfig.from_dict({"type": "TrainingConfig", **table})
    assert config.people.bounds == jde.PersonBounds(classes=3, examples=1)


def test_the_learning_rate_scales_with_the_number_of_steps(tmp_path, pool_plan):
    """Four times the steps, half the learning rate; nothing else changes."""
    _, plan = pool_plan
    steps = plan.recommended.num_steps
    optimizer = '[train.optimizer]\nkind = "adam"\nlearning_rate = 8e-3\n'
    path = tmp_path / "plan.toml"
    path.write_text(PLAN + optimizer)
    as_it_is = training_config(plan, read_plan(path))
    assert as_it_is["optimizer"]["learning_rate"] == 8e-3
    learning = f"[learning]\nlearning_rate_steps = {4 * steps}\n"
    path.write_text(PLAN + optimizer + learning)
    scaled = training_config(plan, read_plan(path))
    assert scaled["optimizer"] == {"kind": "adam", "learning_rate": 16e-3}
    assert {**scaled, "optimizer": None} == {**as_it_is, "optimizer": None}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[compute]",
            "[learning]\nlearning_rate_steps = 9\n[compute]",
            "needs train.optimizer.learning_rate",
        ),
        ("ways = 4", "way = 4", "did you mean 'ways'"),
        ("l2_clip_norm", "epsilon", "must be left out"),
        ("version = 1", "version = ", "not valid TOML"),
        ("[data]", "[population]\nsizes = [3]\n[data]", "exactly one"),
    ],
)
def test_invalid_files_are_refused(tmp_path, capsys, old, new, message):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace(old, new))
    assert cli.run(["plan", str(path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_written_toml_reads_back():
    table = {
        "text": 'quote " and \\ and \n and \x7f ü',
        "numbers": [1, 2.5, float("inf")],
        "flag": True,
        "none": None,
        "inner": {"key with space": -3, "list": [{"a": 1}, {"b": "x"}], "empty": {}},
    }
    expected = {k: v for k, v in table.items() if v is not None}
    assert tomllib.loads(to_toml(table)) == expected
    with pytest.raises(TypeError, match="cannot represent"):
        to_toml({"x": object()})


# --- Unequal classes ---

UNEQUAL = jde.Population.from_sizes(
    [3, 30, *range(4, 26)], level_names=("class", "example")
)


def unequal(relation, slots, size=2):
    return PlanRequest(
        episode=EpisodeShape(ways=4, shots=1, examples=(size,), population=slots),
        neighboring_relation=relation,
        schemes=("poisson",),
        **SMALL,
    )


@pytest.mark.slow
def test_signal_is_that_of_complete_episodes():
    plan = make_plan(unequal("zero_out", 30), UNEQUAL)
    complete = column(plan, "complete_per_step")
    share = complete / column(plan, "episodes_per_step")
    assert 0.003 < share[0] < 0.05
    np.testing.assert_allclose(share, share[0])
    signal = complete / column(plan, "noise_multiplier")
    np.testing.assert_allclose(column(plan, "signal_to_noise"), signal)
    with pytest.raises(ValueError, match="fewer than one. .* it would be 1 under"):
        make_plan(unequal("zero_out", 30, size=8), UNEQUAL)
    (said,) = advice(plan)
    assert 'it would be 1 under neighboring_relation = "add_remove"' in said
    whole = make_plan(unequal("add_remove", 3), UNEQUAL)
    assert all(
        one.complete_per_step == one.episodes_per_step for one in whole.candidates
    )
    assert advice(whole) == []


# --- People ---

PEOPLE = {
    "privacy_unit": "person",
    "people": jde.PersonBounds(classes=8, examples=1),
    "num_people": 20,
    "neighboring_relation": "zero_out",
}


@pytest.mark.slow
def test_blocks_are_recommended_where_people_are_in_many_classes():
    request = PlanRequest(
        episode=EpisodeShape(ways=4, shots=1, examples=(2,), population=20),
        schemes=("poisson", "blocks"),
        **(PEOPLE | {"people": jde.PersonBounds(classes=20, examples=1)}),
        **(SMALL | {"compute": Compute(**(COMPUTE | {"most_steps": 20}))}),
    )
    plan = make_plan(request, CLASSES)
    assert plan.left_out == {}
    best = plan.recommended.design
    assert best.name == "blocks of 2 people" and best.most_episodes == 10
    # Two of 20 people have, on average, the 2 drawings of a class that are drawn.
    design = best.sampling(plan.recommended.episodes_per_step)
    assert (design.num_people, design.people_per_block) == (20, 2)
    relation = {"clip_unit": None, "neighboring_relation": "zero_out"}
    assert 3.9 < spent(plan.recommended, **relation) <= 4.0


def test_people_without_bounds_get_blocks_only():
    people = PEOPLE | {"people": None}
    shape = EpisodeShape(ways=4, shots=1, examples=(2,), population=20)
    request = PlanRequest(
        episode=shape, schemes=("poisson", "blocks"), **people, **SMALL
    )
    plan = make_plan(request, CLASSES)
    assert {one.design.scheme for one in plan.candidates} == {"blocks"}
    assert all("PersonBounds" in why for why in plan.left_out)


def refused(tree=CLASSES, **change):
    """Plans what was asked, with some of its fields changed."""
    parts = {EpisodeShape: POOL, Compute: COMPUTE, Learning: {"alignment": 0.3}}
    shape, compute, learning = (
        kind(**{name: change.pop(name, value) for name, value in fields.items()})
        for kind, fields in parts.items()
    )
    fields = {**SMALL, "compute": compute, "schemes": ("poisson",), **change}
    make_plan(PlanRequest(episode=shape, learning=learning, **fields), tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"total_episodes": 5}, "total_episodes must be at least"),
        ({"fewest_steps": 100}, "most_steps must be at least fewest"),
        ({"most_steps": None}, "most_steps must be a number"),
        ({"schemes": ("shuffled",)}, "schemes must be one of"),
        ({"alignment": 1.5}, "alignment must lie"),
        ({"ways": 41}, "ways must be at most the 40"),
        ({"tree": jde.Population.from_sizes([[3, 4], [5]])}, "two levels"),
        (
            {"tree": UNEQUAL, "neighboring_relation": "zero_out"},
            "at least the number of children of every",
        ),
        ({"tree": UNEQUAL}, "at most the number of children"),
        (PEOPLE | {"privacy_unit": "example"}, "be left out"),
        (PEOPLE | {"people": None, "num_people": None}, "be given"),
        (PEOPLE | {"people": jde.PersonBounds(classes=[1, 2])}, "one setting"),
    ],
)
def test_invalid_requests_are_refused(change, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        refused(**change)


def test_paths_of_a_written_config_are_those_of_the_plan(tmp_path):
    data = {"type": "Npz", "path": "a.npz", "validation": 0.2, "test": "b.npz"}
    features = {"kind": "onnx", "path": "c.onnx", "size": 8}
    moved = relocated({"data": data, "features": features}, tmp_path / "x" / "..")
    place = tmp_path.resolve()
    paths = {"path": f"{place}/a.npz", "test": f"{place}/b.npz"}
    assert moved["data"] == data | paths
    assert moved["features"] == features | {"path": f"{place}/c.onnx"}


# --- Correlated noise, chosen only where it gains ---


def weighed(tmp_path, *, epsilon=8.0, train=""):
    """The plan's line about correlated noise, and the config that it writes."""
    text = PLAN.replace("epsilon = 4.0", f"epsilon = {epsilon}")
    text = text.replace("[data]", 'neighboring_relation = "zero_out"\n[data]', 1)
    text = text.replace("examples = [3]", "examples = [2]")
    text = text.replace("= 200", "= 1_200").replace("_steps = 20", "_steps = 300")
    text = text.replace("most_steps = 60", "most_steps = 300")
    text = text.replace("[train]", f"[train]\n{train}")
    (tmp_path / "plan.toml").write_text(text)
    o = command.Options(file=tmp_path / "plan.toml", out=tmp_path / "out")
    lines = plan_command.do_plan(o)
    (line,) = (line for line in lines if line.startswith("correlated noise: "))
    return line, read_config(o.out / "recommended.toml")


@pytest.mark.slow
def test_bands_are_written_where_they_gain(tmp_path):
    line, config = weighed(tmp_path)
    assert "groups of 'example' leave 0." in line and "not for you" not in line
    assert (config.noise.groups, config.noise.horizon) == ("example", 30.0)
    assert f": {config.noise.bands} groups" in line
    head = (tmp_path / "out" / "recommended.toml").read_text()
    assert f"# {line}.\n" in head and "its noise multiplier is" in line
    budget = trainers_plan(config, config.data.load("train", None))
    assert budget.step.bands.count == config.noise.bands
    assert budget.spent(300) <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon": 1.0}, "not for you, at best 2 groups of"),
        ({"train": 'noise = "gaussian"'}, "not weighed, as the file has 'noise'"),
    ],
)
def test_a_plan_without_bands_says_why(tmp_path, changes, said):
    line, config = weighed(tmp_path, **changes)
    assert said in line
    assert isinstance(config.noise, str)
