"""Parts of a run that are no Gaussian steps: Laplace noise, and mere claims."""

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

    A release has no privacy unit of its own: what it says holds for the units that the
    rest of the run protects. Fields of a release in ``numeric`` may be arrays; without
    any it is always one setting.

    Attributes:
      neighboring_relation: the one that the release is about, or None for whatever the
        rest of the run is about.
    """

    neighboring_relation: str | None = None
    # Relations with a theorem, of releases that are about one.
    relations: ClassVar[tuple[str, ...]] = ()
    # Whether a sample is refused under replace_one.
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
    clip norm (its standard deviation is the square root of 2 times that). What is
    clipped is all that one protected unit gives, drawn by Poisson sampling.

    Attributes:
      noise_multiplier: scale of the noise in L1 clip norms, >= 0.
      sampling_probability: that a unit takes part, in [0, 1], for each unit by itself.
      neighboring_relation: "add_remove" (one unit more or less), "zero_out" (its data
        become null, its slot is drawn like the others), or "replace_one" (its content
        changed, by up to two clip norms), which needs a probability of 1.

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
    # A field of the subclass in place of the base's constant.
    neighboring_relation: str = "add_remove"


@dataclass(frozen=True, eq=False)
class ApproximateDP(Release):
    """A part of the run of which only (epsilon, delta)-DP is known.

    Accounted as the worst mechanism with that guarantee: everything is lost with
    probability delta, and else a randomized response at epsilon. Pure DP is
    ``ApproximateDP(epsilon)``. The guarantee must hold for the units and the relation
    of the rest of the run, whatever the rest has released before.

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
    """A part of the run of which only (xi, rho)-zCDP is known.

    It is ``rdp(alpha) = xi + rho alpha`` for every order, xi mostly being 0.

    That bounds its Rényi divergences and says nothing exact about its losses, so that
    only ``method="rdp"`` answers a run with such a part. Where the part is a Gaussian
    mechanism, whose rho is ``1 / (2 noise_multiplier²)``, say so: all methods answer.

    Attributes:
      rho: >= 0, nats.
      xi: >= 0, nats.
      is_gaussian: whether it is a Gaussian mechanism with exactly these divergences.

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
        """Refuses a Gaussian mechanism with an xi."""
        if self.is_gaussian and np.any(self.xi):
            raise ValueError(f"xi must be 0 of a Gaussian mechanism, got {self.xi!r}")

    @classmethod
    def of_gaussian(cls, noise_multiplier: Any) -> Self:
        """Returns the Gaussian mechanism of this noise, in units of the sensitivity.

        Noise of 0 is no protection, ``rho = inf``, and infinite noise loses nothing.

        Raises:
          ValueError: negative noise, or NaN.
        """
        noise = _validation.nonnegative_array("noise_multiplier", noise_multiplier)
        with np.errstate(divide="ignore", over="ignore"):
            return cls(0.5 / np.square(noise), is_gaussian=True)


@dataclass(frozen=True, eq=False)
class RenyiDP(Release):
    """A part of the run of which Rényi divergences at some orders are known.

    Only ``method="rdp"`` answers a run with such a part. Between two orders the chord
    of ``(alpha - 1) rdp(alpha)`` is taken, which is convex; above the last finite one
    nothing is known but what order inf says.

    Attributes:
      orders: (A,) ascending, each > 1; the last may be inf.
      rdp: (A,) nats, >= 0, of both directions; inf where unknown.

    Raises:
      ValueError: lengths that differ.
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
            f"{name} must be as many as {other} ({like.size}), got {value.shape}"
        )
