"""Questions about descriptions whose numbers become known on the host."""

from __future__ import annotations

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
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of_parts
from jaxdp_episodic.accountant.questions.gradients import (
    METHODS,
    Scale,
    difference,
    scale_of,
    slope,
)

# Places of the numbers that are no part of the description.
DELTA = "delta"
EPSILON = "epsilon"
NUM_STEPS = "num_steps"
ORDERS = "orders"
NOISE = "noise_multiplier"


class Question(NamedTuple):
    """One of the questions, in which some numbers are missing."""

    kind: str
    step: AnyStep
    known: Mapping[str, Any]
    places: tuple[str, ...]
    options: Mapping[str, str]
    chosen: np.ndarray | None = None

    def answer(self, *missing: np.ndarray) -> np.ndarray:
        """The answer at these numbers, float64 of their shape."""
        step, others = self._known(missing)
        # JAX waits for this: nothing of JAX may wait for it in turn.
        with using_engine("numpy"):
            if self.kind == "rdp":
                return _rdp(step, others[ORDERS], **self.options)
            others.pop(self.kind, None)  # of a target that a noise was found for
            ask = _QUESTIONS[self.kind]
            return np.asarray(ask(step, **others, **self.options), np.float64)

    def rows(
        self, words: Sequence[tuple[int, ...]], *missing: np.ndarray
    ) -> list[np.ndarray]:
        """The answer, (), and its derivatives by missing numbers, as (i,) or (i, j)."""
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

                scale = _scale(self.places[further[0]], whole[further[0]])
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
        """The derivative by a missing number."""
        if self.kind == NOISE:
            # Epsilon stays what it should be.
            inner = self._replace(kind=EPSILON, places=(*self.places, NOISE))
            numbers = (*missing, answer)
            at = inner.answer(*numbers)
            by_noise = inner._slope(len(missing), numbers, at, held=held)
            if self.places[i] == EPSILON:
                return 1 / by_noise
            return -inner._slope(i, numbers, at, held=held) / by_noise
        scale = _scale(self.places[i], missing[i])

        def moved(displacement: np.ndarray) -> Any:
            return self._asked(_displaced(missing, i, displacement))

        if self.kind == "rdp":
            return difference(moved, scale)
        is_delta = self.kind == DELTA
        value = np.log(answer) if is_delta else answer
        found = slope(moved, value, scale, self.options["method"], held=held)
        return answer * found if is_delta else found

    def _asked(self, missing: Sequence[np.ndarray]) -> Any:
        """The question and its runs, or a curve, at real numbers of steps."""
        moved: dict[int, np.ndarray] = {}
        step, others = self._known(missing, moved)
        if self.kind == "rdp":
            return _rdp(step, others[ORDERS], **self.options)
        times = others.get(NUM_STEPS)
        times = np.asarray(1.0 if times is None else times, np.float64)
        parts, base = parts_of(step)
        asked = (
            EpsilonAt(np.log(others[DELTA]))
            if self.kind == EPSILON
            else DeltaAt(np.asarray(others[EPSILON], np.float64))
        )
        return asked, runs_of_parts(
            parts, [moved.get(i, n) * times for i, n in enumerate(base)]
        )

    def refuse_derivatives(self, by: Sequence[int], *, second: bool = False) -> None:
        """Refuses numbers that answers have no derivatives by, and methods without."""
        method = self.options.get("method", METHODS[0])
        if method not in METHODS:
            raise NotImplementedError(
                f"answers with method={method!r} have no derivatives; "
                f"covered: {METHODS}"
            )
        parts, _ = parts_of(self.step)
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

    def _known(
        self, missing: Sequence[np.ndarray], counts: dict[int, np.ndarray] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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
    """The missing numbers with one of them displaced."""
    moved = list(missing)
    moved[i] = np.asarray(missing[i], np.float64) + displacement
    return moved


def _normal(rate: np.ndarray) -> np.ndarray:
    """A rate, raised to a normal number: of those below it a thread of JAX sees 0."""
    if rate.dtype != np.float64:
        return rate
    some = np.array(rate).view(np.int64) > 0
    return np.where(some, np.maximum(rate, np.finfo(np.float64).tiny), rate)


def parts_of(step: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The steps of a run, and how often each is taken."""
    return (
        (step.steps, step.counts)
        if isinstance(step, ComposedSteps)
        else ((step,), (1,))
    )


def _rdp(step: AnyStep, orders: Any, direction: str) -> np.ndarray:
    """A curve at one order in each setting."""
    orders = _validation.order_array(ORDERS, orders, infinite=True)
    shape = np.broadcast_shapes(step.shape, orders.shape)
    return api.curve_of(step, orders[..., None], direction, shape)


def _scale(place: str, value: np.ndarray) -> Scale:
    """The `Scale` of a missing number."""
    if place == ORDERS:
        size = np.where(np.isfinite(value), value - 1, np.nan)
        return Scale(size, np.zeros(size.shape, bool), np.zeros(size.shape))
    return scale_of(place, value)


_QUESTIONS = {
    "epsilon": api.epsilon,
    "delta": api.delta,
    NOISE: calibrate_noise_multiplier,
}
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
