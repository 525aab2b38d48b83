"""Renyi moments of any mechanism known by its privacy profile.

For a pair (P, Q) with profiles ``h_f(g) = H_g(P || Q)`` and ``h_b(g) = H_g(Q || P)``,
``t = alpha - 1 > 0`` and ``u = log g``,

    E_Q[(P/Q)^alpha] - 1
        = t (1+t) integral_0^inf [e^{t u} h_f(e^u) + e^{-(1+t) u} h_b(e^u)] du      (1)

(Sason and Verdú 2016, arXiv:1508.00335). The integrand is positive, so the excess over
1 keeps its relative precision however small it is.

Nothing is assumed about the places of the integrand's features. Profiles decrease, so
the values at the nodes of a panel bound its integral from above; panels are halved
until they are known to be negligible, or their bound is in reach and their integral
settled.
The kernels of ``amplification.moments`` give the same numbers for the library's own
designs, far faster; this is for profiles that have no such kernel, and to check them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic._validation import choice, order_array, positive_array
from jaxdp_episodic.numerics.quadrature import gauss_legendre

LogProfile = Callable[[Any], tuple[Any, Any]]
"""Maps u = log g (n,) to ``(log h_forward, log h_backward)``, each (n,), by JAX."""

_NODES = 16
# The first panels: [0, 2^-80], then a factor of 2 each, up to log g = 2^40.
_FIRST_EDGES = np.concatenate([[0.0], 2.0 ** np.arange(-80, 41)])
# Panels are evaluated this many at a time, so that the profile is compiled once.
_CHUNK = 128
_MOST_ROUNDS = 60
_MOST_PANELS = 200_000
# Weight at the last edge above this share of the whole: the integral may diverge.
_LOG_TAIL_SHARE = -60.0
# Gauss–Legendre sums of 16 nodes are exact to 1e-13 where the logarithm of a smooth
# integrand varies by less than this over a panel.
_LOG_RESOLVED = 20.0
_ROUNDING = 4 * np.finfo(np.float64).eps


class _Panels(NamedTuple):
    """Panels, with one row per order: (m,) ends, (K, m) logarithms."""

    left: np.ndarray
    right: np.ndarray
    log_integral: np.ndarray
    log_bound: np.ndarray
    rounding: np.ndarray


def rdp_from_profile(
    log_profile: LogProfile,
    orders: Any,
    *,
    direction: str = "both",
    relative_tolerance: float = 1e-11,
) -> np.ndarray | np.float64:
    """Rényi divergences of one step from its privacy profile.

    ``rdp(alpha) = log(E_Q[(P/Q)^alpha]) / (alpha - 1)``.

    Args:
      log_profile: maps ``u = log g`` (n,), u >= 0, to the logarithms of the forward and
        backward profile, each (n,), ``-inf`` for 0. Written in JAX; evaluated in
        float64. Both must be decreasing, and must be profiles of a dominating pair.
      orders: each > 1, any shape.
      direction: "forward" (P against Q), "backward" or "both", the larger of the two.
      relative_tolerance: of the quadrature.

    Returns:
      Array of the shape of ``orders`` (``np.float64`` for a scalar), nats. For the pair
      that the profile belongs to *exact* up to the quadrature error, whose estimate is
      added so that it errs upwards; an *upper bound* if the profile is one. ``inf``
      where the moment diverges or the quadrature does not settle.

    Raises:
      TypeError: orders are not numbers, or the direction is not a string.
      ValueError: an order is not finite and > 1, the tolerance is not positive, or
        the direction is none of the three.
    """
    alphas = order_array("orders", orders)
    choice("direction", direction, ("forward", "backward", "both"))
    t = alphas.ravel() - 1
    ways = ("forward", "backward") if direction == "both" else (direction,)
    log_excess = np.max(
        [
            log_excess_from_profile(
                log_profile, t, direction=way, relative_tolerance=relative_tolerance
            )
            for way in ways
        ],
        axis=0,
    )
    rdp = np.logaddexp(0.0, log_excess) / t
    return rdp.reshape(alphas.shape)[()]


def log_excess_from_profile(
    log_profile: LogProfile,
    t: np.ndarray,
    *,
    direction: str = "forward",
    relative_tolerance: float = 1e-11,
) -> np.ndarray:
    """``log(E_Q[(P/Q)^{1+t}] - 1)`` by equation (1), for each t.

    Args:
      log_profile: as for `rdp_from_profile`.
      t: (K,) orders minus one, > 0. All orders share the evaluations of the profile.
      direction: "forward" (P against Q) or "backward", which exchanges the profiles.
      relative_tolerance: of the excess. Where the profile's own rounding is coarser
        (its logarithm is huge) that is what the estimated error says.

    Returns:
      (K,) nats, the estimated error added; ``-inf`` for a profile that is 0, ``inf``
      where the integral diverges or does not settle.

    Raises:
      TypeError: the tolerance is not a number, or the direction is not a string.
      ValueError: the tolerance is not positive, or the direction is neither.
    """
    choice("direction", direction, ("forward", "backward"))
    tolerance = float(positive_array("relative_tolerance", relative_tolerance))
    t = np.asarray(t, np.float64)[:, None]
    evaluate = _evaluator(log_profile, reverse=direction == "backward")
    panels = _measure(evaluate, _FIRST_EDGES[:-1], _FIRST_EDGES[1:], t)
    # h decreases, so weight at the last edge that is far below the whole says that
    # e^{t u} h has turned down for good; otherwise nothing is known of the tail.
    last = _FIRST_EDGES[-1:]
    forward, backward = evaluate(last)
    log_last = _log_weight(forward, backward, last, t)[:, 0] + np.log(last)
    log_whole = _log_sum(panels.log_integral)
    ends = (log_last <= log_whole + _LOG_TAIL_SHARE) & (log_whole < np.inf)
    log_excess = np.full(t.shape[0], np.inf)
    # All orders together share the evaluations; where one order keeps the others from
    # settling, each gets a try of its own.
    alone = [np.arange(t.shape[0]) == i for i in np.flatnonzero(ends)]
    for group in (ends, *alone):
        group = group & np.isposinf(log_excess)
        if group.any():
            log_total, log_error = _settle(
                evaluate, _rows(panels, group), t[group], tolerance
            )
            log_factor = np.log(t * (1 + t))[group, 0]
            log_excess[group] = np.logaddexp(log_total, log_error) + log_factor
    return log_excess


def _settle(
    evaluate: Callable, panels: _Panels, t: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Halves panels until all are settled: log of the integral and of its error."""
    done = np.full(t.shape[0], -np.inf)
    log_error = np.full(t.shape[0], -np.inf)
    used = panels.left.size
    for _ in range(_MOST_ROUNDS):
        log_total = np.logaddexp(done, _log_sum(panels.log_integral))
        goal = (log_total + np.log(tolerance))[:, None]
        negligible = panels.log_bound <= goal - np.log(_MOST_PANELS)
        drop = negligible.all(axis=0)
        log_error = np.logaddexp(log_error, _log_sum(panels.log_bound[:, drop]))
        panels, negligible = _select(panels, ~drop), negligible[:, ~drop]
        used += 2 * panels.left.size
        if panels.left.size == 0:
            return done, log_error
        if used > _MOST_PANELS:
            break
        middle = 0.5 * (panels.left + panels.right)
        first = _measure(evaluate, panels.left, middle, t)
        second = _measure(evaluate, middle, panels.right, t)
        halves = np.logaddexp(first.log_integral, second.log_integral)
        noise = np.log(np.maximum(first.rounding, second.rounding))
        change = _log_abs_difference(halves, panels.log_integral)
        # A panel may be off by the tolerance (no finer than rounding allows), or by a
        # hundredth of the tolerance of the whole. That both rules agree says nothing
        # while a peak may hide between their nodes: the bound must be in reach.
        allowed = np.logaddexp(
            halves + np.maximum(np.log(tolerance), noise), goal - np.log(100.0)
        )
        resolved = panels.log_bound <= halves + _LOG_RESOLVED
        settled = (negligible | (resolved & (change <= allowed))).all(axis=0)
        error = np.maximum(change, halves + noise)
        error = np.where(negligible, panels.log_bound, error)[:, settled]
        done = np.logaddexp(done, _log_sum(halves[:, settled]))
        log_error = np.logaddexp(log_error, _log_sum(error))
        panels = _join(_select(first, ~settled), _select(second, ~settled))
    unknown = np.full(t.shape[0], np.inf)
    return unknown, unknown


def _evaluator(log_profile: LogProfile, *, reverse: bool) -> Callable:
    """The profile on NumPy arrays of any length, compiled for one length only."""
    kernel = float64_boundary(jax.jit(log_profile))
    length = _CHUNK * _NODES

    def evaluate(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        padded = np.zeros(-(-u.size // length) * length)
        padded[: u.size] = u
        parts = [kernel(chunk) for chunk in padded.reshape(-1, length)]
        forward, backward = (
            np.concatenate([np.broadcast_to(p[i], length) for p in parts])[: u.size]
            for i in (0, 1)
        )
        # What is not a number is not known, and counts as infinite.
        forward, backward = (
            np.where(np.isnan(h), np.inf, h) for h in (forward, backward)
        )
        return (backward, forward) if reverse else (forward, backward)

    return evaluate


def _measure(
    evaluate: Callable, left: np.ndarray, right: np.ndarray, t: np.ndarray
) -> _Panels:
    """Integrals over panels by Gauss–Legendre, and what they cannot exceed."""
    nodes, weights = gauss_legendre(_NODES)
    if left.size == 0:
        empty = np.empty((t.shape[0], 0))
        return _Panels(left, right, empty, empty, empty)
    width = right - left
    u = left[:, None] + width[:, None] * nodes
    starts = np.concatenate([left[:, None], u], axis=1)
    ends = np.concatenate([u, right[:, None]], axis=1)
    at_starts = tuple(h.reshape(starts.shape) for h in evaluate(starts.ravel()))
    order = t[..., None]
    # Both profiles decrease: up to the next node each is at most its value at the last,
    # while the forward weight grows and the backward one falls.
    log_bounds = np.logaddexp(
        order * ends + at_starts[0], -(1 + order) * starts + at_starts[1]
    )
    log_bound = _log_sum(log_bounds + np.log(ends - starts))
    at_nodes = at_starts[0][:, 1:], at_starts[1][:, 1:]
    log_values = _log_weight(*at_nodes, u, order)
    log_integral = _log_sum(log_values + np.log(weights)) + np.log(width)
    rounding = _rounding(*at_nodes, u, order)
    return _Panels(left, right, log_integral, log_bound, rounding)


def _rounding(
    log_forward: np.ndarray, log_backward: np.ndarray, u: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """(K, m) relative error that float64 leaves where a panel's integrand is largest.

    A weight e^{t u} h near 1 may be the product of e^{1e6} and e^{-1e6}, of which the
    logarithms are only known to 1e-10.
    """
    forward, backward = order * u + log_forward, -(1 + order) * u + log_backward
    with np.errstate(invalid="ignore"):
        size = np.where(
            forward >= backward,
            order * u + np.abs(log_forward),
            (1 + order) * u + np.abs(log_backward),
        )
    peak = np.argmax(np.maximum(forward, backward), axis=-1)[..., None]
    size = np.take_along_axis(size, peak, axis=-1)[..., 0]
    return _ROUNDING * (1 + np.where(np.isfinite(size), size, 0.0))


def _log_weight(
    log_forward: np.ndarray, log_backward: np.ndarray, u: np.ndarray, t: np.ndarray
) -> np.ndarray:
    """Logarithm of the integrand of (1)."""
    return np.logaddexp(t * u + log_forward, -(1 + t) * u + log_backward)


def _log_sum(log_values: np.ndarray) -> np.ndarray:
    """Logarithm of the sum over the last axis; ``-inf`` where it is empty."""
    return np.logaddexp.reduce(log_values, axis=-1)


def _log_abs_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``log |e^a - e^b|``; NaN where an input is NaN or both are ``inf``."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = larger + np.log(-np.expm1(smaller - larger))
    return np.where(np.isneginf(larger), -np.inf, difference)


def _rows(panels: _Panels, keep: np.ndarray) -> _Panels:
    """The same panels for the orders that are marked."""
    return _Panels(*panels[:2], *(field[keep] for field in panels[2:]))


def _select(panels: _Panels, keep: np.ndarray) -> _Panels:
    """The panels that are marked."""
    return _Panels(*(field[..., keep] for field in panels))


def _join(first: _Panels, second: _Panels) -> _Panels:
    """The panels of both."""
    return _Panels(
        *(np.concatenate(pair, axis=-1) for pair in zip(first, second, strict=True))
    )
