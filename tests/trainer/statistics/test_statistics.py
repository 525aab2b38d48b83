"""Private statistics: sensitivities by enumeration, the metric, a run that resumes."""

import dataclasses
import functools

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import Witness, killed_to_the_end
from jaxdp_episodic.accountant.questions.budget import (
    PrivacyBudget,
    SpentAhead,
    plan_budget,
)
from jaxdp_episodic.trainer.config.training_parts import (
    NOISES,
    StartConfig,
    contribution_norm,
    statistics_steps,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import generator as random_generator
from jaxdp_episodic.trainer.gradient import noise as noise_module
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics import statistics as statistics_module
from jaxdp_episodic.trainer.statistics.plda import (
    COUNTED,
    Start,
    _spread_of_new,
    class_projection,
    second_moment,
    sum_of_rows,
    sums_by_class,
    symmetric_noise,
    weighed_projection,
    whole_rows,
)
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics
from jaxdp_episodic.trainer.statistics.terms import PRODUCT_STEPS, STEPS, Terms
from training_runs import GROUPED, KEY, adam, assert_same

ZEROED = dataclasses.replace(GROUPED, neighboring_relation="zero_out")
APART = np.sqrt(2)  # two contributions, at most
SHORT = StartConfig(mean=0.2, within=(0.3,), total=0.5, dimensions=2)


def linear(params, inputs):
    return inputs @ params["w"]


def gaussian_classes(sizes=(6,) * 30, features=5, seed=0):
    """Classes that differ in the first two coordinates and vary most in the last."""
    rng = np.random.default_rng(seed)
    spread = np.array([0.05] * (features - 1) + [1.0])
    rows = [
        np.r_[rng.normal(size=2), np.zeros(features - 2)]
        + spread * rng.normal(size=(size, features))
        for size in sizes
    ]
    ids = np.repeat(np.arange(len(sizes)), sizes)
    return ExampleTable.from_records(np.concatenate(rows), units={"class": ids})


def statistics(
    data=None, config=SHORT, relation="zero_out", unit="example", slots=6, **more
):
    return PrivateStatistics(
        gaussian_classes() if data is None else data,
        config,
        privacy_unit=unit,
        neighboring_relation=relation,
        slots=slots,
        **more,
    )


def released(own, noise=0.0, seed=0):
    """All statistics with one noise multiplier."""
    state = own.initial()
    for place in range(len(own.steps)):
        generator = np.random.default_rng([seed, place])
        key = bytes([seed, place] * 16)
        state = own.release(state, place, generator, key, noise)
    return state


# --- Sums ---


def test_the_sums_equal_their_definitions():
    rng = np.random.default_rng(0)
    rows, shares = np.float32(rng.normal(size=(7, 3))), rng.integers(1, 9, 7)
    unit = rows / np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
    expected = (unit / shares[:, None]).sum(axis=0) / np.sqrt(2)
    found = sum_of_rows(rows, shares) / PRODUCT_STEPS
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert COUNTED / PRODUCT_STEPS == pytest.approx(1 / np.sqrt(2), rel=1e-5)
    center, whitening = rng.normal(size=3), rng.normal(size=(3, 3))
    white = (unit - center) @ whitening
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    expected = sum(np.outer(v, v) / n for n, v in zip(shares, white, strict=True))
    found = second_moment(whole_rows(rows), Terms((), shares), whitening, center)
    np.testing.assert_allclose(found / PRODUCT_STEPS, expected, rtol=1e-4, atol=1e-5)


def length(numbers):
    """The squared norm of a sum, in Python integers, which do not overflow."""
    return sum(int(x) ** 2 for x in np.ravel(numbers))


@pytest.mark.parametrize("kind", NOISES)
def test_the_noise_is_independent_in_a_basis_of_symmetric_matrices(kind):
    """1,000 draws; each bound is five standard errors."""
    stream = random_generator(KEY)
    noise = np.array(
        [symmetric_noise(kind, 1e6, 3, stream) for _ in range(1_000)], float
    )
    noise *= 2e-6
    np.testing.assert_array_equal(noise, noise.transpose(0, 2, 1))
    basis = [noise[:, i, i] for i in range(3)]
    basis += [np.sqrt(2) * noise[:, i, j] for i, j in ((0, 1), (0, 2), (1, 2))]
    covariance = np.cov(np.stack(basis))
    np.testing.assert_allclose(np.diag(covariance), 4.0, rtol=5 * np.sqrt(2 / 1_000))
    rest = covariance - np.diag(np.diag(covariance))
    assert np.abs(rest).max() < 5 * 4.0 / np.sqrt(1_000)


def test_the_variances_of_discrete_noise_cover_what_is_claimed(monkeypatch):
    """On the diagonal, and half of it off the diagonal, plus 16 for the smoothing."""
    asked = []

    def sample(variance, count, generator):
        asked.append((variance, count))
        return np.zeros(count, np.int64)

    monkeypatch.setattr(noise_module, "sample_discrete_gaussian", sample)
    own = statistics(relation="replace_one")
    state = own.initial()
    for place in range(3):
        own.noised_sum(state, place, np.random.default_rng(0), KEY, 1.7)
    square = (1.7 * PRODUCT_STEPS) ** 2 / 2  # contributions are at most sqrt(2) apart
    counts = [6, 5, 10, 5, 10]
    for (variance, count), number in zip(asked, counts, strict=True):
        least = square / 2 if number == 10 else square
        assert count == number and least + 16 <= variance <= least * (1 + 1e-9) + 17


def test_sums_and_discrete_noise_are_integers():
    own, both = statistics(), []
    for multiplier in (0.0, 1.3):
        sums = [
            own.noised_sum(
                own.initial(), place, np.random.default_rng(0), KEY, multiplier
            )
            for place in range(3)
        ]
        both.append(np.concatenate([total.ravel() for total in sums]))
    for sums in both:
        np.testing.assert_array_equal(sums * PRODUCT_STEPS % 1, 0)
    plain = statistics(noise="gaussian")
    found = plain.noised_sum(plain.initial(), 0, np.random.default_rng(0), KEY, 1.3)
    normal = random_generator(KEY).standard_normal(6)
    np.testing.assert_allclose(found, both[0][:6] + 1.3 * normal, rtol=1e-12)


# --- Sensitivities ---


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("relation", "sizes", "slots"),
    [("zero_out", (5, 2, 0, 1), 6), ("add_remove", (5, 2, 3, 1), None)],
)
def test_pairs_are_disjoint_within_classes_and_uniform(relation, sizes, slots):
    """All pairs of a class are equally likely; 2,000 draws, five standard errors."""
    own = statistics(gaussian_classes(sizes), relation=relation, slots=slots)
    generator, counts = np.random.default_rng(0), np.zeros((11, 11))
    classes = np.repeat(np.arange(4), sizes)
    for _ in range(2_000):
        (first, second), weights, _ = own._terms("pairs", generator)
        both = np.concatenate([first, second])
        assert len(set(both.tolist())) == len(both)
        np.testing.assert_array_equal(classes[first], classes[second])
        np.testing.assert_array_equal(weights, 1.0)
        counts[first, second] += 1
    together = (counts + counts.T)[:5, :5][np.triu_indices(5, 1)] / 2_000
    # Two of six slots are paired with probability 1/5, and so are two of five examples.
    np.testing.assert_allclose(together, 0.2, atol=5 * 0.4 / np.sqrt(2_000))


ALONE, COUPLES = (dataclasses.replace(SHORT, pairs=p) for p in ("class", "people"))
MIXED = StartConfig(kind="mixed")


@pytest.mark.parametrize(
    ("config", "unit", "relation", "expected"),
    [
        (ALONE, "example", "add_remove", (1, APART, 1)),
        (ALONE, "example", "replace_one", (APART, APART, APART)),
        (ALONE, "example", "zero_out", (1, 1, 1)),
        (ALONE, "class", "add_remove", (1, 1, 1)),
        (ALONE, "class", "replace_one", (APART, APART, APART)),
        (ALONE, "class", "zero_out", (1, 1, 1)),
        *((pairs, "person", "zero_out", (1, 1, 1)) for pairs in (ALONE, COUPLES)),
        *((pairs, "person", "add_remove", (1, APART, 1)) for pairs in (ALONE, COUPLES)),
        *((pairs, "person", "replace_one", 3 * (APART,)) for pairs in (ALONE, COUPLES)),
        (MIXED, "example", "add_remove", (1, APART)),
        (MIXED, "example", "replace_one", (APART, APART)),
        (MIXED, "example", "zero_out", (1, 1)),
        (MIXED, "class", "add_remove", (1, 1)),
    ],
)
def test_the_accounted_sensitivity(config, unit, relation, expected):
    who = {"privacy_unit": unit, "neighboring_relation": relation}
    steps = statistics_steps(("class", "example"), config, **who)
    for step, moved in zip(steps, expected, strict=True):
        noise = 1.3 * contribution_norm(step)  # the added noise
        plain = jde.GaussianStep(
            jde.Poisson("one", sampling_probability=1.0), noise_multiplier=noise / moved
        )
        step = dataclasses.replace(step, noise_multiplier=1.3)
        found = jde.epsilon(step, num_steps=1, delta=1e-5)
        assert found == pytest.approx(
            jde.epsilon(plain, num_steps=1, delta=1e-5), rel=1e-9
        )


@pytest.mark.parametrize("number", [1, 3, 1_000])
def test_opposite_classes_keep_the_sensitivity(number):
    """The worst case, at sizes that do not divide the grid."""
    shares = np.full(number, number)
    for width in (1, 40):
        rows = np.tile(np.linspace(1.0, 1.3, width), (number, 1))
        total = np.append(sum_of_rows(rows, shares), COUNTED)
        other = np.append(sum_of_rows(-rows, shares), COUNTED)
        most = PRODUCT_STEPS**2
        for sums in (total, other):
            assert 0.999 * most < length(sums) <= most
        assert 0.999 * 2 * most < length(total - other) <= 2 * most
        turned = np.roll(np.eye(max(width, 2))[:1], 1, axis=1).repeat(number, 0)
        moments = [
            second_moment(whole_rows(x), Terms((), shares), np.eye(max(width, 2)))
            for x in (np.eye(max(width, 2))[:1].repeat(number, 0), turned)
        ]
        for moment in moments:
            assert 0.99 * most < length(moment) <= most
        assert 0.99 * 2 * most < length(moments[0] - moments[1]) <= 2 * most


@pytest.mark.parametrize("unit", ["example", "class"])
@pytest.mark.parametrize("kind", ["mean", "pairs", "all"])
def test_a_rows_contribution_depends_on_no_other_row(kind, unit):
    """Nor on its place: the sum of all rows equals those of single rows bit for bit."""
    own = statistics(gaussian_classes((6,) * 30), unit=unit)
    rng = np.random.default_rng(5)
    state = own.initial()._replace(
        mean=np.float32(rng.normal(size=5) / 5),
        whitening=np.float32(rng.normal(size=(5, 5))),
    )
    terms = own._terms(kind, rng)
    whole, alone = own._total(kind, state, terms), 0
    for place in range(len(terms.shares)):
        alone = alone + own._summed(kind, state, terms, slice(place, place + 1))
    np.testing.assert_array_equal(whole[:5], alone[:5])


def test_a_projected_example_depends_on_no_other():
    """So clip units do not interact after a start either."""
    data = gaussian_classes((6,) * 4)
    own = statistics(data)
    rng = np.random.default_rng(3)
    state = own.initial()._replace(
        mean=rng.normal(size=5).astype(np.float32),
        projection=rng.normal(size=(5, 2)).astype(np.float32),
    )
    changed = data.features.copy()
    changed[7] += 1e3
    tables = own, statistics(ExampleTable(changed, None, data.population))
    seen = [np.asarray(each.table(state).features) for each in tables]
    others = np.arange(24) != 7
    np.testing.assert_array_equal(seen[0][others], seen[1][others])
    assert np.abs(seen[0][7] - seen[1][7]).max() > 0.1


# --- Results ---


def weights(classes, noise, moment):
    """The weights of the projection's directions, without earlier whitening."""
    state = statistics().initial()
    state = weighed_projection(state, moment, noise, len(moment), classes)
    return np.linalg.norm(np.asarray(state.projection), axis=0)


def test_with_few_classes_and_much_noise_directions_keep_their_weight():
    """New classes may differ in directions without an observed signal."""
    moment = 100 * np.diag([0.7, 0.1, 0.1, 0.05, 0.05])
    many = weights(1_800, 0.0, moment)
    assert many[0] > 0.8 and many[1:].max() < 0.01
    unseen = [weights(c, 0.0, moment)[1] ** 2 for c in (2, 5, 18, 200)]
    assert unseen == sorted(unseen, reverse=True)
    assert unseen[1] == pytest.approx(0.5) and unseen[3] < 0.001
    noisy = [weights(1_800, s, moment)[4] ** 2 for s in (1.0, 100.0, 1e6)]
    assert noisy[0] < 0.01 and noisy == sorted(noisy)
    np.testing.assert_allclose(weights(1_800, 1e6, moment), 1.0, rtol=1e-3)


@pytest.mark.parametrize(("unit", "classes"), [("example", 60), ("class", 1_000)])
def test_the_number_of_classes_is_public_or_as_released(monkeypatch, unit, classes):
    given = []

    def projection(state, moment, noise, dimensions, classes):
        given.append(classes)
        return weighed_projection(state, moment, noise, dimensions, classes)

    monkeypatch.setattr(statistics_module.plda, "weighed_projection", projection)
    own = statistics(gaussian_classes((6,) * 60), unit=unit)
    state = own.initial()._replace(count=np.float32(1_000))
    own.release(state, len(own.steps) - 1, np.random.default_rng(0), KEY, 1.0)
    assert given == [classes]


def singular(data):
    features = data.features @ np.diag(np.float32([1, 1, 0, 0, 0]))
    features[:, 4] = 2 * features[:, 0]
    return ExampleTable(features, None, data.population)


def nobody(data):
    tree = jde.Population((np.array([2]), np.array([0, 0])), ("class", "example"))
    return ExampleTable(np.zeros((0, 5), np.float32), None, tree)


@pytest.mark.parametrize(
    ("change", "noise", "places"),
    [
        (lambda data: data, 1e4, (0, 1, 2)),  # pure noise
        (lambda data: data, 0.1, (1, 2)),  # the mean was dropped
        (singular, 0.0, (0, 1, 2)),
        (nobody, 1.0, (0, 1, 2)),
    ],
)
def test_a_metric_is_finite(change, noise, places):
    own = statistics(change(gaussian_classes()))
    state = own.initial()
    for place in places:
        generator, key = np.random.default_rng(place), bytes([place] * 32)
        state = own.release(state, place, generator, key, noise)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in state)
    assert np.asarray(state.projection).any() and state.projection.shape == (5, 2)


MIX = {"kind": "mixed"}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (MIX | {"pooled": 1.0}, "pooled must lie in"),
        (MIX | {"slopes": 64}, "slopes"),
        (MIX | {"target_bound": -1.0}, "target_bound"),
        ({"between": "median"}, r"between .*'total'.*'means'.*'median'"),
        ({"mean": 0.5}, "must sum to 1"),
        ({"within": (0.3, -0.1)}, "within"),
        ({"share": 1.0}, "share must lie in"),
        ({"within": (0.35, np.inf)}, "within must be > 0 and finite"),
        ({"kind": "lda"}, "plda"),
    ],
    ids=str,
)
def test_bad_configs(fields, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        StartConfig(**fields)


def test_bad_tables():
    alone = gaussian_classes((1,) * 8)
    with pytest.raises(ValueError, match="no class has a pair of different"):
        released(statistics(alone))
    assert np.asarray(released(statistics(alone), noise=1.0).projection).any()
    with pytest.raises(
        ValueError,
        match="population of 'example' must be a public bound, at least the 6",
    ):
        statistics(slots=5)
    with pytest.raises(ValueError, match="privacy_unit"):
        statistics(unit="step")
    with pytest.raises(ValueError, match="at most 4096 features"):
        statistics(gaussian_classes((2,) * 2, features=4097), slots=2)


# --- Class means, released instead of the total covariance ---

MEANS = dataclasses.replace(SHORT, between="means", dimensions=None)


def table(features, sizes):
    tree = jde.Population(
        (np.array([len(sizes)]), np.asarray(sizes)), ("class", "example")
    )
    rows = np.asarray(features, np.float32)
    return ExampleTable(rows, None, tree, has_public_units=True)


def test_the_sums_of_classes_equal_their_definition():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 3)).astype(np.float32)
    classes = rng.integers(4, size=30)
    center, whitening = rng.normal(size=3), rng.normal(size=(3, 3))
    white = rows / np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
    white = (white - center) @ whitening
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    expected = np.array([white[classes == k].sum(axis=0) for k in range(5)])
    for most, length in ((STEPS**2, 1.0), (STEPS**2 // 2, np.sqrt(0.5))):
        found = sums_by_class(whole_rows(rows), classes, 5, most, whitening, center)
        found = found / PRODUCT_STEPS / length
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def pair_of_tables(relation):
    """Two tables that differ in the last example, which is missing or negated."""
    features = np.random.default_rng(1).normal(size=(12, 5))
    features[-1] = (1, 0, 0, 0, 0)
    data = table(features, (3,) * 4)
    if relation == "replace_one":
        features[-1] *= -1
        return data, table(features, (3,) * 4)
    return data, table(features[:-1], (3, 3, 3, 2))


@pytest.mark.parametrize("relation", ["zero_out", "replace_one", "add_remove"])
def test_one_example_changes_the_sums_by_the_accounted_sensitivity(relation):
    """Opposite rows are the farthest apart and attain the sensitivity."""
    one, two = (
        statistics(t, MEANS, relation, slots=3) for t in pair_of_tables(relation)
    )
    sums = [s._total("means", s.initial(), s._units.examples()) for s in (one, two)]
    moved = np.linalg.norm((sums[0] - sums[1]) / PRODUCT_STEPS)
    # The added noise over the accounted shift.
    step = dataclasses.replace(one.steps[-1], noise_multiplier=1.3)
    noise = 1.3 * contribution_norm(step)
    plain = jde.GaussianStep(
        jde.Poisson("one", sampling_probability=1.0), noise_multiplier=noise / moved
    )
    claimed = jde.epsilon(step, num_steps=1, delta=1e-5)
    reached = jde.epsilon(plain, num_steps=1, delta=1e-5)
    assert 0.998 * claimed < reached <= claimed * (1 + 1e-9)


@pytest.mark.parametrize("classes", [3, 5, 64, 200])
def test_the_spread_of_a_new_class_leaves_every_class_out(classes):
    """The estimate by definition, from one decomposition; two means may be equal."""
    rng, number = np.random.default_rng(0), 256
    means = rng.normal(size=(classes, number)) / np.arange(1, number + 1)
    means[classes // 200] = means[0]
    along, beside = [], []
    for one in range(classes):
        others = np.delete(means, one, axis=0) - means[one]
        apart = -others.mean(axis=0) * np.sqrt((classes - 1) / classes)
        others -= others.mean(axis=0)
        near = np.linalg.lstsq(others.T, apart, rcond=1e-9)[0] @ others
        along.append(np.sum(np.square(near)))
        beside.append(np.sum(np.square(apart)) - along[-1])
    spread = np.trace(np.cov(means.T))
    errors = [np.std(x, ddof=1) / np.sqrt(classes) for x in (along, beside)]
    first = np.clip((np.mean(along) - errors[0]) / spread, 0.0, 1.0)
    exact = first, (np.mean(beside) + errors[1]) / (number - classes + 2)
    np.testing.assert_allclose(_spread_of_new(means, 0.0), exact, rtol=1e-9)


def test_directions_without_differences_keep_some_weight():
    """New classes may differ there: 0.015 of the variance within classes."""
    sums = np.zeros((20, 64))  # of 400 examples each
    sums[:, :3] = 400 * np.sqrt(1e3) * np.random.default_rng(0).normal(size=(20, 3))
    start = Start(np.zeros(64), np.float32(400 * 20), np.eye(64), None)
    made = np.float64(class_projection(start, sums, 0.0, 64, 5).projection)
    values = np.linalg.eigvalsh(made @ made.T)
    expected = 0.015 / (6 * 0.015 + 1) / (1 / 6)
    np.testing.assert_allclose(values[:61] / values[-1], expected, rtol=1e-3)


def test_any_sums_make_a_finite_metric():
    for sums in (np.zeros((3, 5)), np.full((5, 5), 1e6)):
        start = Start(np.zeros(5), np.float32(0), np.eye(5), None)
        state = class_projection(start, sums, 0.0, 2, 0)
        assert np.isfinite(state.projection).all() and np.any(state.projection)


def test_bad_tables_of_class_means():
    rng = np.random.default_rng(0)
    for classes in (2, 6):
        data = table(rng.normal(size=(2 * classes, 5)), (2,) * classes)
        with pytest.raises(ValueError, match=rf"at least 3 .*\(5\), got {classes}"):
            statistics(data, MEANS, slots=2)
    data = table(rng.normal(size=(8, 5)), (2,) * 4)
    for unit in ("class", "person"):
        with pytest.raises(ValueError, match=f"privacy_unit='example', got {unit!r}"):
            statistics(data, MEANS, unit=unit)
    private = dataclasses.replace(data, has_public_units=False)
    with pytest.warns(UserWarning, match="number of these units is not protected"):
        statistics(private, MEANS, "add_remove")
    with pytest.raises(ValueError, match="shots"):
        statistics(data, MEANS, shots=-1)


# --- The budget of a run that begins with statistics ---


def test_shares_divide_one_budget():
    steps = statistics().steps
    before = [(step, share) for step, share in zip(steps, (0.2, 0.3, 0.5), strict=True)]
    plan = plan_budget(ZEROED, epsilon=2.0, delta=1e-5, num_steps=0, before=before)
    assert plan.num_steps == plan.permitted_steps == 3
    assert 1.999 < plan.spent(3) <= 2.0
    squares = np.array([float(s.noise_multiplier) ** -2.0 for s in plan.before])
    np.testing.assert_allclose(squares / squares.sum(), (0.2, 0.3, 0.5), rtol=1e-6)
    np.testing.assert_allclose(plan.spent(np.arange(2)), [0.0, plan.spent(1)])


def test_epsilon_along_a_run_is_never_too_small():
    first = tuple(
        dataclasses.replace(step, noise_multiplier=3.0) for step in statistics().steps
    )
    step = dataclasses.replace(ZEROED, noise_multiplier=2.0)
    budget = PrivacyBudget(step, 1e9, 1e-5, 17, 17, first)
    ahead = SpentAhead(budget)
    found = [ahead.at(step) for step in range(1, 18)]
    exact = np.asarray(budget.spent(np.arange(1, 18)))
    np.testing.assert_allclose(found[:3], exact[:3], rtol=1e-9)
    np.testing.assert_allclose(found[3:10], exact[9], rtol=1e-9)
    np.testing.assert_allclose(found[10:], exact[16], rtol=1e-9)


@pytest.mark.parametrize(
    ("shares", "num_steps"),
    [((0.6, 0.6), 0), ((0.5, 0.5), 3), ((0.5, 0.0), 3), ((0.5, 0.5), None)],
)
def test_bad_shares(shares, num_steps):
    before = list(zip(statistics().steps, shares, strict=False))
    with pytest.raises(ValueError, match="shares|num_steps"):
        plan_budget(ZEROED, epsilon=2.0, delta=1e-5, num_steps=num_steps, before=before)


# --- A run ---


def run(*, num_steps=4, seed=1, budget=None, **changes):
    own = statistics()
    if budget is None:
        before = tuple(dataclasses.replace(s, noise_multiplier=0.3) for s in own.steps)
        total = len(before) + num_steps
        budget = PrivacyBudget(
            dataclasses.replace(ZEROED, noise_multiplier=0.5),
            1e9,
            1e-5,
            total,
            total,
            before,
        )
    learner = ProtoNet(linear, ways=3, distance="cosine")
    arguments = {
        "data": gaussian_classes(),
        "budget": budget,
        "shots": 1,
        "optimizer": adam(0.05),
        "l2_clip_norm": 0.5,
        "seed": seed,
        "start": own,
        **changes,
    }
    return Trainer(learner, {"w": np.eye(2, dtype=np.float32)}, **arguments)


def test_every_statistic_has_noise_and_pairs_of_its_own(monkeypatch):
    """No other statistic, and no other run without a seed, has the same."""
    used, noised_sum = [], PrivateStatistics.noised_sum

    def noted(own, state, index, generator, key, noise):
        used.extend((key, generator.bytes(32)))
        assert noise == 0.3  # as accounted
        return noised_sum(own, state, index, generator, key, noise)

    monkeypatch.setattr(PrivateStatistics, "noised_sum", noted)
    for one in (run(seed=None), run(seed=None)):
        for _ in one.budget.before:
            one.step()
    assert len(set(used)) == len(used) == 12


def test_a_run_of_statistics_alone(tmp_path):
    trainer = run(num_steps=0)
    assert trainer.run["noise"] == "discrete"
    records = trainer.train(tmp_path)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    content = read_ledger(tmp_path / "run.sqlite")
    assert content.groups == tuple((step, 1) for step in trainer.budget.before)
    step, number = content.run_charged()
    assert number is None
    spent = jde.epsilon(step, delta=1e-5)
    assert spent == pytest.approx(trainer.budget.spent(3), rel=1e-12)
    assert records[-1]["epsilon"] == pytest.approx(spent)
    assert isinstance(trainer.state.start, Start)
    assert np.asarray(trainer.params["start"]["projection"]).any()


@pytest.mark.slow
def test_epochs_after_statistics_begin_with_the_first_step_that_draws(tmp_path):
    """Three statistics, then 2.5 epochs of four steps, interrupted within one."""

    def stop(progress):
        if progress.step == 9:
            raise KeyboardInterrupt

    own = run(num_steps=10)
    bins = jde.RandomAllocation("episode", steps_per_epoch=4)
    step = dataclasses.replace(
        ZEROED, sampling=dataclasses.replace(ZEROED.design, episodes=bins)
    )
    budget = dataclasses.replace(own.budget, step=step)
    whole, part, rest = (run(budget=budget) for _ in range(3))
    sizes = [
        sum(int(block.unit_mask.sum()) for block in whole.draw_blocks(n))
        for n in range(4, 14)
    ]
    assert sum(sizes[:4]) == sum(sizes[4:8]) == 10 and len(set(sizes)) > 1
    whole.train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        part.train(tmp_path / "parts", checkpoint_every=2, on_step=stop)
    content = read_ledger(tmp_path / "parts" / "run.sqlite")
    assert (content.charged, content.owed) == (9, 11)
    assert rest.resume(tmp_path / "parts") in (8, 9)
    rest.train(tmp_path / "parts")
    assert_same(whole, rest)
    content = read_ledger(tmp_path / "parts" / "run.sqlite")
    assert content.charged == content.owed == content.planned == 13
    steps, _ = content.run_charged()
    spent = jde.epsilon(steps, delta=1e-5)
    assert spent == pytest.approx(budget.spent(13), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, None])
def test_killed_again_and_again_each_sum_is_charged_and_released_once(
    tmp_path, monkeypatch, seed
):
    witness = Witness(monkeypatch)
    make = functools.partial(run, seed=seed)
    last, folder, died = killed_to_the_end(make, tmp_path / "run", 14)
    assert died > 1
    assert [count for _, count in read_ledger(folder).groups] == [1, 1, 1, 4]
    if seed is None:
        assert witness.complaints([folder], 7, crashes=died) == []
    else:
        whole = run()
        whole.train(tmp_path / "whole")
        assert_same(whole, last)


def test_statistics_must_be_those_of_the_budget():
    with pytest.raises(ValueError, match="budget.before must be the steps"):
        run(start=None)
    with pytest.raises(ValueError, match="start must have noise='gaussian'"):
        run(noise="gaussian")
    with pytest.raises(ValueError, match="noise must be one of"):
        statistics(noise="laplace")
    with pytest.raises(ValueError, match="start must be made of the run's data"):
        run(start=statistics(gaussian_classes(seed=1)))
