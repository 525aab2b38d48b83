"""RDP curve and privacy profile of one release of a base mechanism.

A mechanism is described by its dominating pair on neighbouring inputs. The numbers
determine the neighbouring relation: noise relative to the sensitivity under
``add_remove`` describes ``add_remove``; noise relative to the (usually doubled)
sensitivity under ``replace_one`` describes ``replace_one``.

Numeric fields are scalars or arrays; results have the shape of the mechanism followed
by that of the orders. Results that underflow are rounded up to the smallest normal
number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import call_in_float64
from jaxdp_episodic.accountant.bounds.common import TINY
from jaxdp_episodic.accountant.describe.spec import ByValue, set_checked
from jaxdp_episodic.accountant.losses.gaussian import log_gaussian_profile
from jaxdp_episodic.accountant.numerics.special import SMALL, small_exp_remainder


@dataclass(frozen=True, eq=False)
class Mechanism(ByValue):
    """Base class: numeric fields, an RDP curve and perhaps a privacy profile.

    Two mechanisms are equal if they have the same type and the same numbers.
    """

    # Whether for every neighbouring pair an involution of the outputs exchanges the two
    # distributions: a reflection, or the exchange of the answers. Then the tight bound
    # for Poisson sampling holds: with densities f, g and odd l, 2 E_f[(g/f - 1)^l] =
    # int (g - f)^l (f^{1-l} - g^{1-l}) >= 0, as both factors have the sign of g - f.
    swaps_neighbours: ClassVar[bool] = False
    # Whether the field is noise relative to a sensitivity.
    is_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self))
        set_checked(self, _validation.nonnegative_array, *names)

    @property
    def _value(self) -> np.ndarray:
        """The numeric field, with +0 in place of -0, since 1 / -0 is -inf."""
        return np.asarray(getattr(self, dataclasses.fields(self)[0].name)) + 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numeric field."""
        return self._value.shape

    @property
    def pure_epsilon(self) -> np.ndarray:
        """Limit of the RDP curve at infinite order: the pure-DP epsilon, or ``inf``."""
        return np.broadcast_to(getattr(self, "limit", np.inf), self.shape)

    def up_to(self, max_order: int) -> Mechanism:
        """Returns a mechanism with RDP at the whole orders 2 … ``max_order``."""
        return self  # the named mechanisms have RDP at every order

    def settings(self, rows: np.ndarray) -> Mechanism:
        """Returns the mechanism of some settings, by indices into the flat shape."""
        return type(self)(self._value.ravel()[rows])  # pyright: ignore[reportCallIssue]: each has one field

    def of_group(self, size: int) -> Self:
        """Returns the same noise on ``size`` times the sensitivity."""
        return type(self)(self._value / size)  # pyright: ignore[reportCallIssue]: each has one field

    def rdp(self, orders: Any) -> Any:
        """Returns the RDP of one release, in nats.

        ``orders`` are a scalar or array, each > 1 and finite; the result has shape
        ``self.shape + orders.shape``. *Exact* up to rounding for the named mechanisms;
        an *upper bound* for a user's table or curve, if it is one.
        """
        alpha = _validation.order_array("orders", orders)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            values = self._rdp(alpha.ravel())
        return values.reshape(values.shape[:-1] + alpha.shape)[()]

    def delta(self, epsilon: Any) -> Any:
        """Returns the privacy profile of one release: the smallest delta at epsilon.

        ``epsilon`` >= 0, in nats, broadcasts with the mechanism. *Exact* up to
        rounding. A mechanism described only by its RDP raises `NotImplementedError`.
        """
        eps = _validation.nonnegative_array("epsilon", epsilon)
        if not self.swaps_neighbours:
            raise NotImplementedError(
                f"delta needs a privacy profile, and {type(self).__name__} is "
                "described only by its RDP; covered: Gaussian, Laplace, "
                "RandomizedResponse"
            )
        _validation.broadcast_shape(mechanism=np.empty(self.shape), epsilon=eps)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return np.asarray(self._delta(eps))[()]

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns the RDP (*shape, K) at orders (K,)."""
        raise NotImplementedError

    def _delta(self, epsilon: np.ndarray) -> np.ndarray:
        """Returns the privacy profile, elementwise."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Gaussian(Mechanism):
    """Gaussian noise on a query of bounded l2-sensitivity, in any dimension.

    Attributes:
      noise_multiplier: standard deviation / l2-sensitivity, >= 0, scalar or array;
        0 costs ``inf`` and ``inf`` costs 0.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 7; Balle and Wang (2018),
    arXiv:1805.06530, Theorem 8.
    """

    noise_multiplier: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True
    is_noise: ClassVar[bool] = True

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``inf``; 0 for infinite noise."""
        return np.where(np.isinf(self._value), 0.0, np.inf)

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """``alpha / (2 sigma²)``."""
        inverse = 1 / self._value[..., None]
        return _round_up((0.5 * orders * inverse) * inverse, inverse > 0)

    def _delta(self, epsilon: np.ndarray) -> np.ndarray:
        """``Phi(s/2 - eps/s) - e^eps Phi(-s/2 - eps/s)`` with ``s = 1/sigma``."""
        shift = 1 / self._value
        delta = np.exp(log_gaussian_profile(*np.broadcast_arrays(shift, epsilon)))
        # Only without noise is the loss infinite.
        positive = (shift > 0) & (np.isfinite(epsilon) | np.isinf(shift))
        return _round_up(np.minimum(delta, 1.0), positive)


@dataclass(frozen=True, eq=False)
class Laplace(Mechanism):
    """Laplace noise on every coordinate of a query of bounded l1-sensitivity.

    The RDP is that of one coordinate with the whole shift: its log-moment is convex in
    the shift, so a shift that is split over coordinates costs less.

    Attributes:
      scale: noise scale / l1-sensitivity, >= 0, scalar or array; 0 costs ``inf`` and
        ``inf`` costs 0.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 6; Balle, Barthe and
    Gaboardi (2018), arXiv:1807.01647, Theorem 3.
    """

    scale: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True
    is_noise: ClassVar[bool] = True

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``1 / scale``."""
        with np.errstate(divide="ignore", over="ignore"):
            return 1 / self._value

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """``log M / t``, ``M = (alpha e^{ts} + t e^{-alpha s}) / (2 alpha - 1)``."""
        shift, t = self.pure_epsilon[..., None], orders - 1
        rise = t * shift
        near = rise <= 1
        excess = orders * _exp_remainder(np.where(near, rise, 0.0))
        excess += t * _exp_remainder(np.where(near, -orders * shift, 0.0))
        ratio = t / orders * np.exp(-(orders + t) * shift)  # of the two exponentials
        far = rise + np.log1p(ratio) - np.log1p(t / orders)
        moment = np.where(near, np.log1p(excess / (orders + t)), far)
        return _round_up(moment / t, shift > 0)

    def _delta(self, epsilon: np.ndarray) -> np.ndarray:
        """``1 - e^{(epsilon - s)/2}`` for ``epsilon < s = 1/scale``, else 0."""
        return -np.expm1(_shortfall(epsilon, self.pure_epsilon) / 2)


@dataclass(frozen=True, eq=False)
class RandomizedResponse(Mechanism):
    """One bit, reported truly with probability ``e^epsilon / (1 + e^epsilon)``.

    Its RDP and profile bound those of every pure ``epsilon``-DP mechanism.

    Attributes:
      epsilon: >= 0, scalar or array; ``inf`` always reports the truth.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 5; Kairouz, Oh and
    Viswanath (2015), arXiv:1311.0776.
    """

    epsilon: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``epsilon``."""
        return self._value

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """``log M / t``, ``M = (e^{alpha eps} + e^{-t eps}) / (1 + e^eps)``."""
        eps, t = self._value[..., None], orders - 1
        near = t * eps <= 1
        safe = np.where(near, eps, 0.0)
        excess = -np.expm1(-orders * safe) * np.expm1(t * safe)
        log_moment = np.log1p(excess / (1 + np.exp(-safe)))
        correction = np.log1p(np.exp(-(orders + t) * eps)) - np.log1p(np.exp(-eps))
        rdp = np.where(near, log_moment, t * eps + correction) / t
        return _round_up(rdp, eps > 0)

    def _delta(self, epsilon: np.ndarray) -> np.ndarray:
        """``(e^eps0 - e^eps) / (1 + e^eps0)`` for ``eps < eps0``, else 0."""
        gap = _shortfall(epsilon, self._value)
        return -np.expm1(gap) / (1 + np.exp(-self._value))


@dataclass(frozen=True, eq=False)
class RdpTable(Mechanism):
    """A user's own mechanism, given by its RDP at the whole orders 2, 3, ….

    Between whole orders the convexity of ``(alpha - 1) rdp`` gives an upper bound.

    Attributes:
      values: (..., T) upper bounds of the RDP at the orders 2 … T + 1, >= 0.
      limit: upper bound of the pure-DP epsilon, broadcast against the leading axes;
        one below ``inf`` tightens the bound for sampling without replacement.

    Reference: van Erven and Harremoës (2014), arXiv:1206.2459, Corollary 2.
    """

    values: np.ndarray
    limit: float | np.ndarray = np.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = np.shape(self.values)
        if not shape or shape[-1] == 0:
            raise ValueError(
                f"values must hold the RDP at orders 2, 3, … along its last axis, got "
                f"shape {shape}"
            )
        rows, limit = np.empty(shape[:-1]), np.shape(self.limit)
        if _validation.broadcast_shape(values=rows, limit=self.limit) != rows.shape:
            raise ValueError(
                f"limit must broadcast to values.shape[:-1] = {rows.shape}, got shape "
                f"{limit}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading shape of the table."""
        return np.shape(self.values)[:-1]

    def up_to(self, max_order: int) -> Mechanism:
        """Returns itself; raises ValueError if the table ends before ``max_order``."""
        last = np.shape(self.values)[-1] + 1
        if max_order > last:
            raise ValueError(
                f"orders must not exceed the last order of the RDP table, {last}, got "
                f"{max_order}"
            )
        return self

    def settings(self, rows: np.ndarray) -> Mechanism:
        """Returns the table of these settings."""
        table = np.reshape(self.values, (-1, np.shape(self.values)[-1]))
        return RdpTable(table[rows], self.pure_epsilon.ravel()[rows])

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns the chord of ``(alpha - 1) rdp(alpha)``, which is 0 at order 1."""
        self.up_to(int(np.ceil(np.max(orders, initial=2.0))))
        values, whole = np.asarray(self.values), np.floor(orders)
        weight, index = orders - whole, whole.astype(int) - 2
        below, above = (
            np.take(values, at, axis=-1, mode="clip") for at in (index, index + 1)
        )
        # Weights of the two ends in the log-moment, divided by alpha - 1. At whole
        # orders the upper end has weight 0, also if it is infinite; below order 2 the
        # lower end has.
        t = orders - 1
        low = np.where(index >= 0, below * ((1 - weight) * (whole - 1) / t), 0.0)
        return low + np.where(weight > 0, above * (weight * whole / t), 0.0)


@dataclass(frozen=True, eq=False)
class RdpCurve(Mechanism):
    """A user's own mechanism, given by a function of the order.

    Attributes:
      curve: maps orders (K,) to upper bounds of the RDP (..., K). It is called with
        float64 values and JAX's float64 mode on, so it may use JAX or NumPy. It must
        return float64.
      limit: as in `RdpTable`.
    """

    curve: Callable[[Any], Any]
    limit: float | np.ndarray = np.inf

    def __post_init__(self) -> None:
        _validation.instance("curve", self.curve, Callable, "callable")
        set_checked(self, _validation.nonnegative_array, "limit")

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading shape of the curve's values."""
        return self._rdp(np.array([2.0])).shape[:-1]

    def up_to(self, max_order: int) -> Mechanism:
        """Returns the table of the curve at the orders 2 … ``max_order``."""
        return RdpTable(self._rdp(np.arange(2.0, max_order + 1)), self.limit)

    def _rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns the curve's values, checked."""
        values = call_in_float64(self.curve, orders)
        if np.asarray(values).dtype != np.float64:
            raise TypeError(
                "curve must return float64 (lower precision may round the RDP down), "
                f"got {np.asarray(values).dtype}"
            )
        if np.shape(values)[-1:] != orders.shape:
            raise ValueError(
                f"curve must map orders of shape {orders.shape} to (..., "
                f"{orders.size}), got shape {np.shape(values)}"
            )
        return _validation.nonnegative_array("curve's values", values)


def _shortfall(epsilon: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Returns ``min(epsilon - limit, 0)``; ``-inf`` if the limit is infinite."""
    gap = np.minimum(epsilon - np.where(np.isfinite(limit), limit, 0.0), 0.0)
    return np.where(np.isfinite(limit), gap, -np.inf)


def _round_up(value: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Returns at least the smallest normal number where ``positive``, 0 elsewhere."""
    return np.where(positive, np.maximum(value, TINY), 0.0)


def _exp_remainder(x: np.ndarray) -> np.ndarray:
    """Returns ``e^x - 1 - x``, which would cancel near 0."""
    small = np.abs(x) <= SMALL
    near = small_exp_remainder(np.where(small, x, 0.0))
    return np.where(small, near, np.expm1(x) - x)
