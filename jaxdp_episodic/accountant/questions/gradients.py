"""Derivatives of epsilon and others: differences of answers at displaced numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe.designs import (
    OWNED,
    EpochScheme,
    Scheme,
    WithoutReplacement,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
    parts_of,
    rate_places,
)
from jaxdp_episodic.accountant.methods.run import Answer, DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.questions import api, worst_path
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.dominating_pair import (
    in_one_place,
    runs_of_parts,
)

# Methods with derivatives.
METHODS = ("exact", "rdp")
# Names of arguments, and of a field that every step has.
DELTA = "delta"
EPSILON = "epsilon"
NOISE = "noise_multiplier"
NUM_STEPS = "num_steps"
ORDERS = "orders"
_QUESTIONS = {
    EPSILON: api.epsilon,
    DELTA: api.delta,
    NOISE: calibrate_noise_multiplier,
}
_NAME = "epsilon_and_gradient"
_LEAST_NORMAL = float(np.finfo(np.float64).tiny)
# Points of a difference, in widths: central, and one-sided.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order for the values there minus the middle value.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Widths to be tried in turn, as shares of the scale.
_SHARES = (1e-3, 1e-2, 1e-4)
# The same for a rate near 1, where epsilon under replace_one bends within 1e-4.
_SHARES_DOWN = (*_SHARES, 1e-5, 1e-6)
# Estimated relative error of a difference, divided by the squared relative distance of
# the difference of second order.
_ERROR_OVER_SQUARE = 300.0
# Relative rounding error of epsilons.
_ROUNDING = 1e-13
# Relative error that is good enough, and the largest that is returned.
_ENOUGH = 1e-8
_LARGEST_ERROR = 1e-6
# Widths for certified ends, which are accurate to about 1e-5; and the largest relative
# distance of the derivatives by both.
_OF_BOUNDS = (0.0625, 0.03125)
_BOUNDS_WITHIN = 1e-2
# Smallest distance of a rate from 1 at which it has a derivative, and the distance
# below which one-sided differences are tried as well.
LEAST_FROM_ONE = 1e-10
_NEXT_TO_ONE = 1e-3


class Scale(NamedTuple):
    """The scale of a number, of which widths of differences are shares; arrays."""

    size: np.ndarray  # 0 or NaN: no derivative
    rises: np.ndarray  # whether the number can only increase
    # The scale for one-sided differences downwards, tried second; 0: none.
    falls: np.ndarray


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
    method: str = "exact",
) -> tuple[Any, dict[str, Any]]:
    """Returns epsilon and its derivatives by fields of the step, at fixed delta.

    They are differences of epsilon. The relative error is mostly below 1e-8
    (*estimates*; docs/proofs.md).

    Names of fields (with epoch schemes or bands only the first one):

    * "noise_multiplier": nats per unit of it.
    * "num_steps", treated as a real number: nats per step. M(z)^T is continued to real
      T; after very few steps the continuation is not unique.
    * "LEVEL.sampling_probability" of a Poisson level, "school.sampling_probability".
    * "LEVEL.size" of a level without replacement, treated as a real number (the rate is
      size over population; the population is fixed).

    For a composed run a name changes all steps that have the field, by the same amount;
    with an index, "noise_multiplier[0]", only one step. Levels below the privacy unit
    have no rate and no name, nor has the number of independent episodes.

    The derivative is *NaN*, never a wrong number, where it is unknown:

    * epsilon is ``inf``;
    * epsilon is a certified bound (`PrivacyInfo.is_certified_bound`), differences of
      which are accurate to about 1e-3, and two widths disagree by 1e-2;
    * differences of several widths disagree by 1e-6, as next to a kink, where another
      path or direction becomes the worst;
    * a rate is at an end of its range (a probability of 0, or within 1e-10 of 1; a size
      equal to the population);
    * epsilon is 0 and delta is attained there.

    It is 0 if epsilon is 0 and needs less than delta. At a kink itself it is a
    one-sided derivative, or a value between both.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: see `epsilon`.
      wrt: names of fields.
      method: "exact" or "rdp".

    Returns:
      ``(epsilon, gradient)``: float64 nats of the broadcast shape of step, ``delta``
      and ``num_steps``, and for every name in ``wrt`` the derivative, of that shape.

    Raises:
      ValueError: a step without ``num_steps``, or an unknown name.
      NotImplementedError: epoch schemes with another name than "noise_multiplier".
    """
    delta = _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    wanted = _checked_names(wrt, step, num_steps)
    api.checked_runs(step, num_steps, delta=delta)
    value = api.epsilon(step, delta=delta, num_steps=num_steps, method=method)
    arguments = {DELTA: delta, NUM_STEPS: num_steps}
    question = Question(EPSILON, step, arguments, (), {"method": method})
    gradient = {}
    for name, fields in wanted.items():
        scales = [np.broadcast_arrays(*field.scale(), value)[:3] for field in fields]
        sizes, rises, falls = zip(*scales, strict=True)
        least = np.minimum.reduce
        scale = Scale(least(sizes), np.logical_or.reduce(rises), least(falls))
        places = [field.place for field in fields]
        gradient[name] = question.slope(places, value, scale)[()]
    return value, gradient


# --- Questions with displaced numbers ---


class Question(NamedTuple):
    """A question about a step, of which some numbers may be missing."""

    kind: str  # "epsilon", "delta", "rdp" or "noise_multiplier"
    step: AnyStep  # with ... for missing numbers
    known: Mapping[str, Any]  # known arguments
    places: tuple[str, ...]  # field paths or argument names of the missing numbers
    options: Mapping[str, str]  # method or direction

    def filled(self, *missing: np.ndarray) -> Question:
        """Returns the question with its missing numbers, which are checked."""
        given = dict(zip(self.places, missing, strict=True))

        def filled(where: str, value: Any) -> Any:
            found = given.pop(where, value)
            if found is value or not where.endswith("sampling_probability"):
                return found
            # JAX threads flush subnormal numbers to 0.
            some = np.array(found, np.float64).view(np.int64) > 0
            return np.where(some, np.maximum(found, _LEAST_NORMAL), found)

        step = mapped(self.step, filled)
        return self._replace(step=step, known={**self.known, **given}, places=())

    def of_some(
        self,
        shape: tuple[int, ...],
        index: np.ndarray,
        places: Sequence[str] = (),
        displacement: Any = 0.0,
    ) -> Question:
        """The question about some of the flattened settings, numbers displaced."""

        def taken(where: str, value: Any) -> Any:
            if np.ndim(value):
                value = np.broadcast_to(value, shape).reshape(-1)[index]
            return value + displacement if where in places else value

        known = {name: taken(name, value) for name, value in self.known.items()}
        # Sizes and counts become real numbers, which a check would refuse.
        step = mapped(self.step, taken, checked=False)
        return self._replace(step=step, known=known)

    def answer(self) -> np.ndarray:
        """Returns the result, float64 of the shape of all numbers."""
        # JAX may wait for this result, so that using JAX here could deadlock.
        with using_engine("numpy"):
            if self.kind == "rdp":
                return self._curve()
            # The target of a calibration is no argument of `epsilon`.
            known = {name: v for name, v in self.known.items() if name != self.kind}
            ask = _QUESTIONS[self.kind]
            return np.asarray(ask(self.step, **known, **self.options), np.float64)

    def _curve(self) -> np.ndarray:
        """Rényi divergences at one order for each setting."""
        runs = self._runs()
        orders = _validation.order_or_inf_array(ORDERS, self.known[ORDERS])[..., None]
        shape = np.broadcast_shapes(orders.shape, *((*r.shape[:-1], 1) for r in runs))
        return api.curve_of(runs, orders, self.options["direction"], shape[:-1])

    def _runs(self) -> tuple[Run, ...]:
        """The runs, with real numbers of steps."""
        times = self.known.get(NUM_STEPS)
        times = np.asarray(1.0 if times is None else times, np.float64)
        parts, counts = parts_of(self.step)
        return runs_of_parts(parts, [count * times for count in counts])

    def _by_method(self, method: str) -> Answer:
        """Epsilon or the logarithm of delta, with real numbers of steps."""
        if self.kind == DELTA:
            asked = DeltaAt(np.asarray(self.known[EPSILON], np.float64))
        else:
            asked = EpsilonAt(np.log(self.known[DELTA]))
        with using_engine("numpy"):
            return worst_path.answer(asked, self._runs(), method)

    def slope(
        self,
        places: Sequence[str],
        answer: np.ndarray,
        scale: Scale | None = None,
        *,
        by_bounds: bool = True,
    ) -> np.ndarray:
        """Returns the derivative by the numbers at some places together, or NaN.

        ``by_bounds``: also by differences of certified bounds, where there are no exact
        answers.
        """
        shape = np.shape(answer)
        if self.kind == NOISE:
            # Epsilon is fixed at its target.
            def at_noise(where: str, value: Any) -> Any:
                return answer if where == NOISE else value

            inner = self._replace(kind=EPSILON, step=mapped(self.step, at_noise))
            at = inner.answer()
            slope = functools.partial(inner.slope, answer=at, by_bounds=by_bounds)
            by_noise = slope([NOISE])
            return (1.0 if EPSILON in places else -slope(places)) / by_noise
        scale = self.scale(places[0], shape) if scale is None else scale
        if self.kind == "rdp":
            return self.difference(Question._curve, places, scale)
        method = self.options["method"]
        by = worst_path.CONTOUR if method == "exact" else method

        def unbounded(some: Question) -> np.ndarray:
            """Answers that are not certified bounds, else NaN."""
            found = some._by_method(by)
            return np.where(found.is_certified, np.nan, found.value)

        found = self.difference(unbounded, places, scale)
        known = answer > 0 if self.kind == DELTA else np.isfinite(answer)
        left = np.asarray(np.isnan(found) & known)
        if method == "exact" and by_bounds and np.any(left):
            index = np.flatnonzero(left)
            bounds = self.of_some(shape, index)._by_method(method)
            left[left] = bounds.is_certified
            found = np.where(left, self._slope_of_bounds(places, scale, left), found)
        return answer * found if self.kind == DELTA else found

    def scale(self, place: str, shape: tuple[int, ...]) -> Scale:
        """Returns the scale of the number at a place."""
        value = {**self.step.all_numbers, **self.known}[place]
        return scale_of(place, np.broadcast_to(value, shape))

    def _slope_of_bounds(
        self, places: Sequence[str], scale: Scale, wanted: np.ndarray
    ) -> np.ndarray:
        """The derivative of certified bounds; NaN where it is not accurate."""

        def bound(some: Question) -> np.ndarray:
            return some._by_method("exact").value

        size, none = np.where(wanted, scale.size, 0.0), np.zeros(wanted.shape)
        scale = Scale(size, scale.rises, none)
        wide, narrow = (
            self.difference(bound, places, scale, (share,), np.inf)
            for share in _OF_BOUNDS
        )
        return np.where(abs(wide - narrow) <= _BOUNDS_WITHIN * abs(wide), wide, np.nan)

    def difference(
        self,
        function: Callable[[Question], np.ndarray],
        places: Sequence[str],
        scale: Scale,
        shares: Sequence[float] = _SHARES,
        largest_error: float = _LARGEST_ERROR,
    ) -> np.ndarray:
        """The derivative of a function of the question by numbers; NaN if unknown."""
        shape = np.shape(scale.size)
        size, rises, falls = (np.broadcast_to(a, shape).reshape(-1) for a in scale)

        def moved(displacement: np.ndarray, index: np.ndarray) -> np.ndarray:
            return function(self.of_some(shape, index, places, displacement))

        found = _difference(moved, size, rises.astype(float), shares, largest_error)
        if (left := np.flatnonzero(np.isnan(found) & (falls > 0))).size:
            down = -np.ones(left.size)
            found[left] = _difference(
                lambda d, index: moved(d, left[index]), falls[left], down, _SHARES_DOWN
            )
        return found.reshape(shape)

    def rows(
        self, words: Sequence[tuple[int, ...]], *missing: np.ndarray
    ) -> list[np.ndarray]:
        """Returns the result, (), and its derivatives by numbers, (i,) or (i, j)."""
        asked = self.filled(*missing)
        answer = asked.answer()
        found: dict[tuple[int, ...], np.ndarray] = {(): answer}
        with using_engine("numpy"), np.errstate(all="ignore"):
            for word in dict.fromkeys(filter(None, words)):
                first, *second = ([self.places[i]] for i in word)
                if not second:
                    found[word] = asked.slope(first, answer)
                    continue

                def slope(some: Question, first: Any = first) -> np.ndarray:
                    return some.slope(first, some.answer(), by_bounds=False)

                scale = asked.scale(second[0][0], answer.shape)
                found[word] = asked.difference(slope, second[0], scale)
        return [found[word] for word in words]


# --- Differences ---


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _difference(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    size: np.ndarray,
    end: np.ndarray,
    shares: Sequence[float],
    largest_error: float = _LARGEST_ERROR,
) -> np.ndarray:
    """Central differences at displacement 0, or one-sided where ``end`` is 1 or -1."""
    found, best = np.full(size.shape, np.nan), np.full(size.shape, np.inf)
    # An infinite number gets scale 1: nothing depends on it.
    size = np.where(np.isposinf(size), 1.0, size)
    middle, sides = np.zeros(size.shape), np.flatnonzero(end)
    if sides.size:
        middle[sides] = function(np.zeros((1, sides.size)), sides)[0]
    for share in shares:
        left = np.flatnonzero((size > 0) & ~(best <= _ENOUGH))
        if not left.size:
            break
        sided = np.abs(end[left]).astype(int)
        sign = np.where(sided, end[left], 1.0)
        points, weights, check = (
            sign * table[:, sided] for table in (_POINTS, _WEIGHTS, _CHECK)
        )
        # A power of two, so that displacements are exact.
        width = np.exp2(np.floor(np.log2(share * size[left])))
        values = function(points * width, left)
        most = np.abs(values).max(axis=0)
        is_kink = (values == 0).any(axis=0) & (most > 0) & (sided == 0)
        values = values - np.where(sided, middle[left], values[0])
        change, other = ((table * values).sum(axis=0) for table in (weights, check))
        moved = np.abs(change)
        off = _ERROR_OVER_SQUARE * ((change - other) / moved) ** 2
        off += _ROUNDING * most / moved
        off = np.where((values == 0).all(axis=0), 0.0, off)
        # A value of 0 next to others means a kink.
        off = np.where(is_kink, np.nan, off)
        better = off < best[left]
        found[left] = np.where(better, change / width, found[left])
        best[left] = np.where(better, off, best[left])
    return np.where(best <= largest_error, found, np.nan)


def scale_of(place: str, value: Any) -> Scale:
    """Returns the `Scale` of a number with this field path."""
    value, name = np.asarray(value, np.float64), place.rpartition(".")[2]
    if name in ("sampling_probability", "delta"):
        return _scale_of_rate(value)
    if is_count(name):
        return Scale(np.maximum(value, 1.0), value == 0, np.zeros(value.shape))
    if place == ORDERS:  # each exceeds 1
        value = np.where(np.isfinite(value), value - 1, np.nan)
    return Scale(np.abs(value), np.zeros(value.shape, bool), np.zeros(value.shape))


def is_count(name: str) -> bool:
    """Returns whether a number is a count of steps."""
    return name == NUM_STEPS or name.startswith("counts[")


def _scale_of_rate(rate: np.ndarray, most: Any = 1.0) -> Scale:
    """The `Scale` of a rate, times ``most``."""
    left = 1 - rate
    inside = (left >= LEAST_FROM_ONE) & (rate > 0)
    size = np.where(inside, most * np.minimum(rate, left), 0.0)
    falls = np.where(inside & (left < _NEXT_TO_ONE), most * rate, 0.0)
    return Scale(size, np.zeros(rate.shape, bool), falls)


# --- Names of fields ---


class _Field(NamedTuple):
    """A number of a run that has a name."""

    place: str  # its field path, or an argument's name
    value: Any
    part: GaussianStep
    scheme: Scheme | None = None  # whose rate it is

    def scale(self) -> Scale:
        """Returns its scale; for a size that of the rate, times the group's size."""
        if not isinstance(self.scheme, WithoutReplacement):
            return scale_of(self.place, self.value)
        levels = self.part.path_rates
        position = self.part.level_names_used.index(self.scheme.name)
        draw, group = levels.draw_sizes[position], levels.group_sizes[position]
        assert draw is not None and group is not None  # it has a size
        # A size above the population has no effect.
        own = _scale_of_rate(np.minimum(draw / group, 1.0), group)
        size = np.where(draw > group, draw, own.size).min(axis=-1)
        return Scale(size, np.zeros(size.shape, bool), own.falls.min(axis=-1))


def _fields(
    step: GaussianStep | ComposedSteps, num_steps: Any = None
) -> dict[str, list[_Field]]:
    """The fields of each name."""
    is_run = isinstance(step, ComposedSteps)
    together: dict[str, list[_Field]] = {}
    alone: dict[str, list[_Field]] = {}
    parts, counts = gaussian_parts(step, _NAME), parts_of(step, num_steps)[1]
    for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
        inside = f"steps[{i}]." if is_run else ""
        own = {
            NOISE: _Field(inside + NOISE, part.noise_multiplier, part),
            NUM_STEPS: _Field(f"counts[{i}]" if is_run else NUM_STEPS, count, part),
        }
        for scheme in part.design.schemes:
            # The length of an epoch is a whole number.
            is_used = scheme.name in part.level_names_used
            if is_used and not isinstance(scheme, EpochScheme):
                name, value = scheme.rate_field, getattr(scheme, scheme.rate_field)
                place = inside + rate_places(part)[scheme.name]
                own[f"{scheme.name}.{name}"] = _Field(place, value, part, scheme)
        for name, field in own.items():
            together.setdefault(name, []).append(field)
            alone[f"{name}[{i}]"] = [field]
    return together | alone if is_run else together


def _checked_names(
    wrt: Any, step: GaussianStep | ComposedSteps, num_steps: Any
) -> dict[str, list[_Field]]:
    """The fields of each name in ``wrt``; raises for unknown names."""
    if isinstance(wrt, str) or not isinstance(wrt, tuple | list):
        raise TypeError(f"wrt must be a tuple of names, got {_validation.shown(wrt)}")
    fields = _fields(step, num_steps)
    parts = [field.part for field in fields[NOISE]]
    has_epochs = any(epoch_scheme(part.design) or part.bands for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, tuple(fields))
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs or bands covers {NOISE!r} only, got {name!r}"
            )
        for _, _, part, scheme in fields[name]:
            is_size = isinstance(scheme, WithoutReplacement)
            if is_size and in_one_place(part).privacy_unit in OWNED:
                raise NotImplementedError(
                    f"{_NAME} does not cover {name!r} with "
                    f"privacy_unit={str(part.privacy_unit)!r}"
                )
    return {name: fields[name] for name in wrt}
