"""Epsilon and others within a JAX program; see `jaxdp_episodic.traced`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import engine_name, on_cpu, register_dataclasses
from jaxdp_episodic.accountant.describe.designs import Poisson, epoch_scheme
from jaxdp_episodic.accountant.describe.releases import LaplaceRelease
from jaxdp_episodic.accountant.describe.spec import (
    AT_LEAST_ZERO,
    mapped,
    traced_numbers,
    without_traced,
)
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
    parts_of,
)
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods import rdp as renyi
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array, by_blocks, namespace
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.gradients import (
    DELTA,
    EPSILON,
    LEAST_FROM_ONE,
    METHODS,
    NOISE,
    NUM_STEPS,
    ORDERS,
    Question,
    is_count,
)
from jaxdp_episodic.files.optional import require

# Fields that are whole numbers, except counts of steps.
_WHOLE = (
    *("size", "population", "num_episodes", "num_classes", "ways"),
    *("steps_per_epoch", "times", "batch_size"),
)
# Marks an error whose message XLA raises in full.
_RAISED = "_jaxdp_episodic_raised"
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
Check = Callable[[str, Any], np.ndarray]
Words = tuple[tuple[int, ...], ...]
"""Requested values: the result, (), and derivatives by missing numbers, (i,)."""


def epsilon(
    step: AnyStep, *, delta: Any, num_steps: Any = None, method: str = "exact"
) -> Any:
    """Returns `jaxdp_episodic.epsilon` for values that JAX may trace.

    Args:
      step: a step, a release, or a run made by `compose`; its numbers may be traced.
      delta: in [0, 1].
      num_steps: whole number >= 0; None for one repetition of a composed run. With a
        floating dtype it has a derivative, as a real number.
      method: "rdp", "exact" or "pld", which has no derivatives.

    Returns:
      A JAX array of the broadcast shape, nats: float64 if x64 is enabled, otherwise
      float32, rounded up.

    Raises:
      ValueError: a known number out of range, or a step without ``num_steps``. A traced
        number out of range raises when the program runs, as a JAX runtime error with
        this message.
      NotImplementedError: a derivative by a whole number, or one that the method or a
        mechanism does not have.
    """
    arguments = {DELTA: _checked(DELTA, delta, _validation.probability_array)}
    return _counted(EPSILON, step, num_steps, arguments, method)


def delta(
    step: AnyStep, *, epsilon: Any, num_steps: Any = None, method: str = "exact"
) -> Any:
    """Returns `jaxdp_episodic.delta` for values that JAX may trace.

    Args:
      step: see `epsilon`.
      epsilon: >= 0, nats.
      num_steps: see `epsilon`.
      method: see `epsilon`.

    Returns:
      Like `epsilon`: in [0, 1], rounded up; positive values never become 0.
    """
    arguments = {EPSILON: _checked(EPSILON, epsilon, _validation.nonnegative_array)}
    return _counted(DELTA, step, num_steps, arguments, method)


def noise_multiplier(
    step: GaussianStep | LaplaceRelease,
    *,
    epsilon: Any,
    delta: Any,
    num_steps: Any,
    method: str = "exact",
) -> Any:
    """Returns `calibrate_noise_multiplier` for values that JAX may trace.

    Args:
      step: the step; its own noise is ignored.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1].
      num_steps: whole number >= 0.
      method: see `epsilon`.

    Returns:
      Like `epsilon`: a noise multiplier that meets the target, rounded up.
    """
    kinds = GaussianStep | LaplaceRelease
    _validation.instance("step", step, kinds, "a GaussianStep or a LaplaceRelease")
    arguments = {
        EPSILON: _checked(EPSILON, epsilon, _validation.positive_array),
        DELTA: _checked(DELTA, delta, _validation.positive_share_array),
    }
    step = dataclasses.replace(step, noise_multiplier=1.0)
    return _counted(NOISE, step, num_steps, arguments, method)


def rdp(step: AnyStep, orders: Any, *, direction: str = "both") -> Any:
    """Returns `jaxdp_episodic.rdp` for values that JAX may trace.

    Args:
      step: see `epsilon`.
      orders: each > 1, any shape.
      direction: "forward", "backward" or "both".

    Returns:
      Like `epsilon`, of shape ``step.shape + np.shape(orders)``.
    """
    api.check_step(step)
    _validation.choice("direction", direction, api.DIRECTIONS)
    orders = _checked(ORDERS, orders, _validation.order_or_inf_array)
    axes = (1,) * np.ndim(orders)

    def expanded(_: str, value: Any) -> Any:
        return value.reshape(value.shape + axes) if np.ndim(value) else value

    shape = step.shape + np.shape(orders)
    step = mapped(step, expanded)
    arguments = {ORDERS: orders}
    return _answer("rdp", step, arguments, {"direction": direction}, shape)


def _counted(
    kind: str, step: AnyStep, num_steps: Any, arguments: dict[str, Any], method: str
) -> Any:
    """The result for ``num_steps`` steps."""
    api.check_step(step)
    api.check_method(method)
    if num_steps is None and not isinstance(step, ComposedSteps):
        raise ValueError("num_steps must be a whole number >= 0, got None")
    if num_steps is not None:
        num_steps = _checked(NUM_STEPS, num_steps, AT_LEAST_ZERO)
    arguments = {**arguments, NUM_STEPS: num_steps}
    given = {name: value for name, value in arguments.items() if value is not None}
    shape = _validation.broadcast_shape(step=step, **given)
    return _answer(kind, step, arguments, {"method": method}, shape)


def _answer(
    kind: str,
    step: AnyStep,
    arguments: dict[str, Any],
    options: dict[str, str],
    shape: tuple[int, ...],
) -> Any:
    """Returns the result as a JAX array; computes it now if nothing is traced."""
    require("jax", purpose="jaxdp_episodic.traced", extra=None)
    import jax

    missing, known = traced_numbers(step), {}
    for name, value in arguments.items():
        (missing if _validation.is_traced(value) else known)[name] = value
    question = Question(kind, without_traced(step), known, tuple(missing), options)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
    if not missing:
        found = np.broadcast_to(question.answer(), shape)
        return jax.numpy.asarray(_rounded_up(found, dtype))
    leaves = [
        jax.numpy.broadcast_to(_canonical(place, value), shape)
        for place, value in missing.items()
    ]
    return _differentiable(question, shape, dtype)(*leaves)


def _checked(name: str, value: Any, check: Check) -> Any:
    """Checks a known number; a traced one is checked when the program runs."""
    return value if _validation.is_traced(value) else check(name, value)


def _canonical(place: str, value: Any) -> Any:
    """Converts a traced number, exactly, to a type that callbacks can pass."""
    import jax

    value = jax.numpy.array(_gathered(value))  # for one callback; JAX's under vmap too
    is_a = functools.partial(jax.numpy.issubdtype, value.dtype)
    if not (is_a(np.floating) or is_a(np.integer)):
        raise TypeError(
            f"{place} must be a number or an array of numbers, got one of "
            f"{value.dtype} that JAX traces"
        )
    kind = jax.dtypes.canonicalize_dtype(np.float64)
    if is_a(np.floating) or kind == np.float64:
        return jax.lax.convert_element_type(value, kind)
    # NumPy has no integers of fewer than 8 bits.
    is_narrow = value.dtype.kind not in "iu"
    return jax.lax.convert_element_type(value, np.int32) if is_narrow else value


def _gathered(leaf: Array) -> Array:
    """Replicates a number on an explicit mesh: blocks are divided differently."""
    import jax

    sharding = jax.typeof(leaf).sharding
    if not any(sharding.spec):
        return leaf
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.sharding.reshard(leaf, whole)


def _differentiable(question: Question, shape: tuple[int, ...], dtype: Any) -> Any:
    """The result as a twice differentiable function of the traced numbers."""
    import jax
    from jax.custom_derivatives import SymbolicZero

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def rows(words: Words, *leaves: Any) -> tuple[Any, ...]:
        if dtype == np.float64 and is_in_program(question, words):
            return _evaluated(question, words, shape)(*leaves)
        asked = functools.partial(question.rows, words)
        return _called_back(asked, words, shape, leaves, dtype)

    @functools.partial(rows.defjvp, symbolic_zeros=True)
    def _(words: Words, leaves: Any, tangents: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        order = max(map(len, words))
        _refuse_derivatives(question, moving, second=order == 1)
        if order == 2:
            raise NotImplementedError(
                "traced results have first and second derivatives, no third ones"
            )
        every = dict.fromkeys((*words, *((*w, i) for w in words for i in moving)))
        found = dict(zip(every, rows(tuple(every), *leaves), strict=True))
        none = jax.numpy.zeros(shape, dtype)
        moved = tuple(
            sum((found[*w, i] * tangents[i].astype(dtype) for i in moving), none)
            for w in words
        )
        return tuple(found[w] for w in words), moved

    return lambda *leaves: rows(((),), *leaves)[0]


def _refuse_derivatives(question: Question, by: Sequence[int], *, second: bool) -> None:
    """Refuses derivatives that do not exist."""
    method = question.options.get("method", METHODS[0])
    if method not in METHODS:
        raise NotImplementedError(
            f"results with method={method!r} have no derivatives; covered: {METHODS}"
        )
    parts, _ = parts_of(question.step)
    epochs = any(
        isinstance(part, GaussianStep) and (epoch_scheme(part.design) or part.bands)
        for part in parts
    )
    for place in (question.places[i] for i in by):
        name = place.rpartition(".")[2]
        if is_count(name) and (epochs or second):
            where = "with epoch schemes or bands" if epochs else "of second order"
            raise NotImplementedError(f"{place} has no derivative {where}")
        if name in _WHOLE:
            raise NotImplementedError(
                f"{place} is a whole number and has no derivative: use integers"
            )


def _called_back(
    rows: Callable[..., Any],
    words: Words,
    shape: tuple[int, ...],
    leaves: Sequence[Any],
    dtype: Any = np.float64,
) -> tuple[Any, ...]:
    """Calls ``rows`` on the host, with a row for each word; rounds the first one up."""
    # float64 travels as pairs of uint32.
    import jax

    is_double = dtype == np.float64
    given, result = leaves, jax.ShapeDtypeStruct(shape, dtype)
    if is_double:
        given = [jax.lax.bitcast_convert_type(leaf, np.uint32) for leaf in leaves]
        result = jax.ShapeDtypeStruct((*shape, 2), np.uint32)

    def call(*arrays: Any) -> tuple[np.ndarray, ...]:
        arrays = tuple(np.array(array, order="C") for array in arrays)
        if is_double:
            arrays = tuple(array.view(np.float64)[..., 0] for array in arrays)
        arrays = tuple(map(_widened, arrays))
        try:
            found = rows(*arrays)
        except Exception as error:
            raise _alone(error) from None
        found = [np.broadcast_to(row, arrays[0].shape) for row in found]
        with np.errstate(all="ignore"):
            new = [_rounded_up(found[0], dtype), *(r.astype(dtype) for r in found[1:])]
        if is_double:
            new = [np.array(row, order="C")[..., None].view(np.uint32) for row in new]
        return tuple(new)

    found = jax.pure_callback(
        call, (result,) * len(words), *given, vmap_method="broadcast_all"
    )
    if is_double:
        found = (jax.lax.bitcast_convert_type(row, np.float64) for row in found)
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tuple(found)
    # Within shard_map the result varies over the axes over which a number varies.
    # Callbacks do not declare this.
    varies = functools.reduce(operator.and_, (leaf == leaf for leaf in leaves))
    return tuple(jax.numpy.where(varies, row, row) for row in found)


def _alone(error: Exception) -> Exception:
    """Returns the error without its traceback, for XLA's message and JAX's log."""
    logging.getLogger("jax._src.callback").addFilter(_is_of_others)
    # XLA lists all frames above the innermost one; the frame of a generator has none.
    empty: Any = (nothing for nothing in ())
    error.__dict__[_RAISED] = True
    return error.with_traceback(TracebackType(None, empty.gi_frame, 0, 1))


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a line of JAX's log is not about an error that is raised anyway."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return _RAISED not in getattr(error, "__dict__", {})


def _widened(array: np.ndarray) -> np.ndarray:
    """Converts float32 to float64; threads of callbacks may flush subnormals to 0."""
    if array.dtype != np.float32:
        return array
    bits, spacing = array.view(np.int32), 2.0**-149  # spacing of subnormal numbers
    small = np.where(bits < 0, -spacing, spacing) * (bits & 0x7FFFFF)
    return np.where(bits & 0x7F800000 == 0, small, array.astype(np.float64))


def _rounded_up(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds numbers >= 0 up to a floating type; positive ones to a normal number."""
    with np.errstate(over="ignore", under="ignore"):
        near = value.astype(dtype)
        up = np.nextafter(near, np.asarray(np.inf, dtype))
    near = np.where(near.astype(np.float64) < value, up, near)
    # Compare bits, because threads of callbacks may flush subnormals to 0.
    some = np.array(value, np.float64).view(np.int64) > 0
    return np.where(some, np.maximum(near, np.finfo(dtype).tiny), near)


# --- Large Rényi batches, compiled into the program ---


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


def is_in_program(question: Question, words: Words = ((),)) -> bool:
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


def _evaluated(
    question: Question, words: Words, shape: tuple[int, ...]
) -> Callable[..., tuple[Array, ...]]:
    """The requested values as a function of the missing numbers (``leaves``)."""
    import jax

    @jax.custom_batching.custom_vmap
    def call(*leaves: Array) -> tuple[Array, ...]:
        if math.prod(shape) < FEWEST:
            rows = functools.partial(question.rows, words)
            return _called_back(rows, words, shape, leaves)
        return in_program(*leaves)

    @jax.jit
    def in_program(*leaves: Array) -> tuple[Array, ...]:
        leaves = tuple(map(_gathered, leaves))
        # The caller's settings must not affect this code.
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            rows = answer_and_slopes(question, words, shape, leaves)
        unknown = functools.reduce(operator.or_, map(jax.numpy.isnan, rows))
        rest = functools.partial(_completed, question, words)
        return jax.lax.cond(
            jax.numpy.any(unknown),
            lambda: _called_back(rest, words, shape, (*rows, *leaves)),
            lambda: rows,
        )

    @call.def_vmap
    def batched(size: int, are_batched: Sequence[bool], *leaves: Array) -> Any:
        whole = (size, *shape)
        every = (
            leaf if is_batched else jax.numpy.broadcast_to(leaf, whole)
            for leaf, is_batched in zip(leaves, are_batched, strict=True)
        )
        rows = _evaluated(question, words, whole)(*every)
        return rows, (True,) * len(rows)

    del batched
    return call


def _completed(question: Question, words: Words, *arrays: np.ndarray) -> np.ndarray:
    """The rows, with the settings that the program left as NaN computed on the host."""
    shape, number = arrays[0].shape, len(words)
    every = np.array(arrays).reshape(len(arrays), -1)
    rows = every[:number]
    index = np.flatnonzero(np.isnan(rows).any(axis=0))
    if index.size:
        some = question.of_some(shape, index)
        rows[:, index] = some.rows(words, *every[number:, index])
    return rows.reshape(-1, *shape)


def answer_and_slopes(
    question: Question, words: Words, shape: tuple[int, ...], leaves: tuple[Array, ...]
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
        rule = MomentRule(renyi.LARGER, renyi.LATTICE)
        moment = functools.partial(renyi.log_moment, rule=rule)
        (spent,) = by_blocks(moment, (order - 1, groups), block)
        of = renyi.epsilon_at if kind == EPSILON else renyi.log_delta_at
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
        return renyi.rdp(target, groups, **options)
    options = {"is_epsilon": kind == EPSILON, "on_lattice": True, "block": block}
    value, order = renyi.best(target, groups, **options)
    log_delta = target if kind == EPSILON else value
    xp = jax.numpy
    total = sum(xp.sum(g.count * renyi.estimate(g.loss), axis=0) for g in groups)
    lower = xp.log(total) < log_delta + renyi.NEAR
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
    question: Question, shape: tuple[int, ...], leaves: Sequence[Array]
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
