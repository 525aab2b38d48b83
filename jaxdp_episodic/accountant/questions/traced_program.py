"""Results for traced numbers: computed on the host, or in the JAX program itself."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import (
    engine_name,
    on_cpu,
    register_dataclasses,
    using_engine,
)
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import AnyStep, GaussianStep, parts_of
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.rdp import (
    KINDS,
    traced_bound,
    traced_bound_at,
)
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Group
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.dominating_pair import (
    poisson_levels,
    poisson_pair,
    runs_of_parts,
)
from jaxdp_episodic.accountant.questions.gradients import (
    LEAST_FROM_ONE,
    METHODS,
    NOISE,
    NUM_STEPS,
    ORDERS,
    difference,
    scale_of,
    slope,
)

# Names of the numbers that are not fields of the step.
DELTA = "delta"
EPSILON = "epsilon"


class Question(NamedTuple):
    """A question whose traced numbers are missing until the program runs."""

    kind: str  # "epsilon", "delta", "rdp" or "noise_multiplier"
    step: AnyStep  # with ... for missing numbers
    known: Mapping[str, Any]  # known arguments
    places: tuple[str, ...]  # field paths or argument names of the missing numbers
    options: Mapping[str, str]  # method or direction
    chosen: np.ndarray | None = None  # mask of the settings to be computed; None: all

    def answer(self, *missing: np.ndarray) -> np.ndarray:
        """Returns the result for these numbers, float64 of their shape."""
        step, others = self._known(missing)
        # JAX waits for this result, so that using JAX here could deadlock.
        with using_engine("numpy"):
            if self.kind == "rdp":
                return _rdp(step, others[ORDERS], **self.options)
            others.pop(self.kind, None)  # the target of a calibration
            ask = _QUESTIONS[self.kind]
            return np.asarray(ask(step, **others, **self.options), np.float64)

    def rows(
        self, words: Sequence[tuple[int, ...]], *missing: np.ndarray
    ) -> list[np.ndarray]:
        """Returns the result, (), and its derivatives by numbers, (i,) or (i, j)."""
        answer = self.answer(*missing)
        whole = [np.broadcast_to(one, answer.shape) for one in missing]
        found: dict[tuple[int, ...], np.ndarray] = {(): answer}
        with using_engine("numpy"), np.errstate(all="ignore"):
            for word in dict.fromkeys(filter(None, words)):
                i, *further = word
                if not further:
                    found[word] = self._slope(i, whole, answer)
                    continue

                def first(displacement: np.ndarray, i: int = i, j: int = further[0]):
                    moved = _displaced(whole, j, displacement)
                    return self._slope(i, moved, self.answer(*moved), held=False)

                scale = scale_of(self.places[further[0]], whole[further[0]])
                found[word] = difference(first, scale)
        return [found[word] for word in words]

    def _slope(
        self,
        i: int,
        missing: Sequence[np.ndarray],
        answer: np.ndarray,
        *,
        held: bool = True,
    ) -> np.ndarray:
        """The derivative by missing number i."""
        if self.kind == NOISE:
            # Epsilon is fixed at its target.
            inner = self._replace(kind=EPSILON, places=(*self.places, NOISE))
            numbers = (*missing, answer)
            at = inner.answer(*numbers)
            by_noise = inner._slope(len(missing), numbers, at, held=held)
            if self.places[i] == EPSILON:
                return 1 / by_noise
            return -inner._slope(i, numbers, at, held=held) / by_noise
        scale = scale_of(self.places[i], np.broadcast_to(missing[i], answer.shape))

        def moved(displacement: np.ndarray) -> Any:
            return self._resolved(_displaced(missing, i, displacement))

        if self.kind == "rdp":
            return difference(moved, scale)
        is_delta = self.kind == DELTA
        value = np.log(answer) if is_delta else answer
        found = slope(moved, value, scale, self.options["method"], held=held)
        return answer * found if is_delta else found

    def _resolved(self, missing: Sequence[np.ndarray]) -> Any:
        """The target question and the runs, or a curve, for real numbers of steps."""
        moved: dict[int, np.ndarray] = {}
        step, others = self._known(missing, moved)
        if self.kind == "rdp":
            return _rdp(step, others[ORDERS], **self.options)
        times = others.get(NUM_STEPS)
        times = np.asarray(1.0 if times is None else times, np.float64)
        parts, base = parts_of(step)
        question = (
            EpsilonAt(np.log(others[DELTA]))
            if self.kind == EPSILON
            else DeltaAt(np.asarray(others[EPSILON], np.float64))
        )
        return question, runs_of_parts(
            parts, [(moved[i] if i in moved else n) * times for i, n in enumerate(base)]
        )

    def refuse_derivatives(self, by: Sequence[int], *, second: bool = False) -> None:
        """Refuses derivatives that do not exist."""
        method = self.options.get("method", METHODS[0])
        if method not in METHODS:
            raise NotImplementedError(
                f"results with method={method!r} have no derivatives; "
                f"covered: {METHODS}"
            )
        parts, _ = parts_of(self.step)
        epochs = any(
            isinstance(part, GaussianStep) and (epoch_scheme(part.design) or part.bands)
            for part in parts
        )
        for place in (self.places[i] for i in by):
            name = place.rpartition(".")[2]
            is_count = name.startswith("counts[") or name == NUM_STEPS
            if is_count and (epochs or second):
                where = "with epoch schemes or bands" if epochs else "of second order"
                raise NotImplementedError(f"{place} has no derivative {where}")
            if name in _WHOLE:
                raise NotImplementedError(
                    f"{place} is a whole number and has no derivative: use integers"
                )

    def _known(
        self, missing: Sequence[np.ndarray], counts: dict[int, np.ndarray] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The step and the other arguments with all numbers filled in."""
        given = dict(zip(self.places, missing, strict=True))

        def of_chosen(value: Any) -> Any:
            if self.chosen is None or np.ndim(value) == 0:
                return value
            return np.broadcast_to(value, self.chosen.shape)[self.chosen]

        def filled(where: str, value: Any) -> Any:
            found = given.pop(where, value)
            if found is value:
                return of_chosen(value)
            if counts is not None and where.startswith("counts["):
                counts[int(where[len("counts[") : -1])] = found
                return np.rint(found)
            is_rate = where.endswith("sampling_probability")
            return _normal(found) if is_rate else found

        step: Any = mapped(self.step, filled)
        known = {name: of_chosen(value) for name, value in self.known.items()}
        return step, {**known, **given}


def _displaced(
    missing: Sequence[np.ndarray], i: int, displacement: np.ndarray
) -> list[np.ndarray]:
    """The missing numbers with number i displaced."""
    moved = list(missing)
    moved[i] = np.asarray(missing[i], np.float64) + displacement
    return moved


def _normal(rate: np.ndarray) -> np.ndarray:
    """Raises positive rates to normal numbers, which JAX threads do not flush to 0."""
    if rate.dtype != np.float64:
        return rate
    some = np.array(rate).view(np.int64) > 0
    return np.where(some, np.maximum(rate, np.finfo(np.float64).tiny), rate)


def _rdp(step: AnyStep, orders: Any, direction: str) -> np.ndarray:
    """Rényi divergences at one order for each setting."""
    orders = _validation.order_or_inf_array(ORDERS, orders)
    shape = np.broadcast_shapes(step.shape, orders.shape)
    return api.curve_of(step, orders[..., None], direction, shape)


_QUESTIONS = {
    "epsilon": api.epsilon,
    "delta": api.delta,
    NOISE: calibrate_noise_multiplier,
}
# Fields that are whole numbers, except counts of steps.
_WHOLE = (
    "size",
    "population",
    "num_episodes",
    "num_classes",
    "ways",
    "steps_per_epoch",
    "times",
    "batch_size",
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
_COUNTS = ("counts", NUM_STEPS)
_TRACED = (
    *("noise_multiplier", "sampling_probability", *_COUNTS),
    *(DELTA, EPSILON, ORDERS),
)

Words = tuple[tuple[int, ...], ...]
"""Requested values: the result, (), and derivatives by missing numbers, (i,)."""


def is_in_program(question: Question, words: Words = ((),)) -> bool:
    """Whether large batches of this question are compiled."""
    if engine_name() == "numpy" or question.kind not in KINDS:
        return False
    method, direction = (question.options.get(n) for n in ("method", "direction"))
    names = [place.rpartition(".")[2].partition("[")[0] for place in question.places]
    steps, _ = parts_of(question.step)
    return (
        method in ("rdp", None)
        and direction != "backward"
        and max(map(len, words)) < 2
        and all(map(poisson_levels, steps))
        and all(name in _TRACED for name in names)
    )


def evaluated(
    question: Question,
    words: Words,
    call_back: Callable[..., tuple[Array, ...]],
    shape: tuple[int, ...],
) -> Callable[..., tuple[Array, ...]]:
    """The requested values as a function of the missing numbers (``leaves``)."""
    import jax

    @jax.custom_batching.custom_vmap
    def call(*leaves: Array) -> tuple[Array, ...]:
        if math.prod(shape) < FEWEST:
            on_host = functools.partial(question.rows, words)
            return call_back(on_host, shape=shape, leaves=leaves)
        return in_program(*leaves)

    @jax.jit
    def in_program(*leaves: Array) -> tuple[Array, ...]:
        leaves = tuple(map(gathered, leaves))
        # The caller's settings must not affect this code.
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            rows = answer_and_slopes(question, words, shape, leaves)

        def of_host(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            rows, given = np.array(arrays[: len(words)]), arrays[len(words) :]
            left = np.isnan(rows).any(axis=0)
            if np.any(left):
                some = question._replace(chosen=left)
                rows[:, left] = some.rows(words, *(number[left] for number in given))
            return list(rows)

        unknown = functools.reduce(operator.or_, map(jax.numpy.isnan, rows))
        return jax.lax.cond(
            jax.numpy.any(unknown),
            lambda: call_back(of_host, shape=shape, leaves=(*rows, *leaves)),
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


def answer_and_slopes(
    question: Question, words: Words, shape: tuple[int, ...], leaves: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns the result and derivatives, float64 of the shape."""
    import jax

    xp = jax.numpy

    def row(value: Array) -> Array:
        return value[: math.prod(shape)].reshape(shape)

    numbers = _Numbers.of(question, shape, leaves)
    value, order = traced_bound(question.kind, *numbers.arguments)
    value = xp.where(numbers.idle, -np.inf if question.kind == DELTA else 0.0, value)
    value = row(xp.where(numbers.usual, value, np.nan))
    by = [i for (i,) in words[1:]]
    if not by:
        return (_delta_of(value) if question.kind == DELTA else value,)

    def answer(*leaves: Array) -> Array:
        arguments = _Numbers.of(question, shape, leaves).arguments
        return row(traced_bound_at(question.kind, *arguments, order))

    # Compute all derivatives together, to share common work.
    along = (
        xp.stack([xp.full_like(leaf, float(i == k)) for i in by])
        for k, leaf in enumerate(leaves)
    )
    moved = jax.vmap(lambda *a: jax.jvp(answer, leaves, a), out_axes=(None, 0))
    again, moves = moved(*along)
    rows = [xp.where(xp.isnan(again), np.nan, one) for one in moves]
    if question.kind == DELTA:
        value = _delta_of(value)
        rows = [value * one for one in rows]
    # A result of 0, or one for no steps, may have a kink.
    known = xp.isfinite(sum(rows, value)) & (value > 0)
    for i in by:
        if question.places[i].rpartition(".")[2] == "sampling_probability":
            rate = leaves[i]
            known &= (rate > 0) & (1 - rate >= LEAST_FROM_ONE)
    return tuple(xp.where(known, one, np.nan) for one in (value, *rows))


def gathered(leaf: Array) -> Array:
    """Replicates a number on an explicit mesh: blocks are divided differently."""
    import jax

    sharding = jax.typeof(leaf).sharding
    if all(axis is None for axis in sharding.spec):
        return leaf
    spec = jax.sharding.PartitionSpec()
    return jax.sharding.reshard(leaf, jax.sharding.NamedSharding(sharding.mesh, spec))


def _delta_of(log_delta: Array) -> Array:
    """Delta rounded up, as in `api.delta_of`; NaN below normal numbers."""
    import jax

    xp = jax.numpy
    near = xp.minimum(xp.nextafter(xp.exp(log_delta), np.inf), 1.0)
    is_normal = xp.isneginf(log_delta) | (log_delta > _SMALLEST_LOG_DELTA)
    near = xp.where(xp.isneginf(log_delta), 0.0, near)
    return xp.where(is_normal, near, np.nan)


class _Numbers(NamedTuple):
    """The numbers of a batch: flat arrays of all settings, padded to whole blocks."""

    arguments: tuple[Array, tuple[Group, ...], int]  # target, groups and block
    usual: Array  # whether the numbers are in the range of the compiled program
    idle: Array  # whether there are no steps

    @classmethod
    def of(
        cls, question: Question, shape: tuple[int, ...], leaves: Sequence[Array]
    ) -> _Numbers:
        """The numbers of a question with the missing ones filled in."""
        import jax

        xp, size = jax.numpy, math.prod(shape)
        block = min(size, _CPU_BLOCK if on_cpu() else _ACCELERATOR_BLOCK)

        def flat(number: Any) -> Array:
            number = xp.broadcast_to(xp.asarray(number, np.float64), shape)
            return xp.pad(number.reshape(-1), (0, -size % block), "edge")

        given = dict(zip(question.places, leaves, strict=True))
        step = mapped(question.step, lambda where, value: given.get(where, value))
        others = {**question.known, **given}
        parts, counts = parts_of(step)
        counts = [flat(count) for count in counts]
        times = others.get(NUM_STEPS)
        times = flat(1.0 if times is None else times)
        losses = [poisson_pair(cast(GaussianStep, part)).map(flat) for part in parts]
        coins = [coin for part in parts for coin in poisson_levels(part)]
        rates = [flat(coin.sampling_probability) for coin in coins]
        name, some_target, is_inside = _TARGETS[question.kind]
        target = flat(others[name])
        usual = functools.reduce(
            operator.and_,
            (
                is_inside(target),
                *(_is_whole(count) for count in (times, *counts)),
                *(_is_within(rate, _RATES) for rate in rates),
                *(_is_within(loss.outer_rate, _RATES) for loss in losses),
                *(_is_within(loss.shift, _SHIFTS) for loss in losses),
            ),
        )
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
        return cls((target, groups, block), usual, idle)


def _is_whole(count: Array) -> Array:
    import jax

    return (count == jax.numpy.floor(count)) & (count >= 0) & (count <= _MOST_STEPS)


def _is_within(number: Array, ends: tuple[float, float]) -> Array:
    return (number >= ends[0]) & (number <= ends[1])
