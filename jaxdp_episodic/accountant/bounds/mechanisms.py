"""What one release of a base mechanism costs: RDP curve and privacy profile.

A mechanism is described by the worst pair of its output distributions on neighbouring
inputs. Which relation that is, is up to whoever gives the numbers: noise relative to
the sensitivity under ``add_remove`` describes ``add_remove``; relative to the (usually
doubled) sensitivity under ``replace_one`` it describes ``replace_one``.

Numeric fields are scalars or arrays; results have the shape of the mechanism followed
by that of the orders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import call_in_float64, float64_boundary
from jaxdp_episodic.accountant.bounds import single_release
from jaxdp_episodic.accountant.describe.spec import ByValue, set_checked
from jaxdp_episodic.accountant.numerics.loops import Array


@dataclass(frozen=True, eq=False)
class Mechanism(ByValue):
    """Base of the descriptions below: numeric fields and static kernels.

    Equal means the same type and the same numbers.

    Attributes:
      swaps_neighbours: class constant; True if for every neighbouring pair some
        involution of the outputs exchanges the two distributions (the reflection at the
        midpoint for symmetric additive noise, the exchange of the answers for
        randomized response). It implies the moment condition of the tight bound for
        Poisson sampling: with densities ``f``, ``g`` and odd ``l``, ``2 E_f[(g/f -
        1)^l] = int (g - f)^l (f^{1-l} - g^{1-l}) >= 0``, since both factors have the
        sign of ``g - f``.
    """

    swaps_neighbours: ClassVar[bool] = False
    # For either engine: orders (K,) and parameters (..., trailing) to RDP (..., K).
    rdp_kernel: ClassVar[Callable[..., Array]]
    # The same: epsilon and parameters to delta, elementwise; None if not known.
    delta_kernel: ClassVar[Callable[..., Array] | None] = None

    @property
    def parameters(self) -> tuple[np.ndarray, ...]:
        """Arrays for the kernels, each of shape ``self.shape`` + trailing axes."""
        fields = dataclasses.fields(self)
        return tuple(np.asarray(getattr(self, field.name)) for field in fields)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numeric field."""
        return self.parameters[0].shape

    @property
    def pure_epsilon(self) -> np.ndarray:
        """Limit of the RDP curve at infinite order: pure-DP epsilon, or ``inf``."""
        raise NotImplementedError

    def up_to(self, max_order: int) -> Mechanism:
        """Returns a mechanism whose kernel serves whole orders 2 … ``max_order``."""
        del max_order  # the named mechanisms are known at every order
        return self

    def rdp(self, orders: Any) -> Any:
        """RDP of one release, in nats.

        Args:
          orders: scalar or array, each > 1 and finite.

        Returns:
          Array of shape ``self.shape + orders.shape`` (``np.float64`` if that is
          ``()``). *Exact* up to rounding for the named mechanisms; an *upper bound*
          for what the user gives, if that is one.
        """
        alpha = _validation.order_array("orders", orders)
        values = _jitted(self.rdp_kernel)(alpha.ravel(), *self.parameters)
        return values.reshape(self.shape + alpha.shape)[()]

    def delta(self, epsilon: Any) -> Any:
        """Privacy profile of one release: the smallest delta at this epsilon.

        Args:
          epsilon: scalar or array >= 0, nats; broadcasts with the mechanism.

        Returns:
          Array of the broadcast shape (``np.float64`` if that is ``()``), in [0, 1].
          *Exact* up to rounding.

        Raises:
          ValueError: negative or NaN epsilon, or shapes that do not broadcast.
          NotImplementedError: a mechanism described by its RDP alone.
        """
        eps = _validation.nonnegative_array("epsilon", epsilon)
        if self.delta_kernel is None:
            raise NotImplementedError(
                f"delta needs a privacy profile: {type(self).__name__} is described by "
                "its RDP alone; covered: Gaussian, Laplace, RandomizedResponse"
            )
        _validation.broadcast_shape(mechanism=np.empty(self.shape), epsilon=eps)
        return _jitted(self.delta_kernel)(eps, *self.parameters)[()]


@dataclass(frozen=True, eq=False)
class Gaussian(Mechanism):
    """Gaussian noise on a query of bounded l2-sensitivity, in any dimension.

    Attributes:
      noise_multiplier: standard deviation / l2-sensitivity, >= 0, scalar or array;
        0 costs ``inf`` and ``inf`` costs 0.
    """

    noise_multiplier: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True
    rdp_kernel = staticmethod(single_release.gaussian_rdp)
    delta_kernel = staticmethod(single_release.gaussian_delta)

    def __post_init__(self) -> None:
        set_checked(self, _validation.nonnegative_array, "noise_multiplier")

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``inf``; 0 for infinite noise."""
        return np.where(np.isinf(self.noise_multiplier), 0.0, np.inf)


@dataclass(frozen=True, eq=False)
class Laplace(Mechanism):
    """Laplace noise on every coordinate of a query of bounded l1-sensitivity.

    The RDP is that of a single coordinate moved by the whole sensitivity: the
    log-moment of a coordinate is convex in its shift and 0 at 0, so that splitting
    the shift costs less.

    Attributes:
      scale: noise scale / l1-sensitivity, >= 0, scalar or array; 0 costs ``inf`` and
        ``inf`` costs 0.
    """

    scale: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True
    rdp_kernel = staticmethod(single_release.laplace_rdp)
    delta_kernel = staticmethod(single_release.laplace_delta)

    def __post_init__(self) -> None:
        set_checked(self, _validation.nonnegative_array, "scale")

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``1 / scale``."""
        with np.errstate(divide="ignore", over="ignore"):
            return np.divide(1.0, self.scale)


@dataclass(frozen=True, eq=False)
class RandomizedResponse(Mechanism):
    """One bit, reported truly with probability ``e^epsilon / (1 + e^epsilon)``.

    Every pure ``epsilon``-DP mechanism is a post-processing of it (Kairouz, Oh and
    Viswanath 2015, arXiv:1311.0776), so it bounds any of which no more is known.

    Attributes:
      epsilon: >= 0, scalar or array; ``inf`` always tells the truth.
    """

    epsilon: float | np.ndarray
    swaps_neighbours: ClassVar[bool] = True
    rdp_kernel = staticmethod(single_release.randomized_response_rdp)
    delta_kernel = staticmethod(single_release.randomized_response_delta)

    def __post_init__(self) -> None:
        set_checked(self, _validation.nonnegative_array, "epsilon")

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``epsilon``."""
        return np.asarray(self.epsilon)


@dataclass(frozen=True, eq=False)
class RdpTable(Mechanism):
    """A user's own mechanism, by its RDP at the whole orders 2, 3, ….

    Attributes:
      values: (..., T) upper bounds of the RDP at the orders 2 … T + 1, >= 0. Between
        them the convexity of ``(alpha - 1) rdp`` gives an upper bound.
      limit: pure-DP epsilon, broadcast against the leading axes; ``inf`` (the default)
        is always true. A smaller one tightens sampling without replacement.

    Raises:
      ValueError: negative or NaN values, or no values.
    """

    values: np.ndarray
    limit: float | np.ndarray = np.inf
    rdp_kernel = staticmethod(single_release.interpolated_rdp)

    def __post_init__(self) -> None:
        set_checked(self, _validation.nonnegative_array, "values", "limit")
        shape = np.shape(self.values)
        if not shape or shape[-1] == 0:
            raise ValueError(
                f"values must hold the RDP at orders 2, 3, … along its last axis, got "
                f"shape {shape}"
            )
        leading = _validation.broadcast_shape(
            values=np.empty(shape[:-1]), limit=self.limit
        )
        if leading != shape[:-1]:
            raise ValueError(
                f"limit must broadcast to values.shape[:-1] = {shape[:-1]}, got shape "
                f"{np.shape(self.limit)}"
            )

    @property
    def parameters(self) -> tuple[np.ndarray, ...]:
        """The table."""
        return (np.asarray(self.values),)

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading shape of the table."""
        return np.shape(self.values)[:-1]

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``limit``."""
        return np.broadcast_to(self.limit, self.shape)

    def up_to(self, max_order: int) -> Mechanism:
        """Returns itself, or refuses if the table ends before ``max_order``."""
        last = np.shape(self.values)[-1] + 1
        if max_order > last:
            raise ValueError(
                f"orders must not exceed the last order of the RDP table, {last}, got "
                f"{max_order}"
            )
        return self

    def rdp(self, orders: Any) -> Any:
        """RDP of one release; see `Mechanism.rdp`. Refuses orders beyond the table."""
        alpha = _validation.order_array("orders", orders)
        self.up_to(int(np.ceil(np.max(alpha, initial=2.0))))
        return super().rdp(orders)


@dataclass(frozen=True, eq=False)
class RdpCurve(Mechanism):
    """A user's own mechanism, by a function of the order.

    Attributes:
      curve: maps orders (K,) to upper bounds of the RDP (..., K). It is called with
        float64 values and JAX's float64 mode on, so it may be written in JAX or NumPy,
        and must answer in float64.
      limit: pure-DP epsilon, as in `RdpTable`.

    Raises:
      TypeError: a curve that cannot be called, or does not answer in float64.
      ValueError: a limit that is negative or NaN; when evaluated, an answer of the
        wrong shape, negative or NaN.
    """

    curve: Callable[[Any], Any]
    limit: float | np.ndarray = np.inf

    def __post_init__(self) -> None:
        if not callable(self.curve):
            raise TypeError(
                f"curve must be callable, got {_validation.shown(self.curve)}"
            )
        set_checked(self, _validation.nonnegative_array, "limit")

    @property
    def parameters(self) -> tuple[np.ndarray, ...]:
        """None as numbers: see `up_to`."""
        raise NotImplementedError(
            "RdpCurve has a function in place of parameters; covered: up_to(max_order)"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading shape of what the curve returns."""
        return self._evaluate(np.array([2.0])).shape[:-1]

    @property
    def pure_epsilon(self) -> np.ndarray:
        """``limit``."""
        return np.broadcast_to(self.limit, self.shape)

    def up_to(self, max_order: int) -> Mechanism:
        """Returns the table of the curve at the orders 2 … ``max_order``."""
        return RdpTable(self._evaluate(np.arange(2.0, max_order + 1)), self.limit)

    def rdp(self, orders: Any) -> Any:
        """The curve itself, checked; see `Mechanism.rdp`."""
        alpha = _validation.order_array("orders", orders)
        values = self._evaluate(alpha.ravel())
        return values.reshape(values.shape[:-1] + alpha.shape)[()]

    def _evaluate(self, orders: np.ndarray) -> np.ndarray:
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


@functools.cache
def _jitted(kernel: Callable[..., Array]) -> Callable[..., np.ndarray]:
    return float64_boundary(kernel)
