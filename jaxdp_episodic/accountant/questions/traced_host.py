"""Questions about descriptions whose numbers become known on the host.

What `questions.traced` calls from a compiled program: NumPy in, NumPy out. Arrays are
of the settings' shape, which the program's batches lead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
)
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.derivatives import (
    METHODS,
    Parameter,
    difference,
    is_constant,
    scale_of_rate,
    slopes,
)
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of, runs_of_parts

# Places of the numbers that are no part of the description.
DELTA = "delta"
EPSILON = "epsilon"
NUM_STEPS = "num_steps"
ORDERS = "orders"
NOISE = "noise_multiplier"
# Widths of second differences, as shares of a number: the first ones are known to 1e-9;
# and of those of curves.
_SHARE = 1e-3
_CURVE_SHARES = (1e-3, 1e-5)


class Question(NamedTuple):
    """One of the questions, in which some numbers are missing.

    Attributes:
      kind: "epsilon", "delta", "rdp" or "noise_multiplier".
      step: the description; those of its numbers that are missing are not read.
      known: the other arguments by name, but for those that are missing.
      places: of the missing ones, as of `spec.traced_numbers`, or names of arguments.
      options: "method", or "direction" of a curve.
      chosen: None, or which of the settings are asked about, of their shape; then
        missing numbers are of these alone, in one dimension.
    """

    kind: str
    step: AnyStep
    known: Mapping[str, Any]
    places: tuple[str, ...]
    options: Mapping[str, str]
    chosen: np.ndarray | None = None

    def answer(self, *missing: np.ndarray) -> np.ndarray:
        """The answer at these numbers, float64 of their shape.

        Raises:
          ValueError: a number out of its range, which the message names.
        """
        step, others = self._known(missing)
        # JAX waits for this: nothing of JAX may wait for it in turn.
        with using_engine("numpy"):
            if self.kind == "rdp":
                return _rdp(step, others[ORDERS], **self.options)
            ask = _QUESTIONS[self.kind]
            return np.asarray(ask(step, **others, **self.options), np.float64)

    def answer_and_slopes(
        self, by: Sequence[int], *missing: np.ndarray
    ) -> list[np.ndarray]:
        """The answer, and its derivative by each of some of the missing numbers.

        NaN, never a wrong number, where a derivative is not known.
        """
        answer = self.answer(*missing)
        whole = [np.broadcast_to(one, answer.shape) for one in missing]
        with using_engine("numpy"), np.errstate(all="ignore"):
            return [answer, *self._slopes(answer, [self.places[i] for i in by], whole)]

    def second_slopes(
        self, by: Sequence[int], also: Sequence[int], *missing: np.ndarray
    ) -> list[np.ndarray]:
        """Derivatives of each of the first derivatives, number after number.

        Differences of these, with a relative error of about 1e-6.
        """
        result = [[] for _ in by]
        shape = np.broadcast_shapes(*(one.shape for one in missing))
        for i in also:
            scale = _scale(self.places[i], np.broadcast_to(missing[i], shape))

            def first(displacement: np.ndarray, i: int = i) -> np.ndarray:
                moved = list(missing)
                moved[i] = np.asarray(missing[i], np.float64) + displacement
                return np.array(self.answer_and_slopes(by, *moved)[1:])

            found = difference(first, _SHARE * scale)
            for row, one in zip(result, found, strict=True):
                row.append(one)
        return [one for row in result for one in row]

    def refuse_derivatives(self, by: Sequence[int], *, second: bool = False) -> None:
        """Refuses numbers that answers have no derivatives by, and methods without."""
        method = self.options.get("method", METHODS[0])
        if method not in METHODS:
            raise NotImplementedError(
                f"answers with method={method!r} have no derivatives; "
                f"covered: {METHODS}"
            )
        parts = (
            self.step.steps if isinstance(self.step, ComposedSteps) else (self.step,)
        )
        epochs = any(
            isinstance(part, GaussianStep) and epoch_scheme(part.design) is not None
            for part in parts
        )
        for place in (self.places[i] for i in by):
            name = place.rpartition(".")[2]
            is_count = name.startswith("counts[") or name == NUM_STEPS
            if is_count and (epochs or second):
                where = "where steps come in epochs" if epochs else "of second order"
                raise NotImplementedError(f"{place} has no derivative {where}")
            if name in _WHOLE:
                raise NotImplementedError(
                    f"{place} is a whole number and has no derivative: pass integers"
                )

    def _known(self, missing: Sequence[np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """The description, and the other arguments, with all numbers."""
        given = dict(zip(self.places, missing, strict=True))

        def of_chosen(value: Any) -> Any:
            if self.chosen is None or np.ndim(value) == 0:
                return value
            return np.broadcast_to(value, self.chosen.shape)[self.chosen]

        def filled(where: str, value: Any) -> Any:
            found = given.pop(where, value)
            if found is value:
                return of_chosen(value)
            is_rate = where.endswith("sampling_probability")
            return _normal(found) if is_rate else found

        step: Any = mapped(self.step, filled)
        known = {name: of_chosen(value) for name, value in self.known.items()}
        return step, {**known, **given}

    def _slopes(
        self, answer: np.ndarray, by: Sequence[str], missing: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        shape, method = answer.shape, self.options.get("method", "")
        step, others = self._known(missing)
        if self.kind == "rdp":
            return [self._rdp_slope(place, missing) for place in by]
        log_delta = np.log(np.broadcast_to(others.get(DELTA, answer), shape))
        epsilon = np.broadcast_to(others.get(EPSILON, answer), shape)
        numbers = dict(zip(self.places, missing, strict=True))
        if self.kind == NOISE:
            usable = np.isfinite(answer) & (answer > 0)
            numbers[NOISE] = np.where(usable, answer, 1.0)
            step = dataclasses.replace(step, noise_multiplier=numbers[NOISE])
            counts, delta = others[NUM_STEPS], np.exp(log_delta)
            epsilon = api.epsilon(step, delta=delta, num_steps=counts, method=method)
            epsilon = np.where(usable, epsilon, np.nan)
        fields = [place for place in numbers if place not in (DELTA, EPSILON)]
        fields = [place for place in fields if place in (*by, NOISE)]
        parameters = [
            self._parameter(place, step, numbers[place], others.get(NUM_STEPS))
            for place in fields
        ]
        runs = _runs(step, _base_counts(step), others.get(NUM_STEPS))
        by_epsilon, along = slopes(epsilon, log_delta, runs, parameters, method)
        # What is answered moves such that log(delta) is what it should be.
        rows = dict(zip(fields, along, strict=True))
        rows |= {DELTA: -np.exp(-log_delta), EPSILON: -by_epsilon}
        still = np.zeros(shape, bool)
        if self.kind == EPSILON:
            still = is_constant(answer, log_delta, runs, method)
        return [np.where(still, 0.0, rows[place] / -rows[self.kind]) for place in by]

    def _parameter(
        self, place: str, step: AnyStep, value: np.ndarray, times: Any
    ) -> Parameter:
        """A number of the description, or of steps."""
        scale, base = _scale(place, value), _base_counts(step)
        index = place.removeprefix("counts[").removesuffix("]")
        if place != NUM_STEPS and not index.isdigit():

            def moved(displacement: np.ndarray) -> Sequence[Run]:
                at = np.asarray(value, np.float64) + displacement
                other = mapped(step, lambda where, old: at if where == place else old)
                return _runs(other, base, times)

            return Parameter(scale[..., None], moved)

        def more(displacement: np.ndarray) -> Sequence[Run]:
            if place == NUM_STEPS:
                return _runs(step, base, np.asarray(value, np.float64) + displacement)
            counts = list(base)
            counts[int(index)] = counts[int(index)] + displacement
            return _runs(step, counts, times)

        return Parameter(np.maximum(scale, 1.0)[..., None], more, np.asarray(value))

    def _rdp_slope(self, place: str, missing: Sequence[np.ndarray]) -> np.ndarray:
        """The derivative of a curve, at one order in each setting."""
        i = self.places.index(place)

        def curve(displacement: np.ndarray) -> np.ndarray:
            moved = list(missing)
            moved[i] = np.asarray(missing[i], np.float64) + displacement
            return self.answer(*moved)

        scale = _scale(place, missing[i])
        return difference(curve, *(share * scale for share in _CURVE_SHARES))


def _normal(rate: np.ndarray) -> np.ndarray:
    """A rate, raised to a normal number: of those below it a thread of JAX sees 0."""
    if rate.dtype != np.float64:
        return rate
    some = np.array(rate).view(np.int64) > 0
    return np.where(some, np.maximum(rate, np.finfo(np.float64).tiny), rate)


def _base_counts(step: AnyStep) -> list[np.ndarray]:
    """How often each part is taken in a run."""
    counts = step.counts if isinstance(step, ComposedSteps) else (1,)
    return [np.asarray(count, np.float64) for count in counts]


def _runs(step: AnyStep, counts: Sequence[np.ndarray], times: Any) -> Sequence[Run]:
    """Runs of real numbers of steps; a run is taken once where ``times`` is None."""
    times = np.asarray(1.0 if times is None else times, np.float64)
    if isinstance(step, ComposedSteps):
        return runs_of_parts(step.steps, [count * times for count in counts])
    return runs_of(step, counts[0] * times)


def _rdp(step: AnyStep, orders: Any, direction: str) -> np.ndarray:
    """A curve at one order in each setting."""
    orders = _validation.order_array(ORDERS, orders, infinite=True)
    shape = np.broadcast_shapes(step.shape, orders.shape)
    return api.curve_of(step, orders[..., None], direction, shape)


def _scale(place: str, value: np.ndarray) -> np.ndarray:
    """What differences by a number are taken at shares of."""
    value, name = np.asarray(value, np.float64), place.rpartition(".")[2]
    if name == ORDERS:
        return np.where(np.isfinite(value), value - 1, np.nan)
    return scale_of_rate(value) if name in _PROBABILITIES else np.abs(value)


_QUESTIONS = {
    "epsilon": api.epsilon,
    "delta": api.delta,
    NOISE: calibrate_noise_multiplier,
}
_PROBABILITIES = ("sampling_probability", DELTA)
# Whole numbers, but for counts of steps.
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
