"""Fewer paths: the worst one is kept, and rates are only rounded up."""

import functools

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import step
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Run
from jaxdp_episodic.accountant.questions import worst_path as paths

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")


def run_of(*losses):
    return Run(losses, (np.ones(1),) * len(losses))


def random_run(rng, num_paths, *, num_losses=1, shape=(), levels=6):
    """Losses with coarse random rates, so that equal and comparable paths occur."""

    def rate():
        return rng.integers(0, levels, size=(*shape, num_paths)) / (levels - 1)

    losses = (
        SampledGaussianLoss(rate(), rate(), 1 + np.round(rate()))
        for _ in range(num_losses)
    )
    return run_of(*losses)


def table(run):
    """(P, D) all fields of all losses."""
    num_paths = run.shape[-1]
    columns = [
        np.moveaxis(np.broadcast_to(field, (*field.shape[:-1], num_paths)), -1, 0)
        for loss in run.losses
        for field in loss.fields
    ]
    return np.concatenate([c.reshape(num_paths, -1) for c in columns], axis=1)


@pytest.mark.parametrize(("num_losses", "shape"), [(1, ()), (2, (2,))])
@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_undominated_paths_are_kept(num_losses, shape, seed):
    rng = np.random.default_rng(seed)
    run = random_run(rng, 60, num_losses=num_losses, shape=shape)
    rows = table(run)
    kept = paths.undominated_paths(run)
    at_most = np.all(rows[:, None] <= rows[None], axis=-1)
    assert at_most[:, kept].any(axis=1).all()
    among = at_most[np.ix_(kept, kept)]
    assert (among == np.eye(len(kept), dtype=bool)).all()


def test_giving_up_early_loses_no_path(monkeypatch):
    run = random_run(np.random.default_rng(1), 200, levels=50)
    front = paths.undominated_paths(run)
    monkeypatch.setattr(paths, "_MOST_COMPARISONS", 1)
    hasty = paths.undominated_paths(run)
    assert set(front) <= set(hasty) and len(hasty) > len(front)


def test_equal_paths_are_merged():
    one = np.ones(1)
    run = run_of(SampledGaussianLoss(one, np.full(5, 0.5), one))
    assert paths.undominated_paths(run).tolist() == [0]
    assert paths.equal_paths(run, 3).tolist() == [0, 1, 2, 3, 4]
    fewer, place, excess = paths.rounded_up(run, 3)
    assert (fewer.shape[-1], place.tolist(), excess) == (1, [0] * 5, 0.0)


@pytest.mark.parametrize("most", [1, 7, 50, 1000])
def test_rounding_goes_up_and_stays_within_the_number(most):
    rng = np.random.default_rng(7)
    rate, outer = np.exp(rng.uniform(-12, 0, size=(2, 400)))
    rate[:3] = 0.0, 1.0, np.nextafter(1, 0)
    one = np.ones(1)
    run = run_of(SwappedGaussianLoss(outer, rate, one * 2))
    fewer, place, excess = paths.rounded_up(run, most)
    before, after = table(run), table(fewer)[place]
    assert (after >= before).all() and (after <= np.maximum(before, 2.0)).all()
    assert (after[:, :2] <= 1).all()
    # A rate of 0 cannot be made equal to another one.
    assert fewer.shape[-1] <= most + (most == 1)
    with np.errstate(invalid="ignore"):
        assert np.nanmax(after / before) <= 1 + excess
    assert after[0, 1] == 0
    assert (excess == 0) == (most == 1000)


def test_the_worst_path_need_not_have_the_largest_renyi_bound():
    one, steps = np.ones(1), (np.full(1, 50.0),)
    question = EpsilonAt(np.array(np.log(1e-5)))

    def asked(method, *kept):
        rates = (np.array(r)[list(kept)] for r in ([0.3, 0.0154], [0.02, 0.5]))
        run = Run((AntipodalGaussianLoss(one, *rates, one),), steps)
        return float(paths.answer(question, [run], method).value)

    assert asked("rdp", 0) > 1.001 * asked("rdp", 1)
    first, second, both = (asked("exact", *kept) for kept in ((0,), (1,), (0, 1)))
    assert 1.02 * first < second and both == pytest.approx(second, rel=1e-9)


RATES = np.array([1e-6, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999, 1.0])


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("clip_unit", ["a", "b", "step"])
@pytest.mark.parametrize("kind", ["poisson", "without_replacement"])
def test_epsilon_never_falls_as_a_rate_grows(kind, clip_unit, relation):
    """The premise of keeping undominated paths only."""

    def scheme(name, rate):
        if kind == "poisson":
            return jde.Poisson(name, sampling_probability=rate)
        size = np.rint(1000 * np.maximum(rate, 1e-3))
        return jde.WithoutReplacement(name, size=size, population=1000)

    schemes = scheme("a", RATES[:, None]), scheme("b", RATES)
    made = step(0.8, *schemes, clip=clip_unit, relation=relation)
    values = np.asarray(rdp_epsilon(made, num_steps=50, delta=1e-8))
    slack = 1e-7 * values
    assert (np.diff(values, axis=0) >= -slack[1:]).all()
    assert (np.diff(values, axis=1) >= -slack[:, 1:]).all()
