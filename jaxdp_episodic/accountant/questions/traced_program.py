"""Rényi results of large traced batches, compiled into the JAX program itself."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import engine_name, on_cpu, register_dataclasses
from jaxdp_episodic.accountant.describe.designs import Poisson
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import GaussianStep, OneStep, parts_of
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods import rdp
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array, by_blocks, namespace
from jaxdp_episodic.accountant.questions.gradients import (
    DELTA,
    EPSILON,
    LEAST_FROM_ONE,
    NOISE,
    NUM_STEPS,
    ORDERS,
)

# Number of settings from which a batch is compiled. This takes 5 s of CPU time, then
# 0.02 ms per setting instead of 0.10 on the host: it pays after 16 such calls.
FEWEST = 4096
# Number of settings per block: its arrays fit the cache of a CPU, or device memory.
_CPU_BLOCK = 64
_ACCELERATOR_BLOCK = 131072
# Ranges of numbers for the compiled program; the host computes all others.
_RATES = (1e-60, 1.0)
_SHIFTS = (1e-20, 1e70)
_MOST_STEPS = 2.0**53
_LARGEST_ORDER = 1e30
# Smallest log(delta) that is a normal number.
_SMALLEST_LOG_DELTA = -700.0
_SOME_FIELD = 0.5  # placeholder for numbers that are not used
# Of each kind of question the target argument, a placeholder for it, and its range.
_TARGETS: dict[str, tuple[str, float, Callable[[Array], Array]]] = {
    EPSILON: (DELTA, 0.5, lambda x: (x > 0) & (x < 1)),
    DELTA: (EPSILON, 0.5, lambda x: (x >= 0) & (x < np.inf)),
    "rdp": (ORDERS, 2.0, lambda x: (x > 1) & (x < _LARGEST_ORDER)),
}
# Numbers that may be traced.
_TRACED = (NOISE, "sampling_probability", "counts", NUM_STEPS, DELTA, EPSILON, ORDERS)

Words = tuple[tuple[int, ...], ...]
"""Requested values: the result, (), and derivatives by missing numbers, (i,)."""
CallBack = Callable[
    [Callable[..., Any], Words, tuple[int, ...], Sequence[Array]], tuple[Array, ...]
]
"""Calls a function of arrays of a shape on the host; it returns a row for each word."""


def poisson_levels(step: OneStep) -> tuple[Poisson, ...]:
    """Returns the levels of a step whose pair `poisson_pair` returns, else ()."""
    if not isinstance(step, GaussianStep) or step.clip_unit != step.privacy_unit:
        return ()
    if any((step.population, step.people, step.bands)):
        return ()
    if step.neighboring_relation not in ("add_remove", "zero_out"):
        return ()
    levels = getattr(step.design, "levels", ())
    coins = tuple(level for level in levels if isinstance(level, Poisson))
    is_level = step.privacy_unit in step.design.level_names
    return coins if is_level and len(coins) == len(levels) else ()


def poisson_pair(step: Any) -> SampledGaussianLoss:
    """Returns the pair of a step that has `poisson_levels`; numbers may be traced."""
    last = step.design.level_names.index(str(step.privacy_unit))
    rates: list[Any] = [c.sampling_probability for c in poisson_levels(step)]
    noise: Any = step.noise_multiplier
    with np.errstate(divide="ignore", over="ignore"):
        shift = namespace(noise).divide(1.0, noise)
    return SampledGaussianLoss(math.prod(rates[:last], start=1.0), rates[last], shift)


def is_in_program(question: Any, words: Words = ((),)) -> bool:
    """Whether large batches of this question are compiled."""
    method, direction = (question.options.get(n) for n in ("method", "direction"))
    names = (place.rpartition(".")[2].partition("[")[0] for place in question.places)
    return (
        question.kind in _TARGETS
        and engine_name() != "numpy"
        and method in ("rdp", None)
        and direction != "backward"
        and max(map(len, words)) < 2
        and all(map(poisson_levels, parts_of(question.step)[0]))
        and all(name in _TRACED for name in names)
    )


def evaluated(
    question: Any, words: Words, call_back: CallBack, shape: tuple[int, ...]
) -> Callable[..., tuple[Array, ...]]:
    """The requested values as a function of the missing numbers (``leaves``)."""
    import jax

    @jax.custom_batching.custom_vmap
    def call(*leaves: Array) -> tuple[Array, ...]:
        if math.prod(shape) < FEWEST:
            rows = functools.partial(question.rows, words)
            return call_back(rows, words, shape, leaves)
        return in_program(*leaves)

    @jax.jit
    def in_program(*leaves: Array) -> tuple[Array, ...]:
        leaves = tuple(map(gathered, leaves))
        # The caller's settings must not affect this code.
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            rows = answer_and_slopes(question, words, shape, leaves)
        unknown = functools.reduce(operator.or_, map(jax.numpy.isnan, rows))
        rest = functools.partial(_completed, question, words)
        return jax.lax.cond(
            jax.numpy.any(unknown),
            lambda: call_back(rest, words, shape, (*rows, *leaves)),
            lambda: rows,
        )

    @call.def_vmap
    def batched(size: int, are_batched: Sequence[bool], *leaves: Array) -> Any:
        whole = (size, *shape)
        every = (
            leaf if is_batched else jax.numpy.broadcast_to(leaf, whole)
            for leaf, is_batched in zip(leaves, are_batched, strict=True)
        )
        rows = evaluated(question, words, call_back, whole)(*every)
        return rows, (True,) * len(rows)

    del batched
    return call


def _completed(question: Any, words: Words, *arrays: np.ndarray) -> np.ndarray:
    """The rows, with the settings that the program left as NaN computed on the host."""
    shape, number = arrays[0].shape, len(words)
    every = np.array(arrays).reshape(len(arrays), -1)
    rows = every[:number]
    index = np.flatnonzero(np.isnan(rows).any(axis=0))
    if index.size:
        some = question.of_some(shape, index)
        rows[:, index] = some.rows(words, *every[number:, index])
    return rows.reshape(-1, *shape)


def gathered(leaf: Array) -> Array:
    """Replicates a number on an explicit mesh: blocks are divided differently."""
    import jax

    sharding = jax.typeof(leaf).sharding
    if not any(sharding.spec):
        return leaf
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.sharding.reshard(leaf, whole)


def answer_and_slopes(
    question: Any, words: Words, shape: tuple[int, ...], leaves: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns the result and derivatives, float64 of the shape; NaN: not known."""
    import jax

    xp, kind, size = jax.numpy, question.kind, math.prod(shape)
    arguments, usual, idle = _numbers(question, shape, leaves)
    value, order = _bound(kind, *arguments)
    value = xp.where(idle, -np.inf if kind == DELTA else 0.0, value)
    value = xp.where(usual, value, np.nan)[:size].reshape(shape)
    delta = _delta_of(value) if kind == DELTA else value
    by = [i for (i,) in words[1:]]
    if not by:
        return (delta,)

    def at_order(*leaves: Array) -> Array:
        """The bound, or the logarithm of delta, at the order that is best."""
        (target, groups, block), _, _ = _numbers(question, shape, leaves)
        if kind == "rdp":
            return _bound(kind, target, groups, block)[0][:size].reshape(shape)
        rule = MomentRule(rdp.LARGER, rdp.LATTICE)
        moment = functools.partial(rdp.log_moment, rule=rule)
        (spent,) = by_blocks(moment, (order - 1, groups), block)
        of = rdp.epsilon_at if kind == EPSILON else rdp.log_delta_at
        return of(target, order - 1, spent)[:size].reshape(shape)

    # Compute all derivatives together, to share common work.
    along = (
        xp.stack([xp.full_like(leaf, float(i == k)) for i in by])
        for k, leaf in enumerate(leaves)
    )
    moved = jax.vmap(lambda *a: jax.jvp(at_order, leaves, a), out_axes=(None, 0))
    again, moves = moved(*along)
    rows = [xp.where(xp.isnan(again), np.nan, one) for one in moves]
    rows = [delta * one for one in rows] if kind == DELTA else rows
    # A result of 0, or one for no steps, may have a kink.
    known = xp.isfinite(sum(rows, delta)) & (delta > 0)
    for i in by:
        if question.places[i].rpartition(".")[2] == "sampling_probability":
            known &= (leaves[i] > 0) & (1 - leaves[i] >= LEAST_FROM_ONE)
    return tuple(xp.where(known, one, np.nan) for one in (delta, *rows))


def _bound(
    kind: str, target: Array, groups: tuple[Group, ...], block: int
) -> tuple[Array, Array]:
    """*Upper bound* and its order; NaN where another bound may be lower."""
    # NaN also where the trapezoidal rule has too few nodes.
    import jax

    if kind == "rdp":
        options: Any = {"direction": "forward", "on_lattice": True, "block": block}
        return rdp.rdp(target, groups, **options)
    kernel = rdp.best_epsilon if kind == EPSILON else rdp.best_log_delta
    value, order = kernel(target, groups, on_lattice=True, block=block)
    log_delta = target if kind == EPSILON else value
    xp = jax.numpy
    total = sum(xp.sum(g.count * rdp.estimate(g.loss), axis=0) for g in groups)
    lower = xp.log(total) < log_delta + rdp.NEAR
    if kind == EPSILON:
        lower &= value > 0
    return xp.where(lower, np.nan, value), order


def _delta_of(log_delta: Array) -> Array:
    """Delta rounded up, as in `api.delta_of`; NaN below normal numbers."""
    import jax

    xp = jax.numpy
    near = xp.minimum(xp.nextafter(xp.exp(log_delta), np.inf), 1.0)
    near = xp.where(log_delta > _SMALLEST_LOG_DELTA, near, np.nan)
    return xp.where(xp.isneginf(log_delta), 0.0, near)


def _numbers(
    question: Any, shape: tuple[int, ...], leaves: Sequence[Array]
) -> tuple[tuple[Array, tuple[Group, ...], int], Array, Array]:
    """The numbers of all settings, flat and padded to blocks: target, groups, block.

    Also whether they are in the range of the program, and whether there are no steps.
    """
    import jax

    xp, size = jax.numpy, math.prod(shape)
    block = min(size, _CPU_BLOCK if on_cpu() else _ACCELERATOR_BLOCK)

    def flat(number: Any) -> Array:
        number = xp.broadcast_to(xp.asarray(number, np.float64), shape)
        return xp.pad(number.reshape(-1), (0, -size % block), "edge")

    def within(number: Array, ends: tuple[float, float]) -> Array:
        return (number >= ends[0]) & (number <= ends[1])

    given = dict(zip(question.places, leaves, strict=True))
    step = mapped(question.step, lambda where, value: given.get(where, value))
    others = {**question.known, **given}
    parts, counts = parts_of(step)
    times = others.get(NUM_STEPS)
    counts = [*map(flat, counts), flat(1.0 if times is None else times)]
    losses = [poisson_pair(part).map(flat) for part in parts]
    coins = [coin for part in parts for coin in poisson_levels(part)]
    rates = [flat(coin.sampling_probability) for coin in coins]
    name, some_target, is_inside = _TARGETS[question.kind]
    target = flat(others[name])
    checks = [
        *(within(n, (0, _MOST_STEPS)) & (n == xp.floor(n)) for n in counts),
        *(within(rate, _RATES) for rate in rates),
        *(within(loss.outer_rate, _RATES) for loss in losses),
        *(within(loss.shift, _SHIFTS) for loss in losses),
    ]
    usual = functools.reduce(operator.and_, checks, is_inside(target))
    *counts, times = counts
    counts = xp.stack([xp.where(usual, count * times, 1.0) for count in counts])
    idle = xp.sum(counts, axis=0) == 0

    def stacked(columns: Sequence[Array]) -> Array:
        return xp.stack([xp.where(usual, one, _SOME_FIELD) for one in columns])

    fields = zip(*(loss.fields for loss in losses), strict=True)
    loss = SampledGaussianLoss(*map(stacked, fields))
    register_dataclasses(loss)
    groups = (Group(loss, xp.where(idle, 1.0, counts)),)
    target = xp.where(usual, target, some_target)
    target = xp.log(target) if question.kind == EPSILON else target
    return (target, groups, block), usual, idle
