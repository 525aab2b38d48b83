"""Class means, released instead of the total covariance."""

import dataclasses

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.config.training_start import contribution_norm
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.statistics.plda import (
    Start,
    _spread_of_new,
    class_projection,
    sums_by_class,
    whole_rows,
)
from jaxdp_episodic.trainer.statistics.terms import PRODUCT_STEPS, STEPS
from jaxdp_episodic.training import PrivateStatistics, StartConfig

CONFIG = StartConfig(mean=0.2, within=(0.3,), total=0.5, between="means")
RELATIONS = ("zero_out", "replace_one", "add_remove")
LAST = 2  # index of the statistic
MOST = STEPS**2


def table(features, sizes):
    tree = jde.Population(
        (np.array([len(sizes)]), np.asarray(sizes)), ("class", "example")
    )
    rows = np.asarray(features, np.float32)
    return ExampleTable(rows, None, tree, has_public_units=True)


def statistics(data, relation="zero_out", config=CONFIG, unit="example", **more):
    return PrivateStatistics(
        data,
        config,
        privacy_unit=unit,
        neighboring_relation=relation,
        **{"slots": int(data.population.children_counts[-1].max()), **more},
    )


def summed(own, state):
    return own._total("means", state, own._units.examples())


def test_the_sums_equal_their_definition():
    rng = np.random.default_rng(0)
    rows, classes = (
        rng.normal(size=(30, 3)).astype(np.float32),
        rng.integers(4, size=30),
    )
    center, whitening = rng.normal(size=3), rng.normal(size=(3, 3))
    white = rows / np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
    white = (white - center) @ whitening
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    expected = np.array([white[classes == k].sum(axis=0) for k in range(5)])
    for most, length in ((MOST, 1.0), (MOST // 2, np.sqrt(0.5))):
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


@pytest.mark.parametrize("relation", RELATIONS)
def test_one_example_changes_the_sums_by_the_accounted_sensitivity(relation):
    """Opposite rows are the farthest apart and attain the sensitivity."""
    one, two = (statistics(t, relation, slots=3) for t in pair_of_tables(relation))
    state = one.initial()
    moved = np.linalg.norm((summed(one, state) - summed(two, state)) / PRODUCT_STEPS)
    # The added noise over the accounted shift.
    step = dataclasses.replace(one.steps[LAST], noise_multiplier=1.3)
    noise = 1.3 * contribution_norm(step)
    plain = jde.GaussianStep(
        jde.Poisson("one", sampling_probability=1.0), noise_multiplier=noise / moved
    )
    claimed = jde.epsilon(step, num_steps=1, delta=1e-5)
    reached = jde.epsilon(plain, num_steps=1, delta=1e-5)
    assert 0.998 * claimed < reached <= claimed * (1 + 1e-9)


# --- The metric made of them ---

FEATURES, CLASSES, SIZE = 64, 20, 400


def drawn_sums(rng, spread, noise, classes=CLASSES):
    """Noised sums of classes; ``between`` is the variance of their means."""
    means = np.zeros((classes, FEATURES))
    means[:, : len(spread)] = rng.normal(size=(classes, len(spread))) * np.sqrt(spread)
    return SIZE * means + noise * rng.normal(size=means.shape)


def metric(sums, noise, shots=5):
    """The projection's matrix of inner products, without earlier whitening."""
    start = Start(
        np.zeros(FEATURES), np.float32(SIZE * len(sums)), np.eye(FEATURES), None
    )
    made = class_projection(start, sums, noise, FEATURES, shots).projection
    made = np.asarray(made, np.float64)
    return made @ made.T


@pytest.mark.parametrize("classes", [5, 64, pytest.param(200, marks=pytest.mark.slow)])
def test_leave_one_out_uses_some_of_many_classes(classes, monkeypatch):
    """The estimate from every class, by definition; from 64 it is as good."""
    rng, number = np.random.default_rng(0), 256
    means = rng.normal(size=(classes, number)) / np.arange(1, number + 1)
    along, beside = [], []
    for one in range(classes):
        others = np.delete(means, one, axis=0)
        middle = others.mean(axis=0)
        span = np.linalg.qr((others[1:] - others[0]).T)[0]
        apart = (means[one] - middle) * np.sqrt((classes - 1) / classes)
        along.append(np.sum(np.square(span.T @ apart)))
        beside.append(np.sum(np.square(apart)) - along[-1])
    spread = np.sum(np.square(means - means.mean(axis=0))) / (classes - 1)
    taken, svd = [], np.linalg.svd
    monkeypatch.setattr(np.linalg, "svd", lambda x, **k: taken.append(1) or svd(x, **k))
    found = _spread_of_new(means, 0.0)
    few = min(classes, 64)
    assert len(taken) == few
    errors = [np.std(x, ddof=1) / np.sqrt(few) for x in (along, beside)]
    exact = (
        min((np.mean(along) - errors[0]) / spread, 1.0),
        (np.mean(beside) + errors[1]) / (number - classes + 2),
    )
    np.testing.assert_allclose(found, exact, rtol=1e-9 if classes <= 64 else 0.2)


def test_directions_without_differences_keep_some_weight():
    """New classes may differ there: 0.015 of the variance within classes."""
    sums = drawn_sums(np.random.default_rng(0), np.full(3, 1e3), 0.0)
    values = np.linalg.eigvalsh(metric(sums, 0.0, shots=5))
    expected = 0.015 / (6 * 0.015 + 1) / (1 / 6)
    np.testing.assert_allclose(values[: FEATURES - 3] / values[-1], expected, rtol=1e-3)


def test_any_sums_make_a_finite_metric():
    for sums in (np.zeros((3, 5)), np.full((5, 5), 1e6)):
        start = Start(np.zeros(5), np.float32(0), np.eye(5), None)
        state = class_projection(start, sums, 0.0, 2, 0)
        assert np.isfinite(state.projection).all() and np.any(state.projection)


# --- Refusals ---


def test_bad_tables():
    rng = np.random.default_rng(0)
    for classes in (2, 6):
        data = table(rng.normal(size=(2 * classes, 5)), (2,) * classes)
        with pytest.raises(ValueError, match=rf"at least 3 .*\(5\), got {classes}"):
            statistics(data)
    data = table(rng.normal(size=(8, 5)), (2,) * 4)
    for unit in ("class", "person"):
        with pytest.raises(ValueError, match=f"privacy_unit='example', got {unit!r}"):
            statistics(data, unit=unit)
    private = dataclasses.replace(data, has_public_units=False)
    with pytest.warns(UserWarning, match="number of these units is not protected"):
        statistics(private, "add_remove")
    with pytest.raises(ValueError, match="shots"):
        statistics(data, shots=-1)
