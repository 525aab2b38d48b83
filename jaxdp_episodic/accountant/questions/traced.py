"""Epsilon and others within a JAX program; see `jaxdp_episodic.traced`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
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
    parts_of,
)
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.gradients import (
    DELTA,
    EPSILON,
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
        return _called_back(question, words, shape, leaves, dtype)

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
    question: Question,
    words: Words,
    shape: tuple[int, ...],
    leaves: Sequence[Any],
    dtype: Any,
) -> tuple[Any, ...]:
    """Computes a row for each word on the host; rounds the first one up."""
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
            found = question.rows(words, *arrays)
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
