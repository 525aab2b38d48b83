"""Releases: parts of a run other than Gaussian steps, or with known guarantees only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.spec import (
    Check,
    Spec,
    frozen_number,
)


class Release(Spec):
    """Base of the releases, each a step of a run like a `GaussianStep`.

    A release has no privacy unit: its guarantee holds for the units that the rest of
    the run protects. The fields in ``numeric`` may be arrays. A release without such
    fields is always a single setting.

    Attributes:
      neighboring_relation: the relation of the guarantee; None means that of the rest
        of the run.
    """

    neighboring_relation: str | None = None
    # Relations covered by a theorem; () if the release has no relation.
    relations: ClassVar[tuple[str, ...]] = ()
    # Whether a sampling probability below 1 is refused under replace_one.
    whole_if_replaced: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        relation, name = self.neighboring_relation, type(self).__name__
        if not self.relations:
            return
        _validation.choice("neighboring_relation", relation, NEIGHBORING_RELATIONS)
        if relation not in self.relations:
            raise NotImplementedError(
                f"{name} with neighboring_relation={relation!r} has no theorem here; "
                f"covered: {self.relations}"
            )
        if self.is_traced or not (self.whole_if_replaced and relation == "replace_one"):
            return
        if np.any(np.less(getattr(self, "sampling_probability", 1), 1)):
            raise NotImplementedError(
                f"{name} with neighboring_relation='replace_one' and a "
                "sampling_probability below 1 has no theorem here; covered: "
                "'add_remove', 'zero_out', or 'replace_one' with "
                "sampling_probability=1"
            )


@dataclass(frozen=True, eq=False)
class LaplaceRelease(Release):
    """The sum of contributions clipped in the L1 norm, plus Laplace noise.

    Every coordinate gets independent noise of scale ``noise_multiplier`` times the L1
    clip norm (its standard deviation is the square root of 2 times that). The total
    contribution of a protected unit is clipped. Units are Poisson sampled.

    Attributes:
      noise_multiplier: scale of the noise in L1 clip norms, >= 0.
      sampling_probability: probability in [0, 1] that a unit is sampled, independently
        of the others.
      neighboring_relation: "add_remove" (one unit more or less), "zero_out" (its data
        become null; its slot is still sampled), or "replace_one" (its content is
        replaced, a change of up to two clip norms), which needs a probability of 1.

    Raises:
      NotImplementedError: sampling under "replace_one".
    """

    numeric: ClassVar[Mapping[str, Check]] = {
        "noise_multiplier": _validation.nonnegative_array,
        "sampling_probability": _validation.probability_array,
    }
    relations: ClassVar[tuple[str, ...]] = NEIGHBORING_RELATIONS
    whole_if_replaced: ClassVar[bool] = True

    noise_multiplier: float | np.ndarray
    _: KW_ONLY
    sampling_probability: float | np.ndarray = 1.0
    # A field, not the constant of the base class.
    neighboring_relation: str = "add_remove"


@dataclass(frozen=True, eq=False)
class ApproximateDP(Release):
    """A part of the run that is only known to be (epsilon, delta)-DP.

    Accounted as the worst mechanism with this guarantee: with probability delta it
    reveals everything, otherwise it is a randomized response with epsilon. Pure DP is
    ``ApproximateDP(epsilon)``. The guarantee must hold for the units and the relation
    of the rest of the run, given any earlier releases.

    Attributes:
      epsilon: >= 0, nats.
      delta: in [0, 1].

    Reference: Kairouz, Oh, Viswanath (2015), arXiv:1311.0776, Theorem 3.3.
    """

    numeric: ClassVar[Mapping[str, Check]] = {
        "epsilon": _validation.nonnegative_array,
        "delta": _validation.probability_array,
    }

    epsilon: float | np.ndarray
    delta: float | np.ndarray = 0.0


@dataclass(frozen=True, eq=False)
class ZeroConcentratedDP(Release):
    """A part of the run that is only known to be (xi, rho)-zCDP.

    That is, ``rdp(alpha) <= xi + rho alpha`` for every order; xi is usually 0. This
    bounds the Rényi divergences but not the privacy loss distribution, so that only
    ``method="rdp"`` covers a run with such a part. If the part is a Gaussian mechanism,
    whose rho is ``1 / (2 noise_multiplier²)``, set ``is_gaussian``: then all methods
    cover it.

    Attributes:
      rho: >= 0, nats.
      xi: >= 0, nats.
      is_gaussian: whether the part is a Gaussian mechanism with this rho.

    Reference: Bun and Steinke (2016), arXiv:1605.02065, Definition 1.1, Lemma 2.4.
    """

    numeric: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("rho", "xi"), _validation.nonnegative_array
    )
    flags: ClassVar[tuple[str, ...]] = ("is_gaussian",)

    rho: float | np.ndarray
    _: KW_ONLY
    xi: float | np.ndarray = 0.0
    is_gaussian: bool = False

    def check_values(self) -> None:
        """Refuses a Gaussian mechanism with xi > 0."""
        if self.is_gaussian and np.any(self.xi):
            raise ValueError(f"xi must be 0 with is_gaussian=True, got {self.xi!r}")

    @classmethod
    def of_gaussian(cls, noise_multiplier: Any) -> Self:
        """Returns the Gaussian mechanism with this noise, in units of the sensitivity.

        Without noise ``rho`` is inf; with infinite noise it is 0.

        Raises:
          ValueError: negative noise, or NaN.
        """
        noise = _validation.nonnegative_array("noise_multiplier", noise_multiplier)
        with np.errstate(divide="ignore", over="ignore"):
            return cls(0.5 / np.square(noise), is_gaussian=True)


@dataclass(frozen=True, eq=False)
class RenyiDP(Release):
    """A part of the run with known Rényi divergences at some orders.

    Only ``method="rdp"`` covers a run with such a part. Between two orders the chord of
    the convex function ``(alpha - 1) rdp(alpha)`` is used. Above the last finite order
    only order inf, if it is given, bounds the divergence.

    Attributes:
      orders: (A,) ascending, each > 1; the last may be inf.
      rdp: (A,) nats, >= 0, upper bounds for both directions; inf if unknown.

    Raises:
      ValueError: different lengths, or orders that do not ascend.
    """

    orders: Any
    rdp: Any

    def __post_init__(self) -> None:
        orders = _validation.order_array("orders", self.orders, infinite=True)
        rdp = _validation.nonnegative_array("rdp", self.rdp)
        if orders.ndim != 1 or orders.size == 0 or np.any(np.diff(orders) <= 0):
            raise ValueError(
                f"orders must be ascending, got {_validation.shown(self.orders)}"
            )
        check_as_long("rdp", rdp, "orders", orders)
        object.__setattr__(self, "orders", frozen_number(orders))
        object.__setattr__(self, "rdp", frozen_number(rdp))


def check_as_long(name: str, value: np.ndarray, other: str, like: np.ndarray) -> None:
    """Refuses lists of different lengths."""
    if value.shape != like.shape:
        raise ValueError(
            f"{name} must have as many numbers as {other} ({like.size}), got shape "
            f"{value.shape}"
        )
