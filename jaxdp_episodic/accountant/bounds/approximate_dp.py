"""Amplification by subsampling of (epsilon, delta) guarantees and privacy profiles.

The whole family follows from one identity of hockey-stick divergences. If two
distributions share a part, ``mu = (1-r) mu0 + r mu1`` and ``mu' = (1-r) mu0 + r mu1'``,
then

    H_{e^eps'}(mu || mu') = r H_{e^eps}(mu1 || (1-b) mu0 + b mu1'),
    eps' = log(1 + r (e^eps - 1)),   b = e^{eps' - eps}

(advanced joint convexity). The shared part is what happens when the differing unit is
not drawn, r the chance that it is.

With several levels of sampling the product of their rates is not always r: see
docs/theory.md, "Why the product rate alone is wrong".

Arguments may be arrays that broadcast: ``epsilon`` >= 0 in nats, ``delta`` and
``sampling_probability`` p in [0, 1], ``size`` m and ``population`` n whole numbers,
``0 <= m <= n``, ``n >= 1``. Results are float64 of the broadcast shape. A
``mechanism`` is a `Mechanism`, or a function from epsilon to delta that broadcasts and
need not accept ``inf``: a profile that leaves [0, 1] is a `ValueError`, a mechanism
without one a `NotImplementedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.mechanisms import Mechanism

Profile = Mechanism | Callable[[Any], Any]


def amplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """``log(1 + rate (e^epsilon - 1))``, without cancellation or overflow.

    ``rate`` is the chance in [0, 1] that the differing unit is drawn. *Exact*, rounded
    up by a few ulp; ``inf`` stays ``inf`` unless the rate is 0. About ``rate *
    epsilon`` where epsilon is small. (The lecture this formula is often copied from has
    ``e^epsilon + 1`` in its approximation: a misprint.)

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    eps, r = _epsilon_and_rate(epsilon, rate)
    small = eps <= 1
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(r * np.expm1(np.where(small, eps, 0.0)))
        far = np.logaddexp(np.log1p(-r), np.log(r) + eps)
    value = np.where(small, near, far)
    value = np.minimum(np.where(value > 0, value * (1 + 1e-15), 0.0), eps)
    return np.where(r > 0, value, 0.0)[()]


def unamplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """The inverse: ``log(1 + (e^epsilon - 1) / rate)``.

    From epsilon of the subsampled mechanism to that at which the profile of the
    mechanism itself is to be read. *Exact*, rounded down by a few ulp (a profile
    decreases). ``inf`` at rate 0.

    Reference: as `amplified_epsilon`.
    """
    eps, r = _epsilon_and_rate(epsilon, rate)
    small = eps <= 1
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(np.expm1(np.where(small, eps, 0.0)) / r)
        # (e^eps - (1 - r)) / r = e^eps (1 + (1-r)(1 - e^-eps) / r): no overflow.
        far = eps + np.log1p((1 - r) * -np.expm1(-eps) / r)
    value = np.where(small, near, far) * (1 - 1e-15)
    value = np.maximum(value, eps)
    return np.where(r > 0, value, np.inf)[()]


def amplify_without_replacement(
    epsilon: Any, delta: Any, *, size: Any, population: Any
) -> tuple[Any, Any]:
    """An (epsilon, delta) mechanism on a uniform subset of fixed size.

        eps' = log(1 + (m/n)(e^eps - 1)),   delta' = (m/n) delta.

    Assumes: (epsilon, delta) of the mechanism under ``replace_one``; the subset is
    fresh and secret. Under ``add_remove`` neighbours' subsets differ by a
    replacement too, so the same holds there for data of at most ``population``.

    Returns:
      (epsilon, delta) of the subsampled mechanism, an *upper bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9; the
    lecture's claim.
    """
    return _amplified(epsilon, delta, _subset_rate(size, population))


def amplify_poisson(
    epsilon: Any, delta: Any, *, sampling_probability: Any
) -> tuple[Any, Any]:
    """An (epsilon, delta) mechanism on a Poisson sample.

    Assumes: (epsilon, delta) of the mechanism under ``add_remove``, for which the
    result holds; every unit is drawn independently by fresh, secret coins.

    Returns:
      (epsilon, delta) of the subsampled mechanism, an *upper bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    p = _validation.probability_array("sampling_probability", sampling_probability)
    return _amplified(epsilon, delta, p)


def delta_poisson_subsampled(
    mechanism: Profile, *, sampling_probability: Any, epsilon: Any
) -> Any:
    """Profile of a mechanism on a Poisson sample: ``p delta(log(1 + (e^eps - 1)/p))``.

    Assumes: the profile of the mechanism under ``add_remove``, in both directions.

    Returns:
      Delta at finite epsilons, an *upper bound* under ``add_remove``, attained for a
      mechanism whose profile has one worst pair for all epsilon.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    p = _validation.probability_array("sampling_probability", sampling_probability)
    return _profile_at_rate(mechanism, p, epsilon)


def delta_without_replacement_subsampled(
    mechanism: Profile, *, size: Any, population: Any, epsilon: Any
) -> Any:
    """Profile of a mechanism on a uniform subset: ``r delta(log(1 + (e^eps - 1)/r))``.

    Assumes: the profile of the mechanism under ``replace_one``, for which the result
    holds; additive noise of ``sigma`` clip norms is ``Gaussian(sigma / 2)`` there.

    Returns:
      Delta at finite epsilons, ``r = m / n``; an *upper bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9.
    """
    return _profile_at_rate(mechanism, _subset_rate(size, population), epsilon)


def subsampled_response_epsilon(epsilon: Any, *, sampling_probability: Any) -> Any:
    """Privacy of randomized response run with probability p, else a fair coin.

    ``2 artanh(p tanh(eps / 2))``, nats, *exact*: below the ``log(1 + p (e^eps - 1))``
    that holds for any mechanism, because a coin hides more than silence does. (Notes
    that say ``(1 + a) / (2 + a)`` for the true answer's chance mean ``e^eps = 1 + a``.)

    Reference: Warner (1965), for the response; docs/proofs.md for the sampling.
    """
    eps = _validation.nonnegative_array("epsilon", epsilon)
    p = _validation.probability_array("sampling_probability", sampling_probability)
    _validation.broadcast_shape(epsilon=eps, sampling_probability=p)
    # 2 artanh(w) = log((1 + w) / (1 - w)); 1 - w without cancellation at large eps.
    lie = np.exp(-eps) / (1 + np.exp(-eps))  # (1 - tanh(eps / 2)) / 2
    w = p * np.tanh(eps / 2)
    with np.errstate(divide="ignore"):
        value = np.log1p(w) - np.log((1 - p) + 2 * p * lie)
        small = 2 * np.arctanh(np.minimum(w, 0.5))
    return np.where(w < 0.5, small, value)[()]


def advanced_joint_convexity(
    shared: Any, first: Any, second: Any, *, rate: float, epsilon: float
) -> tuple[float, float]:
    """The identity at the head of this module, for finite pairs.

    Args:
      shared: mu0, (K,) probabilities.
      first: mu1, (K,).
      second: mu1', (K,).
      rate: r in (0, 1].
      epsilon: eps, >= 0 and finite.

    Returns:
      ``(eps', delta)``: ``eps' = log(1 + r (e^eps - 1))`` and the hockey stick of order
      ``e^eps'`` of ``(1-r) mu0 + r mu1`` against ``(1-r) mu0 + r mu1'``, computed by
      the right-hand side. *Exact* up to rounding.

    Raises:
      ValueError: distributions of different lengths or that do not sum to 1.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    dists = [
        _checked_distribution(name, dist)
        for name, dist in (("shared", shared), ("first", first), ("second", second))
    ]
    if len({dist.shape for dist in dists}) != 1:
        raise ValueError("shared, first and second must have the same length")
    eps, r = _epsilon_and_rate(epsilon, rate)
    if eps.ndim or r.ndim or r == 0 or np.isinf(eps):
        raise ValueError("rate must be one number in (0, 1], epsilon one finite number")
    outer = float(amplified_epsilon(eps, rate=r))
    overlap = np.exp(outer - eps)
    other = (1 - overlap) * dists[0] + overlap * dists[2]
    return outer, float(r * np.maximum(dists[1] - np.exp(eps) * other, 0.0).sum())


def _epsilon_and_rate(epsilon: Any, rate: Any) -> tuple[np.ndarray, np.ndarray]:
    eps = _validation.nonnegative_array("epsilon", epsilon)
    r = _validation.probability_array("rate", rate)
    _validation.broadcast_shape(epsilon=eps, rate=r)
    return eps, r


def finite_epsilon(epsilon: Any) -> np.ndarray:
    """Epsilon checked: nonnegative and finite."""
    eps = _validation.nonnegative_array("epsilon", epsilon)
    if np.isinf(eps).any():
        raise ValueError(f"epsilon must be finite, got {_validation.shown(epsilon)}")
    return eps


def _subset_rate(size: Any, population: Any) -> np.ndarray:
    m = _validation.integer_array("size", size, minimum=0)
    n = _validation.integer_array("population", population, minimum=1)
    _validation.broadcast_shape(size=m, population=n)
    if np.any(m > n):
        raise ValueError(f"size must be at most population, got {size!r} of {n!r}")
    return m / n


def _amplified(epsilon: Any, delta: Any, rate: np.ndarray) -> tuple[Any, Any]:
    one = _validation.probability_array("delta", delta)
    _validation.broadcast_shape(epsilon=epsilon, delta=one, rate=rate)
    eps, one, rate = np.broadcast_arrays(
        _validation.nonnegative_array("epsilon", epsilon), one, rate
    )
    scaled = np.minimum(rate * one * (1 + 1e-15), 1.0)
    return amplified_epsilon(eps, rate=rate), scaled[()]


def _profile_at_rate(mechanism: Profile, rate: np.ndarray, epsilon: Any) -> Any:
    target = finite_epsilon(epsilon)
    _validation.broadcast_shape(rate=rate, epsilon=target)
    drawn = np.where(rate > 0, rate, 1.0)
    inner = np.asarray(unamplified_epsilon(target, rate=drawn))
    value = rate * read_profile(mechanism, inner) * (1 + 1e-15)
    return np.minimum(value, 1.0)[()]


def read_profile(mechanism: Profile, epsilon: np.ndarray) -> np.ndarray:
    """The profile of a mechanism at epsilons, checked."""
    if isinstance(mechanism, Mechanism):
        return np.asarray(mechanism.delta(epsilon))
    if not callable(mechanism):
        raise TypeError(
            "mechanism must be a Mechanism or a function from epsilon to delta, got "
            f"{mechanism!r}"
        )
    return checked_delta(mechanism(epsilon), np.shape(epsilon))


def checked_delta(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """What a profile answered, as probabilities of at least this shape."""
    delta = _validation.probability_array("the profile's delta", value)
    return np.broadcast_to(delta, np.broadcast_shapes(delta.shape, shape))


def _checked_distribution(name: str, value: Any) -> np.ndarray:
    dist = _validation.probability_array(name, value)
    if dist.ndim != 1 or abs(dist.sum() - 1) > 1e-9:
        raise ValueError(f"{name} must be a vector of probabilities that sum to 1")
    return dist
