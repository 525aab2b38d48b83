"""Epsilon, delta, intervals, Rényi curves and profiles of steps and runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary, using_engine
from jaxdp_episodic.accountant.describe.runs import DisjointParts, refuse_disjoint
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
    parts_of,
)
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.rdp import answer_at_orders, rdp_curve
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Question, Run
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.dominating_pair import (
    dominating_pairs,
    runs_of,
)

METHODS = tuple(worst_path.METHODS)
DIRECTIONS = ("forward", "backward", "both")
P = ParamSpec("P")
R = TypeVar("R")


class PrivacyInfo(NamedTuple):
    """How accurate an epsilon or a delta is; the fields have its shape.

    Attributes:
      error: for "exact", an estimate of the error: of epsilon in nats, of delta
        relative. If ``is_certified_bound``, the width of the certified interval whose
        upper end was returned. For "rdp" ``inf``: a bound of unknown tightness.
      is_certified_bound: whether the value is the upper end of a certified interval
        ("pld", and "exact" if its error estimate was above 1e-6 relative), or for
        "exact" the Rényi bound if that is lower.
    """

    error: np.ndarray | np.float64
    is_certified_bound: np.ndarray | np.bool_


def public_function(
    worst: Callable[..., Any] | None = np.maximum,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public function: handles ``engine=`` and disjoint parts.

    For disjoint parts ``worst`` combines the results of the parts, setting by setting.
    With None the function itself refuses them.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        ask: Any = function
        takes_engine = "engine" in (ask.__kwdefaults__ or {})

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            engine: Any = kwargs.pop("engine", None) if takes_engine else None
            if engine is not None:
                _validation.instance("engine", engine, str, "a name or None")
                with using_engine(engine):
                    return call(*args, **kwargs)
            step, *others = args or (kwargs.get("step"),)
            if worst is None or not isinstance(step, DisjointParts):
                return function(*args, **kwargs)
            if not args:
                kwargs.pop("step")
            found = [ask(part, *others, **kwargs) for part in step.parts]
            return _worst_of(found, worst)

        return call

    return decorated


def _worst_of(found: list[Any], worst: Callable[..., Any]) -> Any:
    """The worst result of the parts, with its `PrivacyInfo`."""
    if not isinstance(found[0], tuple):
        return functools.reduce(worst, found)
    if not isinstance(found[0][1], PrivacyInfo):  # ends of an interval
        return tuple(functools.reduce(worst, end) for end in zip(*found, strict=True))
    fields = worst_path.chosen([(value, *info) for value, info in found], np.argmax)
    value, *info = (shaped(field, field.shape) for field in fields)
    return value, PrivacyInfo(*info)


@public_function()
def rdp(
    step: AnyStep | DisjointParts,
    orders: Any,
    *,
    direction: str = "both",
    engine: str | None = None,
) -> np.ndarray | np.float64:
    """Returns the Rényi DP curve of one step or of a composed run.

    ``D_alpha(P || Q)`` of the dominating pair (forward), of the exchanged pair
    (backward), or the larger of the two. *Exact* for the dominating pair up to 1e-10
    relative, hence an upper bound for the step. With a `Population` it is the largest
    over the paths at each order.

    Args:
      step: a step, a release, or a run made by `compose` or `disjoint`. For epoch
        schemes this is a single step; do not add such curves, compose the run.
      orders: real orders > 1, including inf; any shape, possibly empty.
      direction: "forward", "backward" or "both".
      engine: see `epsilon`.

    Returns:
      float64 nats of shape ``step.shape + np.shape(orders)``; a scalar order adds no
      axis, and all-scalar input gives an ``np.float64``. ``inf`` without noise, or if
      everything is revealed with positive probability. Order inf gives the largest loss
      (an *upper bound*), which is ``inf`` for Gaussian noise.

    Raises:
      ValueError: an order <= 1, or an unknown direction.

    Reference: Mironov, Talwar, Zhang (2019), arXiv:1908.10530, for the sampled
    Gaussian and the fact that its forward direction is the larger (Theorem 5); Sason
    and Verdú (2016), arXiv:1508.00335, for the other profiles.
    """
    check_step(step)
    orders = _validation.order_or_inf_array("orders", orders)
    _validation.choice("direction", direction, DIRECTIONS)
    one: Any = step  # no disjoint parts
    runs, shape = runs_of(one, np.asarray(1)), (*step.shape, orders.size)
    values = curve_of(runs, orders.reshape(1, -1), direction, shape, axis=True)
    shape = step.shape + orders.shape
    return shaped(values.reshape(shape), shape)


def curve_of(
    runs: Sequence[Run],
    orders: np.ndarray,
    direction: str,
    shape: tuple[int, ...],
    *,
    axis: bool = False,
) -> np.ndarray:
    """Returns the largest divergence over the paths, broadcast to a shape."""
    curves = []
    for run in runs:
        run.refuse("rdp")
        run = run.with_axis() if axis else run
        finite, values = np.where(np.isinf(orders), 2.0, orders), np.zeros(())
        every = ("forward", "backward") if direction == "both" else (direction,)
        for one in every:
            # Skip the backward direction if it is proven not to be larger.
            if one == every[0] or not run.forward_is_larger:
                values = np.maximum(values, rdp_curve(finite, run, one))
        largest = [run.facts.largest_losses[one == "backward"] for one in every]
        most = np.where(run.facts.is_unprotected, np.inf, np.maximum.reduce(largest))
        values = np.where(np.isinf(orders), most, values)
        curves.append(np.where(run.facts.log_kept < 0, np.inf, values))
    least = np.minimum.reduce(np.broadcast_arrays(*curves))
    return np.broadcast_to(least.max(axis=-2 if axis else -1), shape)


@public_function()
def epsilon(
    step: AnyStep | DisjointParts,
    *,
    delta: Any,
    num_steps: Any = None,
    method: str = "exact",
    orders: Any = None,
    return_info: bool = False,
    engine: str | None = None,
) -> Any:
    """Returns epsilon of ``num_steps`` steps at the given delta.

    With a `Population` it is the largest over all paths. The methods:

    * "exact": epsilon of the composed dominating pair, by a contour integral whose time
      does not grow with the number of steps (docs/theory.md, "Exact"). The relative
      error is at most 1e-6 (below epsilon 1e-3, the absolute error at most 1e-9). If
      the error estimate is larger, and for random allocation, very little noise and
      several releases with Laplace noise or finitely many outcomes, it is an *upper
      bound*, the certified end of "pld" or the Rényi bound; `PrivacyInfo` says so.
    * "pld": the upper end of `epsilon_interval`, a certified *upper bound*.
    * "rdp": an *upper bound* from the Rényi DP of the dominating pair, converted at
      the best real order (Canonne, Kamath, Steinke 2020, arXiv:2004.00010, Proposition
      12). The search is not limited to a grid of orders; if it is inexact, the bound
      is larger, never too small.

    Args:
      step: a step, a release, or a run made by `compose` or `disjoint`.
      delta: in [0, 1]. At 0 epsilon is the largest loss, which is ``inf`` for Gaussian
        noise; at 1 it is 0.
      num_steps: whole number >= 0. For a composed run the number of repetitions of the
        whole run, None for one. For disjoint parts it holds for each part.
      method: "rdp", "exact" or "pld".
      orders: with "rdp", use only these orders (1-d, not empty) instead of the search.
        If the best of them is the first or the last, a warning says that the grid is
        too short.
      return_info: also return a `PrivacyInfo`; not with ``orders``.
      engine: "numpy", "jax" or "auto", which uses JAX if compilation is likely to save
        time. None: the environment variable JAXDP_EPISODIC_ENGINE, or "auto" if it is
        not set. Both engines agree to 1e-9 (1e-8 at noise below 1e-3).

    Returns:
      float64 nats of the broadcast shape of step, ``delta`` and ``num_steps``; ``inf``
      without noise, 0 if nothing is sampled or ``num_steps`` is 0. With ``return_info``
      the pair ``(epsilon, info)``.

    Raises:
      ValueError: a step without ``num_steps``, or ``orders`` with another method than
        "rdp".
      NotImplementedError: the method does not cover a release.
    """
    _validation.choice("method", method, METHODS)
    delta = _validation.probability_array("delta", delta)
    runs, shape = checked_runs(step, num_steps, delta=delta)
    one: Any = step  # no disjoint parts
    units = None  # of the first description that states its size
    for part in parts_of(one)[0]:
        if units is None and isinstance(part, GaussianStep):
            units = part.num_protected_units
    if units is not None and delta.size and np.max(delta) * units >= 1:
        warnings.warn(
            f"delta={np.max(delta):g} times {units} protected units is at least 1: "
            "publishing the data of one of them would satisfy it; use delta well below "
            f"{1 / units:.1e}",
            stacklevel=3,
        )
    if orders is not None:
        if method != "rdp" or return_info:
            raise ValueError(
                "orders must be None with another method than 'rdp' and with "
                f"return_info, got method={method!r}, return_info={return_info!r}"
            )
        return _epsilon_on_grid(runs, delta, orders, shape)
    answer = worst_path.answer(EpsilonAt(log_of(delta)), runs, method)
    value, error, certified = map(shaped, answer, [shape] * 3)
    return (value, PrivacyInfo(error, certified)) if return_info else value


@public_function()
def delta(
    step: AnyStep | DisjointParts,
    *,
    epsilon: Any,
    num_steps: Any = None,
    method: str = "exact",
    return_info: bool = False,
    engine: str | None = None,
) -> Any:
    """Returns delta of ``num_steps`` steps at the given epsilon.

    The methods are those of `epsilon`. "rdp" inverts the same conversion, at the best
    order for it.

    Args:
      step: a step, a release, or a run made by `compose` or `disjoint`.
      epsilon: >= 0, nats. At inf delta is the probability that everything is revealed.
      num_steps: see `epsilon`.
      method: "rdp", "exact" or "pld".
      return_info: also return a `PrivacyInfo`.
      engine: see `epsilon`.

    Returns:
      float64 in [0, 1] of the broadcast shape; 1 without noise, 0 if no loss exceeds
      ``epsilon``. With ``return_info`` the pair ``(delta, info)``.

    Raises:
      ValueError: a step without ``num_steps``.
    """
    _validation.choice("method", method, METHODS)
    target = _validation.nonnegative_array("epsilon", epsilon)
    runs, shape = checked_runs(step, num_steps, epsilon=target)
    answer = worst_path.answer(DeltaAt(target), runs, method)
    log_delta, error, certified = map(shaped, answer, [shape] * 3)
    value = delta_of(log_delta, up=True)[()]
    return (value, PrivacyInfo(error, certified)) if return_info else value


@public_function()
def privacy_profile(
    step: OneStep, epsilon: Any, *, direction: str = "both", engine: str | None = None
) -> np.ndarray | np.float64:
    """Returns delta of a *single* step at the given epsilon.

    *Exact* for the step's dominating pair, hence an upper bound for the step; for the
    designs of the multistage theorem there are data sets that attain it. Do not add
    profiles over steps: use `epsilon` and `delta`.

    Args:
      step: one step or release, not a composed run.
      epsilon: >= 0, nats; any shape that broadcasts with the step.
      direction: "forward" (the larger data set against the smaller), "backward" or
        "both" (the larger delta).
      engine: see `epsilon`.

    Returns:
      float64 in [0, 1] of the broadcast shape; with a `Population` the largest.

    Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647, and the theorems in
    docs/theory.md, "Profiles" and "Other designs".
    """
    _validation.instance("step", step, OneStep, "a GaussianStep or a release")
    target = _validation.nonnegative_array("epsilon", epsilon)
    _validation.choice("direction", direction, DIRECTIONS)
    shape = _validation.broadcast_shape(step=step, epsilon=target)
    target, every = target[..., None], []
    for loss in dominating_pairs(step):
        Run((loss,), (np.ones(1),)).refuse("exact")
        at_end = np.isinf(target) & ~loss.is_unprotected
        log_kept = np.where(loss.is_unprotected, 0.0, loss.log_kept())
        profiles = _log_profiles(np.where(np.isinf(target), 1e300, target), loss)
        both = direction == "both"
        log_delta = np.maximum(*profiles) if both else profiles[direction == "backward"]
        log_delta = np.where(at_end, -np.inf, log_delta)
        every.append(DeltaAt(target).with_failure(log_delta, log_kept))
    least = np.minimum.reduce(np.broadcast_arrays(*every)).max(axis=-1)
    return shaped(np.exp(least), shape)


_log_profiles = float64_boundary(
    lambda u, loss: tuple(profile for profile, _ in loss.log_tails(u))
)


@public_function()
def epsilon_interval(
    step: AnyStep,
    *,
    delta: Any,
    num_steps: Any = None,
    max_width: float | None = None,
    engine: str | None = None,
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of epsilon at the given delta.

    The epsilon of the composed dominating pair lies between them, including rounding
    errors. The upper end is also an upper bound for the mechanism. Privacy loss
    distributions are discretized pessimistically and optimistically and composed by
    FFT; the ends include bounds on truncation and rounding errors. With a `Population`
    both ends are those of the largest epsilon over the paths.

    Args:
      step: a step, a release, or a run made by `compose`.
      delta: in [0, 1]. At 0 the ends are 0 and the largest loss; both are exact if the
        largest loss is 0 or inf.
      num_steps: see `epsilon`.
      max_width: largest width of the interval in nats, > 0. With None the target is
        1e-4 of epsilon or 1e-7, whichever is larger, without a guarantee: if memory or
        rounding prevents it (more than about 1e9 steps, deltas far below 1e-12 of
        rarely sampled units) the interval is wider.
      engine: see `epsilon`.

    Returns:
      ``(lower, upper)``, float64 nats of the broadcast shape; the trivial ``(0, inf)``
      without noise, ``(0, 0)`` if nothing is sampled.

    Raises:
      ValueError: ``max_width`` cannot be met within the memory limit.

    Reference: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi (2022), arXiv:2207.04380.
    """
    delta = _validation.probability_array("delta", delta)
    if max_width is not None:
        width = _validation.one("max_width", max_width, _validation.positive_array)
        max_width = max(width, 1e-290)  # a smaller share of epsilon would underflow
    runs, shape = checked_runs(step, num_steps, delta=delta)
    return _least_ends(EpsilonAt(log_of(delta)), runs, shape, max_width)


@public_function()
def delta_interval(
    step: AnyStep, *, epsilon: Any, num_steps: Any = None, engine: str | None = None
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of delta at the given epsilon.

    See `epsilon_interval`. The target is a relative width of 1e-3, without a guarantee.

    Args:
      step: a step, a release, or a run made by `compose`.
      epsilon: >= 0, nats.
      num_steps: see `epsilon`.
      engine: see `epsilon`.

    Returns:
      ``(lower, upper)``, float64 in [0, 1] of the broadcast shape.
    """
    target = _validation.nonnegative_array("epsilon", epsilon)
    runs, shape = checked_runs(step, num_steps, epsilon=target)
    lower, upper = _least_ends(DeltaAt(target), runs, shape, None)
    return delta_of(lower, up=False)[()], delta_of(upper, up=True)[()]


def _least_ends(
    question: Question, runs: Sequence[Run], shape: tuple[int, ...], width: float | None
) -> tuple[Any, Any]:
    """Both ends: the smallest over the theorems' runs, then the largest over paths."""
    question = question.at(np.broadcast_to(question.target, shape)[..., None])
    for run in runs:
        run.refuse("pld")
    if len(runs) == 1:  # of several runs the smallest counts on each path
        runs = [runs[0].take_paths(worst_path.undominated_paths(runs[0]))]
    ends = []
    for each in zip(*(_ends(question, run, width) for run in runs), strict=True):
        least = np.minimum.reduce(np.broadcast_arrays(*each))
        ends.append(shaped(least.max(axis=-1), shape))
    return ends[0], ends[1]


def _ends(question: Question, run: Run, width: float | None) -> list[np.ndarray]:
    """Both ends for each path."""
    # With too little noise only an upper bound is known.
    runs = run.kept(), run.in_reach()
    inside = question.inside()
    ends: list[np.ndarray] = []
    both: tuple[np.ndarray, np.ndarray] | None = None
    for up in (False, True):
        kept, log_kept = runs[up].kept(), runs[up].facts.log_kept
        left = inside.given_kept(log_kept, up=up)
        left = left.at(np.where(np.isneginf(left.target), -1.0, left.target))
        # The targets of the two ends differ, by rounding, only if a loss may be inf.
        if both is None or np.any(log_kept) or np.any(run.facts.is_unprotected):
            both = pld_bounds(left, kept, width=width)
        end = inside.with_failure(both[up], log_kept, up=up)
        most = runs[True].facts.most_lost
        at_end = question.at_end(most)
        if np.any(at_end):
            limit = question.end_value(most, runs[True].facts.log_kept)
            # At delta 0 the largest loss is only an upper end.
            known = ~np.isfinite(limit) | (limit == 0) | (not question.is_epsilon)
            known &= question.is_epsilon | ~run.facts.has_too_little_noise
            limit = np.where(known | up, limit, question.nothing)
            end = np.where(at_end, limit, end)
        ends.append(end)
    return ends


def log_of(delta: np.ndarray) -> np.ndarray:
    """Returns log(delta), -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(delta)


def delta_of(log_delta: np.ndarray, *, up: bool) -> np.ndarray:
    """``e^log_delta`` rounded up, or down; 0 and 1 are exact."""
    # exp rounds to the nearest: one ulp outwards keeps the bound.
    value = np.nextafter(np.exp(log_delta), 2.0 if up else -1.0)
    # signbit, not < 0: JAX threads may flush subnormal numbers to 0.
    value = np.where(np.signbit(value), 0.0, np.where(value > 1, 1.0, value))
    value = np.where(log_delta == 0, 1.0, value)
    return np.where(np.isneginf(log_delta), 0.0, value)


def check_method(method: str) -> None:
    """Refuses unknown methods."""
    _validation.choice("method", method, METHODS)


def checked_runs(
    step: Any, num_steps: Any, **targets: np.ndarray
) -> tuple[tuple[Run, ...], tuple[int, ...]]:
    """Returns a run per theorem, of which the smallest result counts, and the shape."""
    check_step(step)
    named: dict[str, Any] = {"step": step, **targets}
    is_run = isinstance(step, ComposedSteps)
    if num_steps is not None:
        num_steps = _validation.integer_array("num_steps", num_steps, minimum=0)
        named["num_steps"] = num_steps
        step = compose((step, num_steps)) if is_run else step
    elif not is_run:
        raise ValueError("num_steps must be a whole number >= 0, got None")
    shape = _validation.broadcast_shape(**named)
    return runs_of(step, num_steps), shape


def _epsilon_on_grid(
    runs: Sequence[Run], delta: np.ndarray, orders: Any, shape: tuple[int, ...]
) -> np.ndarray | np.float64:
    """Epsilon with the user's orders only."""
    grid = np.unique(order_grid(orders))
    question = EpsilonAt(log_of(delta)[..., None])
    found = []
    for run in runs:
        run.refuse("rdp")
        found.append(answer_at_orders(question, run, grid))
    result, best = worst_path.chosen(found, np.argmin)
    useful = np.isfinite(result) & (result > 0)
    if np.any(useful & ((best == 0) | (best == grid.size - 1))):
        warnings.warn(
            "the best order is the first or the last of `orders`: a longer grid or "
            "orders=None gives a smaller epsilon",
            stacklevel=4,
        )
    return shaped(result.max(axis=-1), shape)


def order_grid(orders: Any) -> np.ndarray:
    """Returns (A,) finite Rényi orders > 1, A >= 1."""
    grid = _validation.order_array("orders", orders)
    if grid.ndim != 1 or grid.size == 0:
        raise ValueError(
            "orders must be a 1-d array with at least one order, "
            f"got shape {grid.shape}"
        )
    return grid


def check_step(step: Any) -> None:
    """Refuses anything but a step, a release or a composed run."""
    if not isinstance(step, AnyStep):
        refuse_disjoint(step, "this function")
        _validation.instance("step", step, AnyStep, "a GaussianStep or a composed run")


def shaped(values: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Returns values of a shape as an array of its own, or as a NumPy scalar."""
    return np.array(np.broadcast_to(values, shape))[()]
