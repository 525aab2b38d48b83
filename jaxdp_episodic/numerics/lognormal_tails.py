"""Tails of sums of lognormal terms on contours that are known; how kernels are called.

See `numerics.lognormal_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.numerics.complex_exponentials import polar
from jaxdp_episodic.numerics.lognormal_terms import Sums, law_on_axis
from jaxdp_episodic.numerics.loops import (
    Array,
    complex_of,
    fori_loop,
    map_arrays,
    namespace,
)

# Places of a contour that are evaluated together.
_TOGETHER = 8

Call = Callable[..., tuple[np.ndarray, ...]]
"""Calls ``kernel(*arrays, **static)``, the rows on the last axis of all arrays."""


class Rays(NamedTuple):
    """Integrands are ``e^{power + k p}`` times powers of ``start / p``, (N, J)."""

    power: tuple[np.ndarray, np.ndarray]
    p: tuple[np.ndarray, np.ndarray]  # from the start on
    over: tuple[np.ndarray, np.ndarray]
    slope: tuple[np.ndarray, np.ndarray]  # of the power by the shift; or (0, J)


class Jumps(NamedTuple):
    """The same along the axis, times factors; 0 where there are none, (N, J)."""

    size: np.ndarray
    p: np.ndarray
    over: np.ndarray
    factor: np.ndarray
    slope: np.ndarray  # of the factor, at this size; or (0, J)


class Contours(NamedTuple):
    """Contours for all places of S sums; made by `contours`.

    Attributes:
      terms: what is added up.
      first: (S,) number of the first contour of each.
      start: (S, C) where its contours leave the axis, or cross it; NaN behind the last.
      base: (S, C) logarithm of K^n there.
      ends: (2, J) both, of all contours.
      rays: of all contours, one after the other.
      jumps: of those that rise, which come first.
      with_slopes: whether derivatives by the shift are known.
    """

    terms: Sums
    first: np.ndarray
    start: np.ndarray
    base: np.ndarray
    ends: np.ndarray
    rays: Rays
    jumps: Jumps
    with_slopes: bool

    def log_tails(self, which: np.ndarray, place: np.ndarray, call: Call) -> np.ndarray:
        """``log E(X - x)_+``, ``log P(X > x)`` and log-density at ``x = n e^place``.

        Or of ``E(x - X)_+`` and ``P(X < x)`` at ``n e^-place``, if not rising, of sum
        ``which``; (3, m), NaN where more cancels than double precision has. With slopes
        (6, m): the derivatives by the shift, at x.
        """
        with np.errstate(all="ignore"):
            constant = self.terms.take(which).constant(place)
            start, base = self.start[which], self.base[which]
            # Little cancels where the integrand is small.
            size = base + constant[:, None] * start - 2 * np.log(start)
            mine = np.argmin(np.where(np.isnan(size), np.inf, size), axis=1)
            mine = mine + self.first[which]
            result = np.empty((6 if self.with_slopes else 3, len(place)))
            rises = mine < self.jumps.p.shape[1]
            for kind in (True, False):
                at = np.flatnonzero(rises == kind)
                if not len(at):
                    continue
                contour, column = _side_by_side(mine[at])
                ends = self.ends[:, contour]
                rays = [[part[:, contour] for part in pair] for pair in self.rays]
                jumps = [part[:, contour] for part in self.jumps] if kind else []
                found = call(tails_at, constant[at][column], *ends, rays, jumps)
                for row, part in zip(result, found, strict=True):
                    row[at[column]] = part
        return result


def _side_by_side(contour: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a few places on one contour: (R,) contours, and (M, R) the places."""
    order = np.argsort(contour, kind="stable")
    every, number = np.unique(contour, return_counts=True)
    rows = -(-number // _TOGETHER)
    begin = np.repeat(np.cumsum(number) - number, rows)
    end = np.repeat(np.cumsum(number), rows)
    rank = np.arange(len(begin)) - np.repeat(np.cumsum(rows) - rows, rows)
    at = begin + rank * _TOGETHER + np.arange(_TOGETHER)[:, None]
    return np.repeat(every, rows), order[np.minimum(at, end - 1)]


def tails_at(
    constant: Array, start: Array, base: Array, rays: list, jumps: list
) -> tuple[Array, ...]:
    """The rows of `Contours.log_tails`, (M, R) each: kernel.

    Args:
      constant: k, (M, R).
      start: (R,) of the contour.
      base: (R,) of it.
      rays: as `Rays`, pairs (N, R).
      jumps: as `Jumps`, (N', R); or none.
    """
    xp = namespace(constant, start)
    (power, phase), (along, rise), over, slope = rays

    def on_ray(i: Any) -> Array:
        exponent = power[i] + constant * along[i], phase[i] + constant * rise[i]
        return complex_of(xp, *polar(*exponent))

    def of_ray(grown: Array, i: Any) -> list[Array]:
        # The second, first and no power of start over p; then their derivatives.
        share = complex_of(xp, over[0][i], over[1][i])
        parts = [grown * share * share, grown * share, grown]
        if len(slope[0]):
            moved = complex_of(xp, slope[0][i], slope[1][i])
            parts += [part * moved for part in parts]
        return [xp.imag(part) for part in parts]

    totals = _summed(xp, on_ray, of_ray, len(power))
    top = base + start * constant
    if jumps:
        size, p, share, factor, moved = jumps
        largest = xp.max(size[:, None] + constant * p[:, None], axis=0)

        def on_axis(i: Any) -> Array:
            return xp.exp(size[i] + constant * p[i] - largest)

        def of_jump(grown: Array, i: Any) -> list[Array]:
            once = grown * share[i]
            parts = [once * share[i], once, grown]
            rows = [part * factor[i] for part in parts]
            return rows + [part * moved[i] for part in parts if len(moved)]

        sums = _summed(xp, on_axis, of_jump, len(size))
        both = xp.maximum(top, largest)
        shares = xp.exp(top - both), xp.exp(largest - both)
        totals = [
            total * shares[0] + more * shares[1]
            for total, more in zip(totals, sums, strict=True)
        ]
        top = both
    logs = [
        xp.log(total) + top - power * xp.log(start)
        for total, power in zip(totals, (2, 1, 0), strict=False)
    ]
    slopes = zip(totals[3:], totals, strict=False)
    return (*logs, *(part / total for part, total in slopes))


def _summed(
    xp: Any,
    value: Callable[[Any], Array],
    parts: Callable[[Array, Any], list[Array]],
    number: int,
) -> list[Array]:
    """Sums of ``parts(value(i), i)`` over nodes i."""
    if xp is np:
        every = np.s_[:, None]
        return [np.sum(part, axis=0) for part in parts(value(every), every)]

    def add(i: Array, state: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        sums, this = state
        found = zip(sums, parts(this, i), strict=True)
        # XLA would compute it again for each sum, if it were not of the turn before.
        return [a + b for a, b in found], value(xp.minimum(i + 1, number - 1))

    first = value(0)
    start = [xp.zeros_like(part) for part in parts(first, 0)]
    return fori_loop(xp, 0, number, add, (start, first))[0]


def by_rows(
    run: Callable[..., Any], rows: Callable[[Any], int | None], *, pad: bool
) -> Call:
    """A `Call` of a few rows at a time, of a kernel ``rows(kernel)``; None: of all.

    Args:
      run: runs ``run(kernel, *arrays, **static)``.
      rows: how many.
      pad: whether fewer are filled up.
    """

    def call(kernel: Any, *arrays: Any, **static: Any) -> tuple[np.ndarray, ...]:
        sizes: list[int] = []
        map_arrays(lambda array: sizes.append(array.shape[-1]), arrays)
        chunk = rows(kernel) or sizes[0]
        if not pad and sizes[0] <= chunk:
            return tuple(run(kernel, *arrays, **static))
        parts = []
        for begin in range(0, sizes[0], chunk):
            left = min(chunk, sizes[0] - begin)

            def part(array: np.ndarray, begin: int = begin, left: int = left) -> Any:
                some = array[..., begin : begin + left]
                if left == chunk or not pad:
                    return some
                # The last row fills it up, and is thrown away below.
                last = (*some.shape[:-1], chunk - left)
                return np.concatenate([some, np.broadcast_to(some[..., -1:], last)], -1)

            found = run(kernel, *map_arrays(part, arrays), **static)
            parts.append([row[..., :left] for row in found])
        return tuple(np.concatenate(column, -1) for column in zip(*parts, strict=True))

    return call


_FIT = {tails_at: 16, law_on_axis: 96}


def _run(kernel: Any, *arrays: Any, **static: Any) -> Any:
    return kernel(*arrays, **static)


# By NumPy: what fits the cache.
at_once = by_rows(_run, _FIT.get, pad=False)
