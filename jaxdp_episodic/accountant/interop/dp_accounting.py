"""For ``dp_accounting``: an accountant of its kind, and events in both directions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    OWNED,
    IndependentEpisodes,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.runs import refuse_disjoint
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
    parts_of,
)
from jaxdp_episodic.accountant.interop.dp_event import (
    EVENTS,
    OURS,
    EventNotCovered,
    nothing,
    steps_of,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.people import PeopleLoss
from jaxdp_episodic.accountant.methods.rdp import answer_at_orders, rdp_bound
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.dominating_pair import (
    dominating_pairs,
    runs_of,
)
from jaxdp_episodic.files.optional import require

dp_event = require(
    "dp_accounting.dp_event", purpose="to_dp_event", extra="dp-accounting"
)


def to_dp_event(step: AnyStep) -> Any:
    """Returns the ``dp_accounting`` event of a step or a run.

    Events do not state the neighbouring relation, so an accountant must be given the
    run's. `from_dp_event` reads the event back as the same run, except for the names of
    levels; a Gaussian `ZeroConcentratedDP` keeps only its divergences, and a pair that
    is a mixture of Gaussians only the mixture.

    Args:
      step: a step, a release or a run, of one setting. A `GaussianStep` must sample,
        clip and protect the units of one level, examples or whole tasks. Or it protects
        a person, or a unit above the clip unit, whose number of contributions does not
        affect other draws: its pair is a ``MixtureOfGaussiansDpEvent``. If others take
        a person's place, as in episodes, that event would cost too little.

    Raises:
      TypeError: not a step.
      ValueError: a step of many settings.
      NotImplementedError: a step, a release or a sampling without an event, or without
        one in the installed version.
    """
    refuse_disjoint(step, "to_dp_event")
    api.check_step(step)
    if step.shape:
        raise ValueError(f"step must be one setting, got an array of {step.shape}")
    events = []
    for part, count in zip(*parts_of(step), strict=True):
        if isinstance(part, GaussianStep):  # with bands, the cost of one group
            part, count = part.in_group, part.uses(count)
        event = _event(part)
        repeats, rest = divmod(int(count), getattr(event, "num_steps", 1))
        if rest:
            raise NotImplementedError(
                f"{type(event).__name__} is an epoch of {event.num_steps} steps: the "
                f"number of steps must be a multiple, got {count}"
            )
        if repeats == 1:
            events.append(event)
        elif repeats:
            events.append(dp_event.SelfComposedDpEvent(event, repeats))
    if not events:
        return dp_event.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)


def _event(step: Any) -> Any:
    """Returns the event of one step."""
    if isinstance(step, GaussianStep):
        return _gaussian(step)
    name = next((n for n, e in EVENTS.items() if e.release is type(step)), "")
    make = getattr(dp_event, f"{name}DpEvent", None)
    if not name or make is None:
        raise NotImplementedError(
            f"{type(step).__name__} has no event in the installed dp_accounting"
        )
    fields = EVENTS[name].fields.split()
    given = {theirs: getattr(step, OURS.get(theirs, theirs)) for theirs in fields}
    lists = {k: v.tolist() for k, v in given.items() if np.ndim(v)}
    event = make(**given | lists)
    if "sampling_probability" in fields:
        return event
    return _sampled(getattr(step, "sampling_probability", 1), event)


def _gaussian(step: GaussianStep) -> Any:
    """Returns the event of a Gaussian step."""
    event = dp_event.GaussianDpEvent(step.noise_multiplier)
    design: Any = step.design
    each = design.sampling if isinstance(design, IndependentEpisodes) else design
    top: Any = None
    # A person may own several units, so no draw of units is a draw of persons.
    if step.population is None and step.privacy_unit not in OWNED:
        top = each.levels[0] if isinstance(each, MultistageSampling) else None
    if each is not design:
        if isinstance(top, WithoutReplacement) and len(each.levels) == top.size == 1:
            return dp_event.SampledWithReplacementDpEvent(
                top.population, design.num_episodes, event
            )
    elif top is not None and step.clip_unit == step.privacy_unit == top.name:
        kind = type(top)
        if kind is Poisson:
            return _sampled(top.sampling_probability, event)
        if kind is WithoutReplacement:
            size, most = top.size, top.population
            if not top.population_is_exact and size <= most:
                return dp_event.SampledWithoutReplacementDpEvent(most, size, event)
            if top.population_is_exact and size >= most:
                return event
        # For times > 1 dp_accounting's event draws a subset of all steps,
        # RandomAllocation one step of each block.
        if kind is RandomAllocation and top.times == 1:
            if hasattr(dp_event, "RandomAllocationDpEvent"):
                steps = int(top.steps_per_epoch)
                return dp_event.RandomAllocationDpEvent(event, 1, steps)
    mixture = _mixture(step)
    if mixture is not None:
        return mixture
    raise NotImplementedError(
        f"{design!r} with clip_unit={step.clip_unit!r} and "
        f"privacy_unit={step.privacy_unit!r} has no event in dp_accounting; covered: "
        "one level that is sampled, clipped and protected, with its sizes stated; and "
        "people, or units, whose contributions are Poisson sampled and clipped one by "
        "one, under add_remove or zero_out"
    )


def _mixture(step: GaussianStep) -> Any:
    """Returns the event of a pair that is a mixture of Gaussians; None for others."""
    pairs = dominating_pairs(step)
    if len(pairs) != 1 or math.prod(pairs[0].shape) != 1:
        return None
    pair: Any = pairs[0].map(np.ravel)
    if type(pair) is GaussianMixtureLoss:
        shares = np.exp(np.concatenate(pair.log_weights))
        numbers = np.concatenate(pair.shifts) * step.noise_multiplier
        is_whole = bool(pair.outer_rate == 1) and np.all(np.isfinite(numbers))
        numbers = np.append(0.0, np.rint(numbers))
        chances = np.append(1 - pair.rate, pair.rate * shares)
    elif type(pair) is PeopleLoss:
        weights = np.concatenate(pair.log_weights)
        count = np.concatenate(pair.counts)[np.argmax(weights)]
        is_one = np.sum(weights > -np.inf) == 1
        is_whole = is_one and bool((pair.outer_rate == 1) & (pair.cover_rate == 1))
        numbers = np.arange(count + 1)
        rate = -np.expm1(np.concatenate(pair.log_rests)[np.argmax(weights)])
        chances = np.exp(log_binomial_mass(numbers, count, rate))
    else:
        return None
    if not is_whole:
        return None
    return dp_event.MixtureOfGaussiansDpEvent(
        step.noise_multiplier, numbers.tolist(), chances.tolist()
    )


def _sampled(probability: Any, event: Any) -> Any:
    if np.equal(probability, 1):
        return event
    return dp_event.PoissonSampledDpEvent(float(probability), event)


_dp = require("dp_accounting", purpose="its accountant", extra="dp-accounting")

RELATIONS = {
    _dp.NeighboringRelation.ADD_OR_REMOVE_ONE: "add_remove",
    _dp.NeighboringRelation.REPLACE_ONE: "replace_one",
    _dp.NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}
"""Names of dp_accounting's neighbouring relations here."""

# The target of each question, its check, and the question at all real orders.
_QUESTIONS = {
    "epsilon": ("delta", _validation.probability_array, api.epsilon),
    "delta": ("epsilon", _validation.nonnegative_array, api.delta),
}
# Order that replaces order 1. Rényi divergences grow with the order, so its value is
# an upper bound.
_LEAST_ORDER = 1 + 1e-8


class EpisodicAccountant(_dp.PrivacyAccountant):
    """A ``dp_accounting.PrivacyAccountant`` that uses this package's accounting.

    Equal events are counted, so composing is cheap. `from_dp_event` states which events
    are covered, and what ``noise_multiplier`` means if records are replaced. A
    ``NonPrivateDpEvent`` has infinite epsilon at any delta.

    Args:
      neighboring_relation: a member of dp_accounting's ``NeighboringRelation``, or
        "add_remove", "replace_one" or "zero_out".
      method: "exact", "pld" or "rdp"; see `epsilon`.
      orders: only with "rdp": the orders to use, each >= 1 or inf, in place of the best
        real order.

    Raises:
      ValueError: a value out of range, or ``orders`` with another method than "rdp".
    """

    def __init__(
        self,
        neighboring_relation: Any = _dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
        method: str = "exact",
        *,
        orders: Any = None,
    ) -> None:
        relation = neighboring_relation
        if isinstance(relation, str):
            names = {name: member for member, name in RELATIONS.items()}
            relation = names[
                _validation.choice("neighboring_relation", relation, names)
            ]
        kind, words = _dp.NeighboringRelation, "a NeighboringRelation or a name"
        _validation.instance("neighboring_relation", relation, kind, words)
        super().__init__(relation)
        api.check_method(method)
        self._method = method
        self._counts: dict[OneStep, int] = {}
        self._is_non_private = False
        self._orders: np.ndarray | None = None
        if orders is None:
            return
        if method != "rdp":
            raise ValueError(
                f"orders must be None unless method='rdp', got method={method!r}"
            )
        self._orders = _validation.reals("be >= 1", lambda a: a >= 1)("orders", orders)
        if self._orders.ndim != 1 or self._orders.size == 0:
            shown = _validation.shown(orders)
            raise ValueError(f"orders must be a list of numbers, got {shown}")

    @property
    def run(self) -> ComposedSteps:
        """All composed events as one run, which every question accepts."""
        counts = self._counts or {nothing(self._relation): 0}
        return compose(*counts.items())

    def get_epsilon(self, target_delta: float) -> float:
        """Returns epsilon at a delta in [0, 1], of the kind of `epsilon`."""
        return self._answer("epsilon", target_delta)[0]

    def get_delta(self, target_epsilon: float) -> float:
        """Returns delta at an epsilon >= 0, of the kind of `delta`."""
        return self._answer("delta", target_epsilon)[0]

    def get_epsilon_and_optimal_order(self, target_delta: float) -> tuple[float, float]:
        """Returns epsilon and the Rényi order that gives it; only for "rdp"."""
        return self._answer("epsilon", target_delta, needs_order=True)

    def get_delta_and_optimal_order(self, target_epsilon: float) -> tuple[float, float]:
        """Returns delta and the Rényi order that gives it; only for "rdp"."""
        return self._answer("delta", target_epsilon, needs_order=True)

    @property
    def orders(self) -> np.ndarray | None:
        """The given Rényi orders, or None."""
        return None if self._orders is None else self._orders.copy()

    @property
    def rdp(self) -> np.ndarray:
        """Rényi DP at `orders`, nats; *upper bounds*, also at order 1.

        Raises:
          ValueError: no orders were given.
        """
        orders = self._orders
        if orders is None:
            raise ValueError("orders must be given to read rdp, got None")
        if self._is_non_private:
            return np.full(orders.shape, np.inf)
        return np.asarray(api.rdp(self.run, np.maximum(orders, _LEAST_ORDER)))

    # --- For the base class ---

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        grid = self._orders
        if grid is not None:
            grid = grid[(grid >= _LEAST_ORDER) & np.isfinite(grid)]
        try:
            parts = list(steps_of(event, self._relation, grid))
        except EventNotCovered as error:
            return self.CompositionErrorDetails(error.event, str(error))
        for part, step, repeats in parts:
            try:
                for run in () if step in self._counts else runs_of(step, np.asarray(1)):
                    run.refuse(self._method)
            except NotImplementedError as error:
                return self.CompositionErrorDetails(part, str(error))
            if do_compose:
                self._counts[step] = self._counts.get(step, 0) + repeats * count
                if isinstance(part, _dp.NonPrivateDpEvent) and repeats * count:
                    self._is_non_private = True
        return None

    @property
    def _relation(self) -> str:
        return RELATIONS[self.neighboring_relation]

    # --- Answers ---

    def _answer(
        self, of: str, target: float, *, needs_order: bool = False
    ) -> tuple[float, float]:
        """Returns epsilon or delta, and the order; NaN unless the method is "rdp"."""
        if needs_order and self._method != "rdp":
            raise NotImplementedError(
                f"only method='rdp' has a Rényi order, got method={self._method!r}"
            )
        name, check, ask = _QUESTIONS[of]
        given = _validation.one(f"target_{name}", target, check)
        if self._is_non_private:
            return (np.inf if of == "epsilon" else 1.0), np.inf
        array, run, order = np.asarray(given, np.float64), self.run, np.nan
        question = EpsilonAt(api.log_of(array)) if of == "epsilon" else DeltaAt(array)
        if self._orders is not None:
            # Converts by Canonne, Kamath and Steinke (2020), at the given orders.
            orders = np.maximum(self._orders, _LEAST_ORDER)
            found = (answer_at_orders(question, r, orders) for r in runs_of(run, None))
            # Events have no population, so each run has one path.
            value, best = min((answer.item(), at.item()) for answer, at in found)
            if of == "delta":
                value = api.delta_of(np.asarray(value), up=True)
            return float(value), float(self._orders[best])
        value = ask(run, method=self._method, **{name: given})
        if self._method == "rdp":
            # If several runs bound it, the order is that of the first.
            whole = runs_of(run, None)[0].in_reach()
            kept = question.inside().given_kept(whole.facts.log_kept)
            order = float(np.max(rdp_bound(kept, whole.kept())[1]))
        return float(value), order
