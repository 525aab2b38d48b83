"""Epsilon and others within a JAX program; see `jaxdp_episodic.traced`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
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
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of_parts
from jaxdp_episodic.accountant.questions.gradients import (
    DELTA,
    EPSILON,
    METHODS,
    NOISE,
    NUM_STEPS,
    ORDERS,
    difference,
    scale_of,
    settings_of,
    slope,
    taken_of,
)
from jaxdp_episodic.accountant.questions.traced_program import (
    Words,
    evaluated,
    gathered,
    is_in_program,
)
from jaxdp_episodic.files.optional import require

_QUESTIONS = {
    "epsilon": api.epsilon,
    "delta": api.delta,
    NOISE: calibrate_noise_multiplier,
}
# Fields that are whole numbers, except counts of steps.
_WHOLE = (
    *("size", "population", "num_episodes", "num_classes", "ways"),
    *("steps_per_epoch", "times", "batch_size"),
)
# Marks an error whose message XLA raises in full.
_RAISED = "_jaxdp_episodic_raised"
Check = Callable[[str, Any], np.ndarray]


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

    value = jax.numpy.array(gathered(value))  # for one callback; JAX's under vmap too
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
        back = functools.partial(_called_back, dtype)
        if dtype == np.float64 and is_in_program(question, words):
            return evaluated(question, words, back, shape)(*leaves)
        return back(functools.partial(question.rows, words), words, shape, leaves)

    @functools.partial(rows.defjvp, symbolic_zeros=True)
    def _(words: Words, leaves: Any, tangents: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        order = max(map(len, words))
        question.refuse_derivatives(moving, second=order == 1)
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


def _called_back(
    dtype: Any,
    rows: Callable[..., Sequence[np.ndarray]],
    words: Words,
    shape: tuple[int, ...],
    leaves: Sequence[Any],
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


class Question(NamedTuple):
    """A question whose traced numbers are missing until the program runs."""

    kind: str  # "epsilon", "delta", "rdp" or "noise_multiplier"
    step: AnyStep  # with ... for missing numbers
    known: Mapping[str, Any]  # known arguments
    places: tuple[str, ...]  # field paths or argument names of the missing numbers
    options: Mapping[str, str]  # method or direction

    def answer(self, *missing: np.ndarray) -> np.ndarray:
        """Returns the result for these numbers, float64 of their shape."""
        step, others = self._filled(missing)
        # JAX waits for this result, so that using JAX here could deadlock.
        with using_engine("numpy"):
            if self.kind == "rdp":
                return self._curve(*missing)
            others.pop(self.kind, None)  # the target of a calibration
            ask = _QUESTIONS[self.kind]
            return np.asarray(ask(step, **others, **self.options), np.float64)

    def _curve(self, *missing: np.ndarray) -> np.ndarray:
        """Rényi divergences at one order for each setting."""
        runs, others = self._of_real(*missing)
        orders = _validation.order_or_inf_array(ORDERS, others[ORDERS])[..., None]
        shape = np.broadcast_shapes(orders.shape, *((*r.shape[:-1], 1) for r in runs))
        return api.curve_of(runs, orders, self.options["direction"], shape[:-1])

    def _of_real(self, *missing: np.ndarray) -> tuple[tuple[Run, ...], Any]:
        """Runs with real numbers of steps, and the other arguments."""
        real: dict[int, np.ndarray] = {}
        step, others = self._filled(missing, real)
        times = others.get(NUM_STEPS)
        times = np.asarray(1.0 if times is None else times, np.float64)
        parts, base = parts_of(step)
        counts = [(real[j] if j in real else n) * times for j, n in enumerate(base)]
        return runs_of_parts(parts, counts), others

    def rows(self, words: Words, *missing: np.ndarray) -> list[np.ndarray]:
        """Returns the result, (), and its derivatives by numbers, (i,) or (i, j)."""
        answer = self.answer(*missing)
        whole = [np.broadcast_to(one, answer.shape) for one in missing]
        found: dict[tuple[int, ...], np.ndarray] = {(): answer}
        with using_engine("numpy"), np.errstate(all="ignore"):
            for word in dict.fromkeys(filter(None, words)):
                if len(word) == 1:
                    found[word] = self._slope(word[0], whole, answer)
                    continue

                def first(some: Question, *moved: Any, i: int = word[0]) -> np.ndarray:
                    return some._slope(i, moved, some.answer(*moved), held=False)

                found[word] = self._difference(first, word[1], whole)
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
        if self.kind == "rdp":
            return self._difference(Question._curve, i, missing)
        if self.kind == NOISE:
            # Epsilon is fixed at its target.
            inner = self._replace(kind=EPSILON, places=(*self.places, NOISE))
            numbers = (*missing, answer)
            at = inner.answer(*numbers)
            by_noise = inner._slope(len(missing), numbers, at, held=held)
            if self.places[i] == EPSILON:
                return 1 / by_noise
            return -inner._slope(i, numbers, at, held=held) / by_noise

        def moved(*to: np.ndarray) -> tuple[DeltaAt | EpsilonAt, tuple[Run, ...]]:
            """The question of methods and the runs, for real numbers of steps."""
            some, numbers = self._displaced(i, missing, answer.shape, *to)
            runs, others = some._of_real(*numbers)
            if self.kind == DELTA:
                return DeltaAt(np.asarray(others[EPSILON], np.float64)), runs
            return EpsilonAt(np.log(others[DELTA])), runs

        scale = scale_of(self.places[i], np.broadcast_to(missing[i], answer.shape))
        value = np.log(answer) if self.kind == DELTA else answer
        found = slope(moved, value, scale, self.options["method"], held=held)
        return answer * found if self.kind == DELTA else found

    def _difference(
        self, function: Callable[..., np.ndarray], i: int, missing: Sequence[np.ndarray]
    ) -> np.ndarray:
        """The derivative by missing number i of a function of question and numbers."""
        shape = np.broadcast_shapes(*(number.shape for number in missing))

        def moved(*to: np.ndarray) -> np.ndarray:
            some, numbers = self._displaced(i, missing, shape, *to)
            return function(some, *numbers)

        value = np.broadcast_to(missing[i], shape)
        return difference(moved, scale_of(self.places[i], value))

    def _displaced(
        self,
        i: int,
        missing: Sequence[np.ndarray],
        shape: tuple[int, ...],
        displacement: np.ndarray,
        index: np.ndarray,
    ) -> tuple[Question, list[np.ndarray]]:
        """The question and numbers of some settings, missing number i displaced."""
        numbers = [taken_of(number, shape, index) for number in missing]
        numbers[i] = numbers[i] + displacement
        return self.of_some(index, shape), numbers

    def of_some(self, index: np.ndarray, shape: tuple[int, ...]) -> Question:
        """The question about some of the flattened settings."""
        known = {
            name: taken_of(value, shape, index) if np.ndim(value) else value
            for name, value in self.known.items()
        }
        return self._replace(step=settings_of(self.step, shape, index), known=known)

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

    def _filled(
        self, missing: Sequence[np.ndarray], counts: dict[int, np.ndarray] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The step and the other arguments; real counts of steps go to ``counts``."""
        given = dict(zip(self.places, missing, strict=True))

        def filled(where: str, value: Any) -> Any:
            found = given.pop(where, value)
            if found is value:
                return value
            if counts is not None and where.startswith("counts["):
                counts[int(where[len("counts[") : -1])] = found
                return np.rint(found)
            if where.endswith("sampling_probability") and found.dtype == np.float64:
                # JAX threads flush other numbers to 0.
                some = np.array(found).view(np.int64) > 0
                least = np.finfo(np.float64).tiny
                return np.where(some, np.maximum(found, least), found)
            return found

        step: Any = mapped(self.step, filled)
        return step, {**self.known, **given}
