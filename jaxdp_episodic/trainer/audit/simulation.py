"""Simulates runs of a step, with and without the unit, and counts their losses.

The statistic is the sum of the steps' log-likelihood ratios, the most powerful test.
Draws are never kept: 10^10 steps take the memory of 10^5.

Their random numbers come from many small generators: xoshiro128++ costs a fraction of
threefry and passes the batteries of tests (BigCrush, PractRand) that a simulation
needs. Each stream has a 128-bit state of its own, made by threefry: that two of n
streams overlap has a probability below ``n^2 2^-94`` for 2^32 numbers each. It is for
audits only; nothing that is released is ever made with it.

Reference: Blackman and Vigna (2021), "Scrambled Linear Pseudorandom Number Generators",
ACM TOMS 47(4), arXiv:1805.01407, xoshiro128++.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.trainer.audit.worst_case import Branches

State = tuple[Array, Array, Array, Array]


def seeded(key: Array, streams: int) -> State:
    """Returns the states of independent generators, each (streams,) uint32."""
    words = jax.random.bits(key, (4, streams), jnp.uint32)
    is_fixed_point = jnp.all(words == 0, axis=0)  # the only one
    last = jnp.where(is_fixed_point, jnp.uint32(1), words[3])
    return words[0], words[1], words[2], last


def next_bits(state: State) -> tuple[Array, State]:
    """Returns 32 fresh bits of every stream, (streams,) uint32, and the next states."""
    s0, s1, s2, s3 = state
    bits = _rotated(s0 + s3, 7) + s0
    shifted = s1 << 9
    s2 = s2 ^ s0
    s3 = s3 ^ s1
    s1 = s1 ^ s2
    s0 = s0 ^ s3
    s2 = s2 ^ shifted
    return bits, (s0, s1, s2, _rotated(s3, 11))


def normal_pairs(state: State) -> tuple[tuple[Array, Array], State]:
    """Returns two independent standard normal numbers of every stream, float32.

    Box and Muller's (1958) radius is made from 32 bits, so the tails reach 6.66
    deviations and chances above 1e-7 are right to 1 %; float32 numbers made from 23
    bits, as `jax.random.normal` makes them, end at 5.4.
    """
    first, state = next_bits(state)
    second, state = next_bits(state)
    # (bits + 1/2) / 2^32 in float32: relative precision where it is small.
    uniform = (first.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # It rounds to 1 at most, where the logarithm is 0.
    radius = jnp.sqrt(-2.0 * jnp.log(uniform))
    angle = second.astype(jnp.float32) * jnp.float32(2 * math.pi * 2.0**-32)
    return (radius * jnp.cos(angle), radius * jnp.sin(angle)), state


def _rotated(word: Array, bits: int) -> Array:
    return (word << bits) | (word >> (32 - bits))


_MOST_STREAMS = 1 << 17  # arrays of half a megabyte
# Steps in one call of the kernel: a second or two, after which progress is shown.
_STEPS_PER_CALL = 1 << 27
# Density ratios are clipped at e^40: no count of draws shows a larger epsilon.
_LARGEST_EXPONENT = 40.0
NUM_BINS = 2048  # of a histogram of losses, by which the threshold is chosen


class Tables(NamedTuple):
    """A `Branches` as the kernel takes it; float32 but for the 32-bit cuts."""

    # (c,) uint32; which branch is taken is the number of cuts at or below a random
    # word. The first is the chance that the outer unit is not drawn.
    cuts: Any
    shifts: Any  # (2, c) mean of the release in every branch, with and without the unit
    means: Any  # (d,) all different means but 0
    weights: Any  # (2, d + 1) their chances with and without the unit, that of 0 first
    mirror: Any  # see `Branches`
    multiplier_cuts: Any  # (k - 1,) uint32
    multipliers: Any  # (k,)


class Part(NamedTuple):
    """Equal steps of a run, or equal blocks of epochs."""

    tables: Tables  # of one step
    number: int  # how many of them
    is_mirrored: bool  # see `Branches`
    block: int = 1  # see `Branches`, as ``taken``
    taken: int = 1  # 1 for steps


def make_part(branches: Branches, number: int) -> Part:
    """Returns ``number`` steps, or blocks, with these branches."""
    outer = branches.outer_rate
    chances = np.concatenate([[1 - outer], outer * branches.weight])
    shifts = np.stack([branches.with_unit, branches.without_unit])
    means = np.unique(np.concatenate([[0.0], *shifts]))
    means = np.concatenate([[0.0], means[means != 0]])
    weights = np.stack(
        [[branches.weight[row == mean].sum() for mean in means] for row in shifts]
    )
    tables = Tables(
        _cuts(chances),
        shifts.astype(np.float32),
        means[1:].astype(np.float32),
        weights.astype(np.float32),
        np.float32(branches.mirror),
        _cuts(branches.multiplier_weight),
        branches.multiplier.astype(np.float32),
    )
    return Part(tables, number, branches.is_mirrored, branches.block, branches.taken)


def histogram(losses: Array, edges: Array) -> Array:
    """A tally: how many losses fall into each of `NUM_BINS` equal bins, (NUM_BINS,).

    ``edges`` is (1,), the reach: the bins cover [-reach, reach]; what lies beyond falls
    into the outermost.
    """
    index = jnp.floor((losses + edges[0]) * (0.5 * NUM_BINS / edges[0]))
    index = jnp.clip(index, 0, NUM_BINS - 1).astype(jnp.int32)
    return jnp.zeros(NUM_BINS, jnp.int32).at[index].add(1)


def exceedances(losses: Array, edges: Array) -> Array:
    """A tally: how many losses exceed each of the (k,) thresholds ``edges``."""
    return jnp.stack([jnp.sum(losses > edge, dtype=jnp.int32) for edge in edges])


def tallied(
    parts: Sequence[Part],
    key: Array,
    num_draws: int,
    tally: Callable[[Array, Array], Array],
    edges: Any,
    *,
    with_unit: bool,
    on_draws: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, int]:
    """Returns a tally of the losses of ``num_draws`` runs, and their exact number.

    The key is typed; to count by thresholds, not that of the draws that chose them.
    ``num_draws`` are rounded up to whole passes of all generators; ``on_draws`` is told
    after every call of the kernel how many were simulated.
    """
    streams = 1 << max(0, math.ceil(math.log2(max(num_draws / 2, 1))))
    streams = min(_MOST_STREAMS, streams)
    passes = -(-num_draws // (2 * streams))
    counts = np.asarray([part.number for part in parts], np.int32)
    blocks = np.asarray([(part.block, part.taken) for part in parts], np.int32)
    per_pass = 2 * streams * sum(part.number * part.taken for part in parts)
    per_call = max(1, _STEPS_PER_CALL // max(per_pass, 1))
    kinds = tuple((part.is_mirrored, part.block > 1) for part in parts)
    tables = tuple(part.tables for part in parts)
    edges, side = np.asarray(edges, np.float32), np.int32(not with_unit)
    state = seeded(key, streams)
    total: Any = 0
    for done in range(0, passes, per_call):
        now = min(per_call, passes - done)
        state, found = _simulated(
            state, tables, counts, blocks, edges, np.int32(now), side, tally, kinds
        )
        total = total + np.asarray(found, np.int64)
        if on_draws is not None:
            on_draws(2 * streams * now)
    return total, 2 * streams * passes


def log_likelihood_ratio(branches: Branches, release: np.ndarray) -> np.ndarray:
    """Returns the log-likelihood ratio of releases, with the unit against without it.

    Given that the outer unit was drawn, of branches that are not mirrored and without
    multipliers. Releases (...,) are in noise deviations; of a block (..., taken).
    """
    release = np.asarray(release, np.float64)[..., None]
    axes = (-2, -1) if branches.block > 1 else -1
    idle = branches.block - branches.taken
    logs = []
    for means in (branches.with_unit, branches.without_unit):
        exponent = means * (release - 0.5 * means)
        largest = np.maximum(exponent.max(axis=axes, keepdims=True), 0.0)
        total = (branches.weight * np.exp(exponent - largest)).sum(axis=axes)
        largest = largest.reshape(total.shape)
        with np.errstate(divide="ignore"):
            logs.append(np.log(total + idle * np.exp(-largest)) + largest)
    return np.clip(logs[0] - logs[1], -1e3, 1e3)


@functools.partial(jax.jit, static_argnames=("tally", "kinds"))
def _simulated(
    state: State,
    tables: tuple[Tables, ...],
    counts: Array,
    blocks: Array,
    edges: Array,
    passes: Array,
    side: Array,
    tally: Callable[[Array, Array], Array],
    kinds: tuple[tuple[bool, bool], ...],
) -> tuple[State, Array]:
    """Passes of two runs a stream; side 0 is with the unit, 1 without.

    ``kinds`` says of every part whether it is mirrored, and made of blocks.
    """
    streams = len(state[0])

    def one_pass(_: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, total = carry
        losses = jnp.zeros(streams, jnp.float32), jnp.zeros(streams, jnp.float32)
        for part, table in enumerate(tables):

            def one_step(_: Array, carry: Any, table=table, part=part) -> Any:
                state, (first, second) = carry
                is_mirrored, is_block = kinds[part]
                if is_block:
                    (a, b), state = _block_losses(table, state, blocks[part], side)
                else:
                    noise, state = normal_pairs(state)
                    a, state = _loss(table, noise[0], state, is_mirrored, side)
                    b, state = _loss(table, noise[1], state, is_mirrored, side)
                return state, (first + a, second + b)

            begun = state, losses
            state, losses = jax.lax.fori_loop(0, counts[part], one_step, begun)
        return state, total + tally(losses[0], edges) + tally(losses[1], edges)

    start = jax.eval_shape(tally, jax.ShapeDtypeStruct((streams,), jnp.float32), edges)
    zeros = jnp.zeros(start.shape, start.dtype)
    return jax.lax.fori_loop(0, passes, one_pass, (state, zeros))


def _loss(
    table: Tables, noise: Array, state: State, is_mirrored: bool, side: Array
) -> tuple[Array, State]:
    """The log-likelihood ratio of one release."""
    word, state = next_bits(state)
    factor: Array | float = 1.0
    if table.multipliers.shape[0] > 1:
        which, state = next_bits(state)
        factor = _picked(which, table.multiplier_cuts[:-1], table.multipliers)
    # The mirrored pair without the unit is the reflection of the one with it.
    row = table.shifts[0] if is_mirrored else table.shifts[side]
    own = factor * _picked(word, table.cuts[1:-1], row)
    if not is_mirrored:
        loss = _log_ratio(table, noise + own, factor)
    else:
        other = factor * _picked(word, table.cuts[1:-1], table.shifts[1])
        mirror = factor * table.mirror
        # One normal number serves both: the two events exclude each other.
        above, reflected = noise + own, other - noise
        is_above = above > mirror
        loss = _log_ratio(table, jnp.where(is_above, above, reflected), factor)
        loss = jnp.maximum(loss, 0.0)
        loss = jnp.where(is_above, loss, jnp.where(reflected > mirror, -loss, 0.0))
        loss = jnp.where(side == 0, loss, -loss)
    return jnp.where(word >= table.cuts[0], loss, 0.0), state


def _block_losses(
    table: Tables, state: State, block: Array, side: Array
) -> tuple[tuple[Array, Array], State]:
    """The log-likelihood ratios of two runs of a block.

    Its steps are alike, so the unit's is the first, if it is among those taken.
    """
    length, taken = block[0].astype(jnp.float32), block[1].astype(jnp.float32)
    # In float32 2^32 cannot be told from 2^32 - 1, and all of them must be below.
    is_whole = block[0] == block[1]
    cut = jnp.where(is_whole, 0.0, taken / length * 2.0**32).astype(jnp.uint32)
    own = []
    for _ in range(2):
        word, state = next_bits(state)
        mean = _picked(word, table.cuts[1:-1], table.shifts[side])
        word, state = next_bits(state)
        own.append(jnp.where(is_whole | (word < cut), mean, 0.0))

    def one_step(step: Array, carry: Any) -> Any:
        state, sums = carry
        noises, state = normal_pairs(state)
        found = []
        for totals, noise, mean in zip(sums, noises, own, strict=True):
            release = noise + jnp.where(step == 0, mean, 0.0)
            pairs = zip(totals, table.means, strict=True)
            found.append(tuple(t + _exponential(m, release) for t, m in pairs))
        return state, tuple(found)

    none = tuple(jnp.zeros_like(own[0]) for _ in range(table.means.shape[0]))
    state, sums = jax.lax.fori_loop(0, block[1], one_step, (state, (none, none)))

    def loss(totals: tuple[Array, ...]) -> Array:
        parts = []
        for weights in table.weights:
            part = length - taken + weights[0] * taken
            for index, total in enumerate(totals, start=1):
                part = part + weights[index] * total
            parts.append(part)
        return jnp.log(parts[0] / parts[1])

    return (loss(sums[0]), loss(sums[1])), state


def _exponential(mean: Array, release: Array) -> Array:
    """The density ratio of a mean to 0, up to ``e^±40``."""
    exponent = mean * (release - 0.5 * mean)
    return jnp.exp(jnp.clip(exponent, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def _picked(word: Array, cuts: Array, values: Array) -> Array:
    """The value of the branch that a random word falls into."""
    picked = jnp.broadcast_to(values[0], word.shape)
    for index in range(cuts.shape[0]):
        picked = jnp.where(word >= cuts[index], values[index + 1], picked)
    return picked


def _log_ratio(table: Tables, release: Array, factor: Array | float) -> Array:
    """Log of the density ratio, up to ``e^±40``."""
    sums = [jnp.full(release.shape, weights[0]) for weights in table.weights]
    for index in range(table.means.shape[0]):
        term = _exponential(factor * table.means[index], release)
        chances = table.weights[:, index + 1]
        sums = [s + chance * term for s, chance in zip(sums, chances, strict=True)]
    return jnp.log(sums[0] / sums[1])


def _cuts(chances: np.ndarray) -> np.ndarray:
    """Where each branch ends among the 2^32 words; the last one takes the rest."""
    ends = np.cumsum(chances / np.sum(chances))
    return np.minimum(np.rint(ends * 2.0**32), 2.0**32 - 1).astype(np.uint32)
