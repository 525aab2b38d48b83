"""The "rdp" method: Rényi DP of a run, and its conversion at the best order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import (
    Kernel,
    choose_engine,
    engine_name,
    float64_boundary,
    using_choice,
)
from jaxdp_episodic.accountant.losses.privacy_loss import BoundingPair, Profile
from jaxdp_episodic.accountant.methods.closed_form import delta_of_profile
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks, on_cpu
from jaxdp_episodic.accountant.methods.rdp import kernels
from jaxdp_episodic.accountant.methods.rdp.kernels import LARGER
from jaxdp_episodic.accountant.methods.run import (
    Answer,
    EpsilonAt,
    Group,
    Question,
    Run,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    by_blocks,
    map_arrays,
    namespace,
)

# Nats by which the estimated total variation may exceed delta and is still computed.
NEAR = 3.0
_ROUNDING = 1e-12  # rounding error of the profiles' logarithms, nats
# Number of profiles below which NumPy computes them: compiling them takes 0.3 to 1 s.
_FEW_PROFILES = 8192


def at_most_total_variation(
    question: Question, run: Run, value: np.ndarray
) -> np.ndarray:
    """Lowers epsilons or log(deltas), *upper bounds*, to the total variation.

    Where the total variation is at most delta, epsilon is 0.
    """
    target = np.broadcast_to(question.target, value.shape)
    log_delta = target if question.is_epsilon else value
    asked = (value > 0) if question.is_epsilon else np.isfinite(value)
    asked &= _log_estimate(run) < log_delta + NEAR
    chosen = np.flatnonzero(asked & ~run.facts.is_unprotected)
    if not chosen.size:
        return value
    with bounding_few(chosen.size, _FEW_PROFILES):
        bound = _log_total_variation(run.flattened(value.shape).take(chosen))
    lowered = value.reshape(-1).copy()
    if question.is_epsilon:
        lowered[chosen[bound <= target.reshape(-1)[chosen]]] = 0.0
    else:
        lowered[chosen] = np.minimum(lowered[chosen], bound)
    return lowered.reshape(value.shape)


def may_be_less(log_delta: Array, groups: tuple[Group, ...]) -> Array:
    """*Estimates* whether total variation is less than a delta, (n,)."""
    xp = namespace(log_delta)
    total = sum(xp.sum(g.count * estimate(g.loss), axis=0) for g in groups)
    return xp.log(total) < log_delta + NEAR


def _log_estimate(run: Run) -> np.ndarray:
    """*Estimates* the logarithm of the total variation."""
    total = np.zeros(run.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        one = estimate(loss)
        total = total + np.where(loss.loses_nothing, 0.0, count * one)
    with np.errstate(divide="ignore"):
        return np.log(total)


def estimate(loss: Any) -> Array:
    """*Estimates* the total variation of one step."""
    hints = loss.hints()
    share = namespace(hints.shift).minimum(0.4 * hints.shift, 1.0)
    return loss.outer_rate * hints.rate * share


def _log_total_variation(run: Run) -> np.ndarray:
    """*Upper bound* of the logarithm of the total variation, (n,)."""
    log_same = np.zeros(run.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        one = np.zeros(run.shape)
        if isinstance(loss, Profile) and not isinstance(loss, BoundingPair):
            one = delta_of_profile(np.zeros(run.shape), loss.kept_in_range())
        taken = (count > 0) & ~loss.loses_nothing
        with np.errstate(divide="ignore"):
            same = np.log1p(-np.exp(np.minimum(one, 0.0)))
        log_same = log_same + np.where(taken, count * np.where(taken, same, 0.0), 0.0)
    with np.errstate(divide="ignore"):
        return np.minimum(np.log(-np.expm1(log_same)) + _ROUNDING, 0.0)


# Settings computed side by side on the CPU: their arrays fit its cache.
_CPU_BLOCK = 64
# Settings in a call of the kernel, which JAX compiles for one size.
_CHUNKS = Chunks(_CPU_BLOCK, (8 * _CPU_BLOCK,), (16384,))
_KERNEL = Kernel("rdp", numpy_seconds=1e-4, compile_seconds=4.0, least=1024)
# Number of settings, left over by trapezoidal rules, below which NumPy computes panels:
# a setting takes it 1 ms, and compiling 10 s.
_FEW_ON_PANELS = 512


def rdp_answer(question: Question, run: Run) -> Answer:
    """*Upper bound* at every setting and path; its error is unknown, so ``inf``."""
    value, _ = rdp_bound(question, run)
    unknown = np.full(value.shape, np.inf)
    return Answer(value, unknown, np.zeros(value.shape, bool))


def rdp_bound(
    question: Question, run: Run, *, near: np.ndarray | None = None, loose: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bound and its order, at every setting and path."""
    # A loose bound ends the search for the order sooner: half of 200 random settings
    # were less than 1e-10 above the other, 99 % less than 4e-4, the worst 1e-2.
    kernel = _best_epsilon if isinstance(question, EpsilonAt) else _best_log_delta
    ends = question.nothing, question.everything
    value, order = _evaluate(kernel, question.target, run, ends, near, loose=loose)
    return at_most_total_variation(question, run, value), order


def bounding_few(
    settings: int, least: int = _KERNEL.least
) -> contextlib.AbstractContextManager[None]:
    """Uses NumPy for bounds that help another method, if they are few."""
    # Compiling moments takes 2 to 4 s of CPU; so many settings take NumPy 0.1 s.
    few = settings < least
    return using_choice("numpy") if few else contextlib.nullcontext()


def rdp_curve(orders: np.ndarray, run: Run, direction: str) -> np.ndarray:
    """Returns ``D_alpha`` of one direction of the composed pair, nats; broadcasts."""
    # If the loss may be infinite, so is the divergence.
    value, _ = _evaluate(_rdp, orders, run, (0.0, np.inf), direction=direction)
    return value


_rdp = float64_boundary(kernels.rdp, static=("direction", "on_lattice", "block"))
_best_epsilon = float64_boundary(
    kernels.best_epsilon, static=("loose", "on_lattice", "block")
)
_best_log_delta = float64_boundary(
    kernels.best_log_delta, static=("loose", "on_lattice", "block")
)


def _evaluate(
    kernel: Callable[..., tuple[np.ndarray, np.ndarray]],
    target: np.ndarray,
    run: Run,
    ends: tuple[float, float],
    near: np.ndarray | None = None,
    **static: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates a kernel at every setting; ``ends`` are the trivial answers."""
    shape = np.broadcast_shapes(np.shape(target), run.shape)
    if 0 in shape:
        return np.zeros(shape), np.zeros(shape)
    nothing, everything = ends
    # Every array is broadcast to all settings, constants without a copy.
    whole = run
    if run.shape != shape:
        whole = run.map(lambda a: np.broadcast_to(a, shape) if np.size(a) > 1 else a)
    no_loss, no_noise = run.facts.loses_nothing, run.facts.is_unprotected
    flat_target = np.broadcast_to(np.asarray(target, np.float64), shape).reshape(-1)
    size = flat_target.size
    groups = map_arrays(lambda a: np.broadcast_to(a, (len(a), size)), whole.groups())
    arrays: tuple[Any, ...] = (flat_target, groups)
    if near is not None:
        arrays += (np.broadcast_to(near, shape).reshape(-1),)
    forward = static.get("direction", LARGER) != "backward"
    if forward and all(g.loss.has_lattice for g in groups):
        value, order = _by_chunks(kernel, arrays, on_lattice=True, **static)
        left = np.flatnonzero(np.isnan(value))
        if left.size:
            some = map_arrays(lambda a: a[..., left], arrays)
            with bounding_few(left.size, _FEW_ON_PANELS):
                value[left], order[left] = _by_chunks(kernel, some, **static)
    else:
        value, order = _by_chunks(kernel, arrays, **static)
    value, order = value.reshape(shape), order.reshape(shape)
    value = np.where(no_loss, nothing, np.where(no_noise, everything, value))
    order = np.where(no_loss | no_noise, np.inf, order)
    # A NaN would compare as safe in the wrong direction, so it becomes the upper end.
    return np.where(np.isnan(value), everything, value), order


def _by_chunks(
    kernel: Callable[..., tuple[np.ndarray, np.ndarray]],
    arrays: tuple[Any, ...],
    *,
    on_lattice: bool = False,
    **static: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates a kernel in chunks, on the engine for this many settings."""
    size, losses = arrays[0].size, [group.loss for group in arrays[1]]

    def chunk(part: Any) -> tuple[np.ndarray, np.ndarray]:
        options, block = dict(static), part[0].shape[-1]
        if engine_name() == "jax":  # not compiled for ``near`` and ``loose``
            part = part[:2]
            options.pop("loose", None)
            block = min(block, _CPU_BLOCK) if on_cpu() else block
        return kernel(*part, on_lattice=on_lattice, block=block, **options)

    kinds = tuple((type(g.loss).__name__, len(g.count)) for g in arrays[1])
    asked = kernel.__name__, static.get("direction"), on_lattice, kinds
    with using_choice(choose_engine(size, _KERNEL._replace(what=asked), losses)):
        value, order = in_chunks(chunk, arrays, _CHUNKS)
    return value, order


def answer_at_orders(
    question: Question, run: Run, orders: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """*Upper bounds* by the best of some orders (K,), and its index."""
    # Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
    run = run.in_reach()
    endless, log_kept, run = np.isinf(orders), run.facts.log_kept, run.kept()
    target = question.given_kept(log_kept).target[..., None]
    curve = rdp_curve(np.where(endless, 2.0, orders), run.with_axis(), LARGER)
    curve = np.where(endless, run.most_lost[..., None], curve)
    if question.is_epsilon:
        values = epsilons_at_orders(curve, orders, target)
    else:
        t = orders - 1
        with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
            gap = curve - target + np.log1p(-1 / orders)
            values = np.where(gap == 0, 0.0, t * gap) - np.log(orders)
            values = np.where(endless, np.where(gap <= 0, -np.inf, 0.0), values)
        values = np.minimum(values, 0.0)
    values = np.where(np.isnan(values), question.everything, values)
    nothing_lost = (curve == 0).all(axis=-1, keepdims=True)
    values = np.where(nothing_lost, question.nothing, values)
    answer = values.min(axis=-1)
    if np.any(log_kept):
        found = Answer(answer, np.zeros(()), np.zeros(()))
        answer = question.with_failure(found, log_kept).value
    if question.is_epsilon:
        answer = np.where(question.target >= 0, 0.0, answer)
    nothing = run.facts.loses_nothing & (log_kept == 0)
    answer = np.where(nothing, question.nothing, answer)
    return answer, values.argmin(axis=-1)


def epsilons_at_orders(
    curve: np.ndarray, orders: np.ndarray, log_delta: np.ndarray
) -> np.ndarray:
    """Returns (..., K) epsilons >= 0 that follow from a curve's value at each order."""
    t = orders - 1
    with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
        penalty = np.where(np.isinf(t), 0.0, (log_delta + np.log(orders)) / t)
        return np.maximum(curve + np.log1p(-1 / orders) - penalty, 0.0)


KINDS = ("epsilon", "delta", "rdp")
"""Questions of a traced bound: epsilon at log(delta), the reverse, or a curve."""


def traced_bound(
    kind: str, target: Array, groups: tuple[Group, ...], block: int
) -> tuple[Array, Array]:
    """*Upper bound* and its order, as JAX may trace it: no decision on the host."""
    # NaN where the trapezoidal rule has too few nodes, or another bound may be lower.
    xp = namespace(target)
    if kind == "rdp":
        order = target
        value, _ = kernels.rdp(
            order, groups, direction="forward", on_lattice=True, block=block
        )
        return value, order
    kernel = kernels.best_epsilon if kind == "epsilon" else kernels.best_log_delta
    value, order = kernel(target, groups, on_lattice=True, block=block)
    log_delta = target if kind == "epsilon" else value
    lower = may_be_less(log_delta, groups)
    if kind == "epsilon":
        lower &= value > 0
    return xp.where(lower, np.nan, value), order


def traced_bound_at(
    kind: str, target: Array, groups: tuple[Group, ...], block: int, order: Array
) -> Array:
    """Computes `traced_bound` at a given order; differentiable, (n,)."""
    if kind == "rdp":
        return traced_bound(kind, target, groups, block)[0]
    moment = functools.partial(kernels.log_moment, rule=kernels.LATTICE_ANSWER)
    (spent,) = by_blocks(moment, (order - 1, groups), block)
    of = kernels.epsilon_at if kind == "epsilon" else kernels.log_delta_at
    return of(target, order - 1, spent)
