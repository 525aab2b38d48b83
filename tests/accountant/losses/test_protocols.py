"""Methods answer mechanisms with the protocols they need, and refuse others.

Also what mechanisms state about their two directions.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.losses.allocated import AllocatedLoss
from jaxdp_episodic.accountant.losses.gaussian import (
    SampledGaussianLoss,
    gaussian_tails,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Moments,
    Nodes,
    Profile,
    Quadrature,
)
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.rdp import LARGER, log_moment, rdp_bound
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Group, Run
from oracles.mechanisms import SHIPPED, SIZE, concrete_kinds

METHODS = ("rdp", "exact", "pld")


def shipped(*protocols, but=()):
    kinds = [kind for kind in SHIPPED if all(issubclass(kind, p) for p in protocols)]
    kinds = [kind for kind in kinds if not issubclass(kind, but)]
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.__name__)


@dataclass(frozen=True)
class ProfileAlone(Profile):
    """The Gaussian mechanism with its profile only."""

    shift: np.ndarray
    is_symmetric = True

    def hints(self):
        return Hints.unsampled(self.shift)

    def log_tails(self, u):
        tails = gaussian_tails(self.shift, u)
        return tails, tails


@dataclass(frozen=True)
class MomentsAlone(Moments):
    """The Gaussian mechanism with its moments only."""

    shift: np.ndarray
    is_symmetric = True

    def hints(self):
        return Hints.unsampled(self.shift)

    def log_excess(self, t, rule):
        one = np.ones_like(t)
        return SampledGaussianLoss(one, one, self.shift + 0 * t).log_excess(t, rule)


class Both(ProfileAlone, MomentsAlone):
    """Profile and moments, but no nodes."""


def run_of(kind, *, steps=1.0):
    return Run((kind(np.ones(1), np.ones(1)),), (np.full(1, steps),))


def test_mechanisms_without_a_protocol_are_refused_by_name():
    run_of(MomentsAlone).refuse("rdp")
    for method in METHODS:
        message = f"ProfileAlone lacks Moments.*{method}"
        with pytest.raises(NotImplementedError, match=message):
            run_of(ProfileAlone).refuse(method)
    for method in METHODS[1:]:
        message = "MomentsAlone is known by its Rényi"
        with pytest.raises(NotImplementedError, match=message):
            run_of(MomentsAlone).refuse(method)
    for lacking in (Profile, Moments, Nodes):
        with pytest.raises(TypeError, match="abstract"):
            lacking(np.ones(1))


def test_profile_and_moments_are_enough():
    """Several steps without nodes get the certified upper end."""
    with using_engine("numpy"):  # the kernels of this mechanism are NumPy's
        question = EpsilonAt(np.full(1, np.log(1e-6)))
        same = functools.partial(SampledGaussianLoss, np.ones(1))
        run, known = run_of(Both, steps=5.0), run_of(same, steps=5.0)
        for method in METHODS:
            run.refuse(method)
        exact = exact_answer(question, known)
        found = exact_answer(question, run)
        assert not exact.is_certified.any() and found.is_certified.all()
        low, high = pld_bounds(question, run)
        assert low <= exact.value <= high == found.value
        assert high - low < 1.1e-4 * high  # the target width is 1e-4
        bounds = (rdp_bound(question, one)[0] for one in (run, known))
        np.testing.assert_allclose(*bounds, rtol=1e-15)


def test_a_mechanism_must_say_whether_it_is_symmetric():
    """A wrong default would give an epsilon that is too small."""

    @dataclass(frozen=True)
    class Silent(Moments):
        def hints(self):
            return Hints.unsampled(self.outer_rate)

        def log_excess(self, t, rule):
            return (t,)

    with pytest.raises(TypeError, match="is_symmetric"):
        Silent(np.ones(1))


def test_every_mechanism_is_listed_and_states_its_symmetry():
    """In its own class: an inherited statement may be about other profiles."""
    kinds = concrete_kinds()
    assert kinds == set(SHIPPED)
    assert all(isinstance(vars(kind).get("is_symmetric"), bool) for kind in kinds)


@shipped(Profile)
def test_symmetric_mechanisms_have_equal_profiles(kind):
    loss, thresholds = SHIPPED[kind], np.array([1e-6, 1e-3, 0.03, 0.3, 1.0, 4.0])
    with np.errstate(all="ignore"):  # as the engine calls it
        tails = [loss.log_tails(np.full(loss.shape, u)) for u in thresholds]
    forward, backward = (np.stack(one) for one in zip(*tails, strict=True))
    if loss.is_symmetric:
        np.testing.assert_array_equal(forward, backward)
    else:
        assert not np.allclose(np.exp(forward), np.exp(backward), rtol=1e-6, atol=0)


ORDERS = np.array([1.01, 1.5, 2.0, 8.0, 200.0, 1000.0])
QUADRATURE = Quadrature(32, 16)


def excess(loss, t, direction):
    rule = MomentRule(direction, QUADRATURE)
    with np.errstate(all="ignore"):
        return loss.log_excess(np.full(loss.shape, t), rule)[0]


@shipped(Moments)
def test_forward_is_the_larger_moment_where_stated(kind):
    """Method "rdp" uses the forward moment only, so otherwise epsilon is too small."""
    loss = SHIPPED[kind]
    for t in ORDERS - 1:
        forward, backward = (excess(loss, t, d) for d in ("forward", "backward"))
        group = Group(
            loss.map(lambda a: np.broadcast_to(a, (1, SIZE))), np.ones((1, SIZE))
        )
        rule = MomentRule(LARGER, QUADRATURE)
        with np.errstate(all="ignore"):
            (least,) = log_moment(np.full(SIZE, t), (group,), rule)
        rounding = 2e-10 + 1e-12 * np.abs(forward)  # of quadratures, in logarithms
        if loss.is_symmetric:
            # equal numbers, added in another order
            np.testing.assert_allclose(forward, backward, rtol=1e-13, atol=1e-13)
        elif loss.forward_is_larger:
            assert np.all(forward >= backward - rounding)
        for one in (forward, backward):
            expected = np.logaddexp(0, one + np.log(loss.outer_rate))
            assert np.all(least >= expected * (1 - 2e-10))


@shipped(Moments, Profile, but=AllocatedLoss)
def test_moments_are_those_of_the_profiles_in_either_direction(kind):
    """Formula (1) of docs/theory.md, by a trapezoidal rule accurate to 1e-3."""
    size = SIZE // 3  # the first of them are of all kinds
    loss = SHIPPED[kind].map(lambda a: np.broadcast_to(a, (SIZE,))[:size])
    near, far = np.geomspace(1e-11, 1, 2500), np.arange(1, 60, 0.03)[1:]
    u = np.concatenate([[0.0], near, far])
    many = loss.map(lambda a: np.tile(a, u.size))
    with np.errstate(all="ignore"):
        (one, _), (other, _) = many.log_tails(np.repeat(u, size))
    profiles = [a.reshape(-1, size) - np.log(loss.outer_rate) for a in (one, other)]
    for t in (0.3, 2.0):
        for direction, (h, k) in (("forward", profiles), ("backward", profiles[::-1])):
            terms = np.exp(t * u[:, None] + h) + np.exp(-(1 + t) * u[:, None] + k)
            expected = t * (1 + t) * np.trapezoid(terms, u, axis=0)
            found = np.exp(excess(loss, t, direction))
            np.testing.assert_allclose(found, expected, rtol=1e-3)
