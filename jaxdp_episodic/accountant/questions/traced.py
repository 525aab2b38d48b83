"""Epsilon and others within a JAX program; see `jaxdp_episodic.traced`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import (
    engine_name,
    on_cpu,
    register_dataclasses,
    using_engine,
)
from jaxdp_episodic.accountant.describe.designs import Poisson, epoch_scheme
from jaxdp_episodic.accountant.describe.releases import LaplaceRelease
from jaxdp_episodic.accountant.describe.spec import mapped, traced_numbers
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    parts_of,
)
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods import rdp as renyi
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.questions import api, gradients
from jaxdp_episodic.accountant.questions.calibration import (
    DELTA,
    EPSILON,
    NOISE,
    ORDERS,
    RDP,
    Calibration,
    Question,
    calibrate_noise_multiplier,
)
from jaxdp_episodic.files.optional import require

# Fields that are whole numbers, except counts of steps.
_WHOLE = (
    *("size", "population", "num_episodes", "num_classes", "ways"),
    *("steps_per_epoch", "times", "batch_size"),
)
# Number of settings from which divergences are compiled. This takes 1 s of CPU time,
# then 1 us per setting instead of 5 on the host.
FEWEST = 4096
# Number of settings per block: its arrays fit the cache of a CPU, or device memory.
_CPU_BLOCK = 64
_ACCELERATOR_BLOCK = 131072
# Ranges of numbers for the compiled program; the host answers all others.
_RATES = (1e-60, 1.0)
_SHIFTS = (1e-20, 1e70)
_LARGEST_ORDER = 1e30
_RATE = "sampling_probability"
_COMPILED = (NOISE, _RATE, ORDERS)  # numbers that may be traced there
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
    return _counted(EPSILON, step, num_steps, method, delta=delta)


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
    return _counted(DELTA, step, num_steps, method, epsilon=epsilon)


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
    step = dataclasses.replace(step, noise_multiplier=1.0)
    return _counted(NOISE, step, num_steps, method, epsilon=epsilon, delta=delta)


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
    if not _validation.is_traced(orders):
        orders = _validation.order_or_inf_array(ORDERS, orders)
    axes = (1,) * np.ndim(orders)

    def expanded(_: str, value: Any) -> Any:
        return value.reshape(value.shape + axes) if np.ndim(value) else value

    shape = step.shape + np.shape(orders)
    step = mapped(step, expanded)
    question = Question(kind=RDP, step=step, orders=orders, option=direction)
    return _answer(question, shape)


def _counted(
    kind: str, step: AnyStep, num_steps: Any, method: str, **target: Any
) -> Any:
    """The result for ``num_steps`` steps."""
    api.check_step(step)
    api.check_method(method)
    if num_steps is None and not isinstance(step, ComposedSteps):
        raise ValueError("num_steps must be a whole number >= 0, got None")
    for name in (name for name, value in target.items() if value is None):
        Question.numeric[name](name, None)  # refuses it
    of = Calibration if kind == NOISE else Question
    question = of(kind=kind, step=step, num_steps=num_steps, **target, option=method)
    return _answer(question, question.shape)


def _answer(question: Question, shape: tuple[int, ...]) -> Any:
    """Returns the result as a JAX array; computes it now if nothing is traced."""
    require("jax", purpose="jaxdp_episodic.traced", extra=None)
    import jax

    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
    if not question.is_traced:
        found = np.broadcast_to(answered(question), shape)
        return jax.numpy.asarray(_rounded_up(found, dtype))
    traced = traced_numbers(question)
    leaves = [
        jax.numpy.broadcast_to(_canonical(place.removeprefix("step."), value), shape)
        for place, value in traced.items()
    ]
    hidden = mapped(question, lambda at, n: ... if at in traced else n, checked=False)
    return _differentiable(hidden, shape, dtype)(*leaves)


def _canonical(place: str, value: Any) -> Any:
    """Converts a traced number, exactly, to a type that callbacks can pass."""
    import jax

    sharding = jax.typeof(value).sharding
    if any(sharding.spec):  # replicate it: blocks of a mesh are divided differently
        whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        value = jax.sharding.reshard(value, whole)
    value = jax.numpy.array(value)  # JAX's under vmap, too
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


def _differentiable(question: Question, shape: tuple[int, ...], dtype: Any) -> Any:
    """The result as a twice differentiable function of the traced numbers."""
    import jax
    from jax.custom_derivatives import SymbolicZero

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def rows(words: Words, *leaves: Any) -> tuple[Any, ...]:
        if dtype == np.float64 and is_compiled(question, words):
            return _compiled(question, words, shape)(*leaves)
        asked = functools.partial(rows_of, question, words)
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
    if question.kind != RDP and question.option not in gradients.METHODS:
        raise NotImplementedError(
            f"results with method={question.option!r} have no derivatives; covered: "
            f"{gradients.METHODS}"
        )
    parts, _ = parts_of(question.step)
    epochs = any(
        isinstance(part, GaussianStep) and (epoch_scheme(part.design) or part.bands)
        for part in parts
    )
    for place in (question.missing[i].removeprefix("step.") for i in by):
        name = place.rpartition(".")[2]
        if gradients.is_count(name) and (epochs or second):
            where = "with epoch schemes or bands" if epochs else "of second order"
            raise NotImplementedError(f"{place} has no derivative {where}")
        if name in _WHOLE:
            raise NotImplementedError(
                f"{place} is a whole number and has no derivative: use integers"
            )


def filled(question: Question, numbers: Sequence[Any]) -> Question:
    """Returns the question with its missing numbers, which are checked if known."""
    given = dict(zip(question.missing, numbers, strict=True))
    return mapped(question, lambda where, value: given.get(where, value))


def answered(question: Question) -> np.ndarray:
    """Returns the result, float64 of the shape of all numbers."""
    # JAX may wait for this result, so that using JAX here could deadlock.
    with using_engine("numpy"):
        if question.kind == RDP:
            return gradients.curve(question)
        ask: Any = {EPSILON: api.epsilon, DELTA: api.delta}.get(question.kind)
        ask = ask or calibrate_noise_multiplier
        found = ask(question.step, **question.numbers, method=question.option)
        return np.asarray(found, np.float64)


def rows_of(question: Question, words: Words, *missing: np.ndarray) -> list[np.ndarray]:
    """Returns the result, (), and its derivatives by numbers, (i,) or (i, j)."""
    places = question.missing
    given = dict(zip(places, missing, strict=True))

    def number(where: str, value: Any) -> Any:
        value = given.get(where, value)
        # JAX's threads flush subnormal rates to 0, known ones too.
        is_rate = where.endswith(_RATE)
        return _rounded_up(np.asarray(value), float) if is_rate else value

    asked = mapped(question, number)
    answer = answered(asked)
    found: dict[tuple[int, ...], np.ndarray] = {(): answer}
    with using_engine("numpy"), np.errstate(all="ignore"):
        for word in dict.fromkeys(filter(None, words)):
            first, *second = ([places[i]] for i in word)
            if not second:
                found[word] = gradients.slope(asked, first, answer)
                continue

            def by_first(some: Question, first: Any = first) -> np.ndarray:
                return gradients.slope(some, first, answered(some), by_bounds=False)

            (by,) = second
            found[word] = gradients.difference(
                asked, by, by_first, gradients.scale_of(asked, by[0])
            )
    return [found[word] for word in words]


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
            # XLA's message lists the frames of a traceback before the error's own.
            raise error.with_traceback(None) from None
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


# --- Rényi divergences of large batches, compiled into the program ---


def poisson_numbers(step: Any) -> Any:
    """Returns the rates above the protected unit, its own rate, and the noise."""
    # None for a step whose dominating pair is not a function of Poisson rates alone.
    if not isinstance(step, GaussianStep) or step.clip_unit != step.privacy_unit:
        return None
    if step.population or step.bands or step.neighboring_relation == "replace_one":
        return None
    names, levels = step.design.level_names, getattr(step.design, "levels", ())
    rates = [one.sampling_probability for one in levels if isinstance(one, Poisson)]
    if len(rates) != len(names):
        return None
    last = names.index(str(step.privacy_unit))
    return rates[:last], rates[last], step.noise_multiplier


def is_compiled(question: Question, words: Words = ((),)) -> bool:
    """Whether large batches of this question are compiled."""
    return (
        question.kind == RDP
        and engine_name() != "numpy"
        and question.option != "backward"
        and max(map(len, words)) < 2
        and None not in map(poisson_numbers, parts_of(question.step)[0])
        and all(place.rpartition(".")[2] in _COMPILED for place in question.missing)
    )


def _compiled(
    question: Question, words: Words, shape: tuple[int, ...]
) -> Callable[..., tuple[Array, ...]]:
    """The requested values as a function of the missing numbers (``leaves``)."""
    import jax

    @jax.custom_batching.custom_vmap
    def call(*leaves: Array) -> tuple[Array, ...]:
        if math.prod(shape) < FEWEST:
            asked = functools.partial(rows_of, question, words)
            return _called_back(asked, words, shape, leaves)
        # The caller's settings must not affect this code.
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            rows = divergences(question, words, shape, leaves)
        rest = functools.partial(_completed, question, words)
        return jax.lax.cond(
            jax.numpy.isnan(sum(rows)).any(),
            lambda: _called_back(rest, words, shape, (*rows, *leaves)),
            lambda: rows,
        )

    def batched(size: int, are_batched: Sequence[bool], *leaves: Array) -> Any:
        whole = (size, *shape)
        every = (
            leaf if is_batched else jax.numpy.broadcast_to(leaf, whole)
            for leaf, is_batched in zip(leaves, are_batched, strict=True)
        )
        rows = _compiled(question, words, whole)(*every)
        return rows, (True,) * len(rows)

    call.def_vmap(batched)
    return call


def _completed(question: Question, words: Words, *arrays: np.ndarray) -> np.ndarray:
    """The rows, with the settings that the program left as NaN computed on the host."""
    shape, number = arrays[0].shape, len(words)
    every = np.array(arrays).reshape(len(arrays), -1)
    rows = every[:number]
    index = np.flatnonzero(np.isnan(rows).any(axis=0))

    def whole(_: str, value: Any) -> Any:
        return np.broadcast_to(value, shape) if np.ndim(value) else value

    some = mapped(question, whole, checked=False).of_some(index)
    rows[:, index] = rows_of(some, words, *every[number:, index])
    return rows.reshape(-1, *shape)


def divergences(
    question: Question, words: Words, shape: tuple[int, ...], leaves: Sequence[Array]
) -> tuple[Array, ...]:
    """Returns the divergences and their derivatives; NaN where they are not known."""
    import jax

    xp, size = jax.numpy, math.prod(shape)
    block = min(size, _CPU_BLOCK if on_cpu() else _ACCELERATOR_BLOCK)

    def flat(number: Any) -> Array:
        """One number a setting, padded to whole blocks."""
        number = xp.broadcast_to(xp.asarray(number, np.float64), shape)
        return xp.pad(number.reshape(-1), (0, -size % block), "edge")

    def asked_of(*leaves: Array) -> tuple[Array, Array, SampledGaussianLoss]:
        asked = filled(question, leaves)
        parts, counts = parts_of(asked.step)
        fields = []
        for part in parts:
            outer, rate, noise = poisson_numbers(part)
            numbers = math.prod(outer, start=1.0), rate, xp.divide(1.0, noise)
            fields.append(map(flat, numbers))
        loss = SampledGaussianLoss(*map(xp.stack, zip(*fields, strict=True)))
        return flat(asked.orders), xp.stack([*map(flat, counts)]), loss

    def values(*leaves: Array) -> Array:
        orders, counts, loss = asked_of(*leaves)
        register_dataclasses(loss)
        groups, rule = (Group(loss, counts),), MomentRule("forward", renyi.LATTICE)
        (found,) = renyi.moments(orders - 1, groups, rule=rule, block=block)
        return (found / (orders - 1))[:size].reshape(shape)

    orders, _, loss = asked_of(*leaves)
    known = (orders > 1) & (orders < _LARGEST_ORDER)
    ranges = _RATES, _RATES, _SHIFTS
    for number, (low, high) in zip(loss.fields, ranges, strict=True):
        known &= xp.all((number >= low) & (number <= high), axis=0)
    known = known[:size].reshape(shape)
    by = [i for (i,) in words[1:]]
    if not by:
        return (xp.where(known, values(*leaves), np.nan),)
    along = (  # all derivatives together share work
        xp.stack([xp.full_like(leaf, float(i == k)) for i in by])
        for k, leaf in enumerate(leaves)
    )
    moved = jax.vmap(lambda *t: jax.jvp(values, leaves, t), out_axes=(None, 0))
    found, slopes = moved(*along)
    rows = (found, *slopes)
    known &= xp.isfinite(sum(rows)) & (found > 0)  # a result of 0 may have a kink
    for i in by:
        if question.missing[i].endswith(_RATE):  # one-sided at the ends
            known &= 1 - leaves[i] >= gradients.LEAST_FROM_ONE
    return tuple(xp.where(known, row, np.nan) for row in rows)
