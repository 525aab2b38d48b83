"""Our accountant dressed as those of the peers, for the peers' own test suites.

A stand-in takes the arguments of the class that it stands in for, answers by ours, and
remembers what was asked, so that an answer that a test did not expect can be compared
with the peer's own: see `verdicts`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import (
    RELATIONS,
    EpisodicAccountant,
)
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event
from jaxdp_episodic.accountant.questions import trial_counts
from jaxdp_episodic.accountant.questions.tuning import curve_to_epsilon

Relation = dp_accounting.NeighboringRelation
TheirRdp = rdp_privacy_accountant.RdpAccountant
TheirPld = pld_privacy_accountant.PLDAccountant
# Rényi order 1 is taken as this one, whose divergence is larger.
LEAST_ORDER = 1 + 1e-8


@dataclass
class Asked:
    """A question of a test, and our answer.

    Attributes:
      ours: the answer.
      theirs: asks the peer's own accountant; True: on a finer grid.
    """

    ours: float
    theirs: Callable[[bool], float]


ASKED: list[Asked] = []
"""What the running test has asked."""

NAMES = {name: member for member, name in RELATIONS.items()}
# What our messages begin with, and what a test looks for instead.
WORDS = {
    "sampling_probability must": "Sampling rate",
    "noise_multiplier must": "Noise multiplier must be non-negative",
    "step_counts must": "non-negative",
    "noise_parameter must": "noise_parameter must be in",
    "num_buckets must": "num_buckets must be >= 1",
}


@contextlib.contextmanager
def reworded() -> Iterator[None]:
    """Our refusals in the words of the peer: the same error, another message."""
    try:
        yield
    except ValueError as error:
        for ours, theirs in WORDS.items():
            if ours in str(error):
                raise ValueError(f"{theirs}: {error}") from error
        raise


# --- dp_accounting ---


class _StandIn(EpisodicAccountant):
    """What both stand-ins share."""

    def _remember(self, make: Callable[[bool], Any]) -> None:
        self._make, self._composed = make, []

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        with reworded():
            read = self._as_ours(event)
            problem = super()._maybe_compose(read, count, do_compose)
        if problem is not None:
            words = problem.error_message
            for name, member in NAMES.items():
                words = words.replace(f"'{name}'", f"`{member.name}`")
            return self.CompositionErrorDetails(problem.invalid_event, words)
        if do_compose:
            self._composed.append((event, count))
        return None

    def _as_ours(self, event: Any) -> Any:
        return event

    def get_epsilon(self, target_delta: float) -> float:
        """Ours, remembered."""
        return self._noted("get_epsilon", target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Ours, remembered."""
        return self._noted("get_delta", target_epsilon)

    def _noted(self, name: str, target: float) -> float:
        ours = getattr(EpisodicAccountant, name)(self, target)
        composed = list(self._composed)

        def theirs(finer: bool) -> float:
            with their_functions():
                accountant = self._make(finer)
                for event, count in composed:
                    accountant.compose(event, count)
                return float(getattr(accountant, name)(target))

        ASKED.append(Asked(ours, theirs))
        return ours


class RdpStandIn(_StandIn):
    """For ``RdpAccountant``: Rényi-DP at the same orders, its default ones too."""

    def __init__(
        self,
        orders: Any = None,
        neighboring_relation: Any = Relation.ADD_OR_REMOVE_ONE,
    ) -> None:
        grid = rdp_privacy_accountant.DEFAULT_RDP_ORDERS if orders is None else orders
        grid = np.asarray(grid, np.float64)
        super().__init__(neighboring_relation, "rdp", orders=grid)

        def make(finer: bool) -> Any:
            fine = np.linspace(1.02, 64, 800) if finer and orders is None else []
            return TheirRdp(np.unique([*fine, *grid]).tolist(), neighboring_relation)

        self._remember(make)

    @property
    def _rdp(self) -> np.ndarray:
        return self.rdp

    @property
    def _extra_delta(self) -> float:
        return EpisodicAccountant.get_delta(self, math.inf)

    def _as_ours(self, event: Any) -> Any:
        """Under replacement its noise is over the sensitivity, two norms."""
        replaces = self.neighboring_relation is Relation.REPLACE_ONE
        return over_two_norms(event) if replaces else event


def over_two_norms(event: Any) -> Any:
    """The event with the noise of its Gaussians, over two norms, said over one."""
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(2 * event.noise_multiplier)
    if isinstance(event, dp_event.ComposedDpEvent):
        return dp_event.ComposedDpEvent([over_two_norms(e) for e in event.events])
    inner = getattr(event, "event", None)
    if isinstance(inner, dp_event.DpEvent):
        return attrs.evolve(event, event=over_two_norms(inner))
    return event


class PldStandIn(_StandIn):
    """For ``PLDAccountant``: exact; the discretization interval is not needed."""

    def __init__(
        self,
        neighboring_relation: Any = Relation.ADD_OR_REMOVE_ONE,
        value_discretization_interval: float = 1e-4,
    ) -> None:
        super().__init__(neighboring_relation, "exact")

        def make(finer: bool) -> Any:
            interval = value_discretization_interval / (4 if finer else 1)
            return TheirPld(
                neighboring_relation, value_discretization_interval=interval
            )

        self._remember(make)

    @property
    def _contains_non_dp_event(self) -> bool:
        return self._is_non_private

    def get_true_positive_rates(self, false_positive_rates: Any) -> Any:
        """Ours."""
        if self._is_non_private:
            return np.ones(np.shape(false_positive_rates))[()]
        return jde.true_positive_rate(
            self.run, false_positive_rate=false_positive_rates
        )

    def get_gdp_parameter_estimate(self, false_positive_rates: Any = None) -> float:
        """Ours: mu of the whole curve, whichever rates were asked for."""
        return math.inf if self._is_non_private else float(jde.gdp_mu(self.run))


# --- Functions of dp_accounting's RDP module that its tests call ---


def log_a(q: float, sigma: float, alpha: float) -> float:
    """For ``_compute_log_a``: ``alpha - 1`` times the RDP of a sampled Gaussian."""
    return (alpha - 1) * float(sampled_rdp(q, sigma, [alpha])[0])


def sampled_rdp(q: float, noise_multiplier: float, orders: Any) -> np.ndarray:
    """For ``_compute_rdp_poisson_subsampled_gaussian``."""
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=q),
        noise_multiplier=noise_multiplier,
    )
    grid = np.maximum(np.asarray(orders, np.float64), LEAST_ORDER)
    return np.asarray(jde.rdp(step, grid))


def compute_epsilon(orders: Any, rdp: Any, delta: float) -> tuple[float, float]:
    """For ``compute_epsilon``: the conversion at each order, and the best of them."""
    grid = np.maximum(np.asarray(orders, np.float64), LEAST_ORDER)
    values = np.array(
        [
            curve_to_epsilon([a], [r], delta=delta)
            for a, r in zip(grid, rdp, strict=True)
        ]
    )
    best = int(np.argmin(values))
    return float(values[best]), float(orders[best])


def compute_delta(orders: Any, rdp: Any, epsilon: float) -> tuple[float, float]:
    """For ``compute_delta``: the smallest delta at which our epsilon is no larger."""
    grid = np.maximum(np.asarray(orders, np.float64), LEAST_ORDER)
    curve = np.asarray(rdp, np.float64)
    low, high = -740.0, -1e-16
    for _ in range(100):
        middle = (low + high) / 2
        value = curve_to_epsilon(grid, curve, delta=math.exp(middle))
        low, high = (low, middle) if value <= epsilon else (middle, high)
    each = [
        curve_to_epsilon([a], [r], delta=math.exp(high))
        for a, r in zip(grid[-50:], curve[-50:], strict=True)
    ]
    best = len(grid) - len(each) + int(np.argmin(each))
    return math.exp(high), float(orders[best])


def effective_noise(event: Any, accept_zcdp: bool = False) -> Any:
    """For ``_effective_gaussian_noise_multiplier``: what a draw of the event has."""
    if isinstance(event, dp_event.GaussianDpEvent):
        return event.noise_multiplier
    for part in _leaves(event):
        is_zcdp = isinstance(part, dp_event.ZCDpEvent) and part.xi == 0
        if not (
            isinstance(part, dp_event.GaussianDpEvent) or (accept_zcdp and is_zcdp)
        ):
            return part
    drawn = dp_event.PoissonSampledDpEvent(0.5, _as_gaussians(event))
    (step,) = from_dp_event(drawn).gaussian_steps
    return step.noise_multiplier


def _as_gaussians(event: Any) -> Any:
    """With the Gaussian of the same rho for each zCDP event."""
    if isinstance(event, dp_event.ZCDpEvent):
        return dp_event.GaussianDpEvent(math.sqrt(0.5 / event.rho))
    if isinstance(event, dp_event.ComposedDpEvent):
        return dp_event.ComposedDpEvent([_as_gaussians(e) for e in event.events])
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return dp_event.SelfComposedDpEvent(_as_gaussians(event.event), event.count)
    return event


def _leaves(event: Any) -> Iterator[Any]:
    if isinstance(event, dp_event.ComposedDpEvent):
        for inner in event.events:
            yield from _leaves(inner)
    elif isinstance(event, dp_event.SelfComposedDpEvent):
        yield from _leaves(event.event)
    else:
        yield event


def randomized_response_rdp(
    noise_parameter: float, num_buckets: int, alphas: Any, relation: Any
) -> np.ndarray:
    """For ``_compute_randomized_response_rdp``."""
    if not np.all(np.asarray(alphas) > 1):
        raise ValueError(f"Renyi divergence order alpha must be > 1, got {alphas}")
    accountant = RdpStandIn(alphas, relation)
    accountant.compose(dp_event.RandomizedResponseDpEvent(noise_parameter, num_buckets))
    return accountant.rdp


def trials_mean(gamma: float, shape: float) -> float:
    """For ``_truncated_negative_binomial_mean``."""
    return float(trial_counts._mean(np.asarray(-math.log(gamma)), np.asarray(shape)))


def trials_gamma(shape: float, mean: float) -> float:
    """For ``_gamma_truncated_negative_binomial``: of the distribution that is drawn."""
    trials = trial_counts.NegativeBinomialTrials(expected_runs=mean, eta=shape)
    return math.exp(-float(trials.log_inverse_gamma))


FUNCTIONS = {
    "_compute_log_a": log_a,
    "_compute_log_a_frac": log_a,
    "_compute_rdp_poisson_subsampled_gaussian": sampled_rdp,
    "compute_epsilon": compute_epsilon,
    "compute_delta": compute_delta,
    "_effective_gaussian_noise_multiplier": effective_noise,
    "_compute_randomized_response_rdp": randomized_response_rdp,
    "_truncated_negative_binomial_mean": trials_mean,
    "_gamma_truncated_negative_binomial": trials_gamma,
}


_THEIR_FUNCTIONS = {
    name: getattr(rdp_privacy_accountant, name)
    for name in FUNCTIONS
    if hasattr(rdp_privacy_accountant, name)
}


@contextlib.contextmanager
def their_functions() -> Iterator[None]:
    """The module as it was: their accountant must not compute with what is ours."""
    ours = {name: getattr(rdp_privacy_accountant, name) for name in _THEIR_FUNCTIONS}
    try:
        _put(_THEIR_FUNCTIONS)
        yield
    finally:
        _put(ours)


def _put(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(rdp_privacy_accountant, name, function)


def install() -> None:
    """Puts our stand-ins into dp_accounting's modules; its own stay as ``Their...``."""
    _put({name: FUNCTIONS[name] for name in _THEIR_FUNCTIONS})
    for place in (rdp_privacy_accountant, dp_accounting.rdp):
        vars(place)["RdpAccountant"] = RdpStandIn
    for place in (pld_privacy_accountant, dp_accounting.pld):
        vars(place)["PLDAccountant"] = PldStandIn
