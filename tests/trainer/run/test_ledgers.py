"""Several ledgers: different runs are composed, copies share their beginning."""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import old_ledger
from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.accountant.questions.dominating_pair import shared_epoch
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.run.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.run.ledgers import read_ledgers
from jaxdp_episodic.trainer.run.store import RunStore
from training_runs import GROUPED, charged_run, flat_step

DELTA = 1e-5
STEP = flat_step()
BINS = jde.GaussianStep(
    jde.RandomAllocation("user", steps_per_epoch=4), noise_multiplier=2.0
)
SHUFFLED = jde.GaussianStep(
    jde.ShuffledEpochs("user", steps_per_epoch=4), noise_multiplier=2.0
)

CLASSES = jde.GaussianStep(
    jde.Poisson("class", sampling_probability=0.5), noise_multiplier=1.0
)


def new_run(path, step=STEP, *, num_steps=0, planned=50, delta=DELTA):
    budget = PrivacyBudget(step, 8.0, delta, planned, planned)
    return charged_run(path, budget, num_steps)


def gone_on(path, num_steps):
    """Charges like a process that continues the run, on the same machine."""
    return charged_run(path, None, num_steps)


def copied(path, name, num_steps):
    return gone_on(shutil.copy(path, path.with_name(name)), num_steps)


@pytest.fixture
def answer(capsys):
    def ask(*paths, options=()):
        named = itertools.chain.from_iterable(("--ledger", str(p)) for p in paths)
        code = cli.run(["epsilon", *named, "--json", *options])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return json.loads(printed.out)

    return ask


# --- Other runs, and copies of one ---


def test_two_runs_cost_their_composition(tmp_path, answer):
    other = flat_step(noise_multiplier=0.8)
    one = new_run(tmp_path / "one", num_steps=30)
    two = new_run(tmp_path / "two", other, num_steps=40)
    expected = jde.epsilon(jde.compose((STEP, 30), (other, 40)), delta=DELTA)
    said = answer(one, two)
    assert said["epsilon"] == pytest.approx(expected, rel=1e-9)
    # Plans add up.
    assert said["planned"] == {"epsilon": 16.0, "delta": 2 * DELTA}
    assert said["warnings"][-1].endswith("epsilon 16 at delta 2e-05 together")
    assert answer(two, one)["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert expected > max(answer(path)["epsilon"] for path in (one, two))
    # Equal steps of two runs are summed.
    three = new_run(tmp_path / "three", num_steps=12)
    assert read_ledgers([one, three]).run_charged() == (STEP, 42)


def test_copies_that_continued_share_their_beginning(tmp_path, answer):
    """Also if they charged the same number of steps on the same machine."""
    run = new_run(tmp_path / "run", num_steps=10)
    left = copied(run, "left", 5)
    right = copied(run, "right", 5)
    far = copied(right, "far", 7)
    assert read_ledgers([left, right]).run_charged() == (STEP, 20)
    every = [left, right, far, run]
    for order in itertools.permutations(every):
        assert read_ledgers(order).run_charged() == (STEP, 27)
    said = answer(*every)
    assert said["epsilon"] == jde.epsilon(STEP, num_steps=27, delta=DELTA)
    common = [text for text in said["warnings"] if "in common" in text]
    assert sorted(text.split()[4] for text in common) == ["10", "10", "15"]


def test_a_process_that_continues_beside_its_copy(tmp_path):
    path = new_run(tmp_path / "run")
    with contextlib.closing(RunStore(path)) as store:
        store.begin_session({})
        for number in range(13):
            if number == 10:
                files = [path, path.with_name("run-wal")]
                for file, name in zip(files, ("copy", "copy-wal"), strict=True):
                    shutil.copy(file, tmp_path / name)
            store.charge("phase 1", STEP)
    copy = gone_on(tmp_path / "copy", 4)
    assert read_ledgers([path, copy]).run_charged() == (STEP, 17)


def test_an_older_copy_is_contained_in_the_newer_one(tmp_path, answer):
    run = new_run(tmp_path / "run", num_steps=10)
    older = copied(run, "older", 0)
    gone_on(run, 6)
    with contextlib.closing(RunStore(older)) as store:
        store.begin_session({})  # opened without charges
    assert read_ledgers([older, run, run]).run_charged() == (STEP, 16)
    assert answer(older, run)["planned"] == {"epsilon": 8.0, "delta": DELTA}
    assert answer(run, run)["epsilon"] == answer(run)["epsilon"]


# --- Old ledgers: steps of each process; None is a process without a name ---


def test_a_truncated_charge_is_not_lost(tmp_path):
    run = old_ledger(tmp_path / "run.jsonl", STEP, [("a", 10)])
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(run.read_bytes() + b"1")
    assert read_ledgers([run, cut]).run_charged() == (STEP, 11)


@pytest.mark.parametrize(("step", "is_known"), [(STEP, True), (BINS, False)])
def test_charges_of_unknown_processes_are_counted(tmp_path, answer, step, is_known):
    """Two copies with the same bytes that released with different noise."""
    copies = [
        old_ledger(tmp_path / f"{name}.jsonl", step, [(None, 15)]) for name in "lr"
    ]
    ledgers = read_ledgers(copies)
    if is_known:
        assert ledgers.run_charged() == (STEP, 30)
        assert any("are counted twice" in text for text in answer(*copies)["warnings"])
    else:
        with pytest.raises(NotImplementedError, match="are of one run, and were"):
            ledgers.run_charged()


def test_a_third_copy_does_not_hide_unknown_charges(tmp_path):
    """It differs from both copies from the process without a name."""
    first = ("a", 10)
    left, right = (
        old_ledger(tmp_path / f"{name}.jsonl", BINS, [first, (None, 6)])
        for name in "lr"
    )
    for number in (4, 16):
        path = tmp_path / "other.jsonl"
        other = old_ledger(path, BINS, [first, ("b", number)])
        with pytest.raises(NotImplementedError, match="are of one run"):
            read_ledgers([other, left, right]).run_charged()


def test_one_name_and_two_beginnings_are_refused(tmp_path):
    run = old_ledger(tmp_path / "run.jsonl", STEP, [("a", 3)])
    other = old_ledger(tmp_path / "other.jsonl", STEP, [("a", 2)], delta=1e-4)
    with pytest.raises(LedgerError, match="same run name but different beginnings"):
        read_ledgers([run, other])


# --- Epochs ---


def counts(paths):
    """The count of each step, all ledgers together."""
    run, number = read_ledgers(paths).run_charged()
    if isinstance(run, jde.GaussianStep):
        return {run: number}
    return dict(zip(run.steps, run.counts, strict=True))


def seen(looks):
    """The step of an epoch with ``looks`` looks at its bins."""
    return shared_epoch(BINS, 4, looks)[0]


@pytest.mark.slow
def test_copies_that_diverge_within_an_epoch_share_it(tmp_path, answer):
    run = new_run(tmp_path / "run", BINS, num_steps=6)
    left, right, third = (copied(run, name, 3) for name in ("left", "right", "third"))
    # Steps 1 to 4; 5 to 8, the last two with two looks; and each copy's epoch of step
    # 9.
    assert counts([left, right]) == {BINS: 12, seen(2): 4}
    assert seen(2).noise_multiplier == pytest.approx(2 / math.sqrt(2), rel=1e-15)
    said = answer(left, right)
    expected = jde.epsilon(jde.compose((BINS, 12), (seen(2), 4)), delta=DELTA)
    assert said["epsilon"] == pytest.approx(expected, rel=1e-12)
    assert said["planned"]["epsilon"] == "inf"
    assert any(text.endswith("counted so: 1") for text in said["warnings"])
    for order in itertools.permutations([left, right, third]):
        assert counts(order) == {BINS: 16, seen(3): 4}
    # A copy of the left one that parted later, within the next epoch.
    after = copied(left, "after", 1)
    gone_on(left, 1)
    for order in itertools.permutations([left, right, after]):
        assert counts(order) == {BINS: 8, seen(2): 8}


@pytest.mark.parametrize(
    ("step", "common", "further", "expected"),
    [
        # Between epochs each copy has epochs of its own.
        (BINS, 8, (4, 4), {BINS: 16}),
        (BINS, 8, (4, 6), {BINS: 20}),
        # An epoch that one copy continued counts once.
        (BINS, 6, (0, 6), {BINS: 12}),
        # The planned end, 10 steps, is kept; beyond it whole epochs are charged.
        (BINS, 9, (1, 1), {BINS: 8, seen(2): 2}),
        (BINS, 9, (2, 1), {BINS: 8, seen(2): 4}),
        # In shuffled epochs the order does not matter.
        (SHUFFLED, 6, (1, 1), {SHUFFLED: 12}),
    ],
    ids=["between", "later", "continued", "planned", "beyond", "shuffled"],
)
def test_copies_of_a_run_of_epochs(tmp_path, step, common, further, expected):
    planned = 10 if common == 9 else 50
    run = new_run(tmp_path / "run", step, num_steps=common, planned=planned)
    names = zip(("left", "right"), further, strict=True)
    assert counts([copied(run, *name) for name in names]) == expected


@pytest.mark.parametrize("unit", ["user", "example"])
def test_bins_used_again_without_a_theorem_are_refused(tmp_path, unit):
    design = jde.MultistageSampling(
        *BINS.design.schemes, jde.Poisson("example", sampling_probability=0.5)
    )
    step = jde.GaussianStep(
        design if unit == "example" else BINS.design,
        noise_multiplier=2.0,
        clip_unit="user",
        privacy_unit=unit,
        neighboring_relation="add_remove" if unit == "example" else "replace_one",
    )
    run = new_run(tmp_path / "run", step, num_steps=6)
    left, right = (copied(run, name, 1) for name in ("left", "right"))
    with pytest.raises(NotImplementedError, match=f"2 uses .*{unit}.*covered"):
        read_ledgers([left, right]).run_charged()
    assert read_ledgers([left]).run_charged() == (step, 8)
    assert read_ledgers([run, left]).run_charged() == (step, 8)


@pytest.mark.parametrize(
    ("relation", "unit", "is_covered"),
    [
        ("zero_out", "class", True),  # an episode with a null class contributes 0
        ("zero_out", "example", False),
        ("add_remove", "class", False),
        ("replace_one", "class", False),
    ],
)
def test_several_looks_at_whole_episodes_are_covered(relation, unit, is_covered):
    episodes = jde.RandomAllocation("episode", steps_per_epoch=4)
    step = dataclasses.replace(
        GROUPED,
        sampling=dataclasses.replace(GROUPED.design, episodes=episodes),
        privacy_unit=unit,
        neighboring_relation=relation,
    )
    assert shared_epoch(step, 4, 1) == (step, 4)
    if is_covered:
        weaker, steps = shared_epoch(step, 3, 4)
        assert (weaker.noise_multiplier, steps) == (pytest.approx(0.5, rel=1e-15), 3)
        assert weaker.noise_multiplier < 0.5
    else:
        with pytest.raises(NotImplementedError, match="4 uses of the same allocation"):
            shared_epoch(step, 3, 4)


def log_ratios(points, shift):
    """log A of each coordinate: the loss that one look adds to a bin."""
    return shift * points - shift**2 / 2


@pytest.mark.few(1)
@pytest.mark.parametrize("looks", [2, 3])
def test_looks_at_the_same_bins_cost_at_most_the_claim(looks):
    """Against the definition: one space of all looks, those before the fork once."""
    rng = np.random.default_rng(7)
    step = dataclasses.replace(
        BINS,
        sampling=jde.RandomAllocation("user", steps_per_epoch=2),
        noise_multiplier=1.5,
    )
    shift, samples = 1 / 1.5, 400_000
    noise = rng.normal(size=(samples, 2, looks))
    for first in (looks, 1):  # number of looks at the first bin
        bins = log_ratios(noise, shift)
        sums = np.stack([bins[:, 0, :first].sum(-1), bins[:, 1].sum(-1)])
        ratio = np.exp(sums).mean(0)
        for epsilon in (0.5, 1.5):
            values = np.maximum(ratio - math.exp(epsilon), 0)
            true, error = values.mean(), values.std() / math.sqrt(samples)
            said = jde.delta(
                shared_epoch(step, 2, looks)[0], num_steps=2, epsilon=epsilon
            )
            # 5 standard errors: a false alarm in 3 million.
            assert true <= said + 5 * error
            if first == looks:
                assert abs(true - said) <= 5 * error
                # A plausible mistake: as many epochs with independent bins.
                fresh = jde.delta(step, num_steps=2 * looks, epsilon=epsilon)
                assert fresh < true - 5 * error


SIZED = dataclasses.replace(
    STEP,
    sampling=jde.WithoutReplacement("user", size=5),
    population=jde.Population.from_sizes(40),
)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"delta": 1e-6}, "delta, got 1e-05 in .*one and 1e-06 in .*two"),
        (
            {},
            {"step": dataclasses.replace(STEP, neighboring_relation="replace_one")},
            "neighboring_relation, got 'add_remove' in .*and 'replace_one' in",
        ),
        ({}, {"step": CLASSES}, "privacy_unit, got 'user' in .*one and 'class' in"),
        (
            {"step": SIZED},
            {
                "step": dataclasses.replace(
                    SIZED, population=jde.Population.from_sizes(50)
                )
            },
            "population, got .*one and .*two",
        ),
    ],
    ids=["delta", "relation", "unit", "sizes"],
)
def test_ledgers_that_differ_are_refused(tmp_path, capsys, first, second, words):
    one = new_run(tmp_path / "one", **first, num_steps=3)
    two = new_run(tmp_path / "two", **second, num_steps=2)
    ledgers = ["--ledger", str(one), "--ledger", str(two)]
    assert cli.run(["epsilon", *ledgers]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1
    with pytest.raises(ValueError, match=f"the same {words}") as error:
        _ = read_ledgers([one, two]).run_charged(), read_ledgers([one, two]).delta
    assert str(error.value) in found.err
    if "delta" in second:  # given for both
        assert cli.run(["epsilon", *ledgers, "--delta", "1e-7"]) == 0


def test_a_run_that_ended_early_is_reported_with_its_plan(tmp_path, answer, capsys):
    delta, planned = 1.0000012e-5, {"num_steps": 600, "epsilon": 8.0}
    noise = jde.calibrate_noise_multiplier(STEP, **planned, delta=delta)
    step = dataclasses.replace(STEP, noise_multiplier=noise)
    early = new_run(tmp_path / "early", step, num_steps=60, planned=600, delta=delta)
    said = answer(early)
    assert said["epsilon"] == jde.epsilon(step, num_steps=60, delta=delta) < 4
    assert said["planned"] == {"epsilon": 8.0, "delta": delta}
    first, second = said["warnings"]
    assert "60 steps are charged, epsilon 3.7" in first and "planned was 8" in first
    assert _validation.steps_are(1) == "1 step is"
    assert "did not depend on what it released" in second
    assert second.endswith("costs its whole plan: epsilon 8 at delta 1.0000012e-05")
    again = answer(early, options=["--delta", "1e-3"])
    assert again["epsilon"] < said["epsilon"] and again["warnings"] == said["warnings"]
    assert cli.run(["epsilon", "--ledger", str(early)]) == 0
    assert "planned was 8 at delta 1.0000012e-05" in capsys.readouterr().out
    gone_on(early, 540)
    assert answer(early)["warnings"] == []
    assert read_ledger(early).charged == 600


def test_a_step_with_bands_of_full_memory_is_read(tmp_path):
    step = jde.banded(STEP, jde.Bands(2, level="user", horizon=math.inf))
    assert read_ledger(new_run(tmp_path / "run", step, num_steps=3)).a_step == step
