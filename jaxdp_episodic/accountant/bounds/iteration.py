"""Privacy amplification by iteration: later steps hide the data of earlier steps.

docs/amplification.md summarizes the theorems. Arguments of several functions:

* ``learning_rates``: (T,) eta_t, each in (0, 2 / smoothness];
* ``noise_stds``: (T,) sigma_t >= 0, the standard deviation in every coordinate, in
  units of the gradient; a scalar holds for all steps;
* ``lipschitz``: L > 0, a bound of the norm of every gradient of every loss (clipping
  ensures it, but does not make a loss convex);
* ``smoothness``: beta > 0, a Lipschitz constant of the gradient of every loss;
* ``strong_convexity``: m >= 0 of every loss; 0 for losses that are only convex. The
  theorems do not hold for losses that are not convex;
* ``batch_size``: b, whole number >= 1;
* ``learning_rate`` and ``noise_std``: the same in all steps;
* ``diameter``: D >= 0 of the convex set of the projection, ``inf`` for no projection.

`ValueError` is raised for a step that expands distances, for lengths that disagree, and
for ``strong_convexity`` above ``smoothness``. Every ``rho`` is a slope: RDP is at most
``rho alpha`` at every order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import TINY, checked, checked_one
from jaxdp_episodic.accountant.describe.designs import WithoutReplacement
from jaxdp_episodic.accountant.describe.releases import ZeroConcentratedDP
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon, rdp

# Shares of the variance for the sampled gradients; each share gives a valid bound.
_SHARES = np.linspace(0.1, 0.9, 17)
# Size of the logarithmic grid of numbers of last steps; each gives a valid bound, and
# for 1e9 steps the smallest is at most 2e-5 above that of all.
_CANDIDATES = 2048
# Arguments of one pass, and of noisy gradient descent on a bounded set.
_ARRAYS = ("learning_rates", "noise_stds", "smoothness", "strong_convexity")
_SCALARS = ("learning_rate", "lipschitz", *_ARRAYS[2:], "diameter")


def contraction_factors(
    learning_rates: Any, *, smoothness: Any, strong_convexity: Any
) -> np.ndarray:
    """Returns by what factor a gradient step contracts distances.

    ``max(|1 - eta m|, |1 - eta beta|)``, float64 of the broadcast shape, in [0, 1].

    Reference: Feldman, Mironov, Talwar and Thakurta (2018), arXiv:1808.06651,
    Proposition 18 (m = 0); Nesterov (2004), Theorem 2.1.12.
    """
    eta, beta, m = checked(
        learning_rates=learning_rates,
        smoothness=smoothness,
        strong_convexity=strong_convexity,
    )
    if np.any(m > beta):
        raise ValueError(f"strong_convexity must be <= smoothness, got {m} and {beta}")
    if np.any(eta * beta > 2):
        raise ValueError(
            f"learning_rates must be at most 2 / smoothness, got {eta.max():g} with "
            f"smoothness {beta.max():g}: a longer step expands distances and the "
            "theorem does not hold"
        )
    return np.maximum(np.abs(1 - eta * m), np.abs(1 - eta * beta))


def one_pass_rho(
    *,
    learning_rates: Any,
    noise_stds: Any,
    lipschitz: float,
    smoothness: float,
    strong_convexity: float,
    batch_size: int = 1,
) -> np.ndarray:
    """Returns the RDP slope of each batch of a one-pass run, last iterate only.

    Step t is ``theta <- P(theta - eta_t (mean gradient + N(0, sigma_t² I)))``. The mean
    is over batch t, and P is any projection onto a convex set. Every example is used in
    exactly one step; only the last iterate is released.

    Returns:
      (T,) rho_t of the examples of batch t under ``replace_one``. *Upper bound*;
      ``inf`` if no noise follows.

    Reference: Feldman, Mironov, Talwar and Thakurta (2018), "Privacy amplification by
    iteration", arXiv:1808.06651, Theorems 22 and 23 (equal noise), with the best split.
    """
    eta, sigma, sensitivities, factors = _one_pass(
        *(learning_rates, noise_stds, smoothness, strong_convexity),
        lipschitz=lipschitz,
        batch_size=batch_size,
    )
    # V_t = sum_{i >= t} w_i (C_i / C_t)², backwards so that nothing underflows.
    noise = (eta * sigma) ** 2
    total = np.empty_like(noise)
    later = 0.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for t in range(len(noise) - 1, -1, -1):
            total[t] = noise[t] + later
            later = total[t] / factors[t] ** 2 if total[t] > 0 else 0.0
        rho = sensitivities**2 / (2 * total)
    return np.maximum(rho * (1 + 1e-14 * len(noise)), TINY)


def final_variance(
    *, learning_rates: Any, noise_stds: Any, smoothness: float, strong_convexity: float
) -> float:
    """Returns the variance of a coordinate of the last iterate: a schedule's noise.

    In squared units of the parameters. *Exact* for maps that contract by
    `contraction_factors`, an *upper bound* for maps that contract more.
    """
    eta, sigma, _, factors = _one_pass(
        learning_rates, noise_stds, smoothness, strong_convexity
    )
    after = np.append(np.cumprod(factors[::-1])[::-1][1:], 1.0)
    return float(np.sum((eta * sigma * after) ** 2))


def optimal_noise_stds(
    rho: Any,
    *,
    learning_rates: Any,
    lipschitz: float,
    smoothness: float,
    strong_convexity: float,
    batch_size: int = 1,
) -> np.ndarray:
    """Returns the noise schedule of least final variance that keeps batches in ``rho``.

    ``rho`` is the target slope, > 0, a scalar or (T,), one per batch. With one target
    and learning rates that do not decrease, *all noise goes into the last step*.

    Returns:
      (T,) noise_stds, rounded up, so that `one_pass_rho` of them is at most ``rho``.
      *Optimal* for the bound of `one_pass_rho`, under ``replace_one``.

    Raises:
      ValueError: contraction so strong that the noise is outside the range of float64.

    Reference: Feldman et al. (2018), arXiv:1808.06651, Theorem 22, for the bound.
    """
    eta, _, sensitivities, factors = _one_pass(
        *(learning_rates, 1.0, smoothness, strong_convexity),
        lipschitz=lipschitz,
        batch_size=batch_size,
    )
    target = _validation.positive_array("rho", rho)
    if target.ndim and target.shape != eta.shape:
        raise ValueError(f"rho must be a scalar or of shape {factors.shape}")
    after = np.append(np.cumprod(factors[::-1])[::-1][1:], 1.0)
    if np.any(after < 1e-140):
        raise ValueError(
            "strong_convexity contracts the first steps by more than 1e140: their "
            "noise is beyond float64; start the run later"
        )
    # Batch t needs U_t = sum_{i >= t} w_i C_i² >= (s_t C_t)² / (2 rho_t). The smallest
    # suffix sums that decrease in t are the running maxima, taken from the end.
    needed = (sensitivities * after) ** 2 / (2 * target)
    suffix = np.maximum.accumulate(needed[::-1])[::-1]
    share = suffix - np.append(suffix[1:], 0.0)
    rounding = 1 + 1e-13 * len(share)
    return np.sqrt(share * rounding) / (after * eta)


def rho_to_epsilon(rho: Any, *, delta: Any) -> Any:
    """Returns epsilon of the RDP curve ``rho alpha`` at a delta, by the best order.

    For rho >= 0 or ``inf``, and delta in (0, 1). Nats; an *upper bound*.

    Reference: Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    slope, small = checked(rho=rho, delta__inside=delta)
    return epsilon(ZeroConcentratedDP(slope), delta=small, num_steps=1, method="rdp")


def full_batch_rho(
    *,
    num_steps: Any,
    num_examples: Any,
    learning_rate: float,
    noise_std: Any,
    lipschitz: float,
    smoothness: float,
    strong_convexity: float,
    diameter: float,
) -> Any:
    """Returns the RDP slope of full-batch noisy gradient descent, last iterate only.

    A step is ``theta <- P(theta - eta (mean gradient + N(0, sigma² I)))``, with the
    projection P onto a convex set of the given diameter. The noise of the last tau
    steps hides what is left of their start's distance. With ``s = 2 eta L / n``

        rho = min_tau (D c^tau + s sum_i c^i)² / (2 (eta sigma)² sum_i c^{2i}).

    Over all T steps from the same start the same holds without D.

    ``num_steps`` T >= 0 and ``num_examples`` n >= 1 are whole numbers, ``noise_std`` is
    sigma >= 0; these broadcast.

    Returns:
      float64 of the broadcast shape, under ``replace_one``. *Upper bound*; ``inf``
      without noise, 0 without steps.

    Reference: Altschuler and Talwar (2022), arXiv:2205.13710 (the idea and the rate);
    the constants by Theorem 22 of Feldman et al. (2018), arXiv:1808.06651.
    """
    steps, n, sigma = checked(
        num_steps=num_steps, num_examples=num_examples, noise_std=noise_std
    )
    eta, bound, span, c = _scalars(
        learning_rate, lipschitz, smoothness, strong_convexity, diameter
    )
    part = 2 * bound / n  # s / eta
    # Numbers tau of last steps, last axis; and all T, from the same start.
    most = np.maximum(steps, 1)[..., None]
    grid = np.rint(most.astype(np.float64) ** np.linspace(0.0, 1.0, _CANDIDATES))
    window = np.concatenate([grid, most], axis=-1)
    far = np.append(np.full(_CANDIDATES, span / eta), 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        once, twice = _geometric(c, window), _geometric(c * c, window)
        carried = np.nan_to_num(far * c**window, nan=np.inf, posinf=np.inf)  # inf * 0
        distance = carried + part[..., None] * once
        rho = np.min(distance**2 / (2 * twice), axis=-1) / sigma**2
    rho = np.where(sigma > 0, rho * (1 + 1e-12), np.inf)
    return np.where(steps > 0, rho, 0.0)[()]


def bounded_iteration_rdp(
    *,
    orders: Any,
    num_steps: Any,
    num_examples: int,
    batch_size: int,
    learning_rate: float,
    noise_std: float,
    lipschitz: float,
    smoothness: float,
    strong_convexity: float,
    diameter: float,
) -> np.ndarray:
    """Returns the RDP of noisy SGD on a bounded set, last iterate only.

    ``orders`` are (K,), each > 1; ``num_steps`` are whole numbers T >= 0 of any shape;
    ``num_examples`` n and ``batch_size`` b in [1, n] are whole numbers; ``noise_std``
    is sigma > 0. Batches are sampled without replacement, fresh and secret. Strong
    convexity is accepted and not used.

    Returns:
      float64 nats of shape ``num_steps.shape + (K,)``; an *upper bound* under
      ``replace_one`` that no longer grows after some T.

    Reference: Altschuler and Talwar (2022), arXiv:2205.13710, Theorem 3.1, with the
    split of the noise and tau optimised; docs/amplification.md.
    """
    alpha = _validation.order_array("orders", orders)
    if alpha.ndim != 1:
        raise ValueError(f"orders must be a vector, got shape {alpha.shape}")
    (steps,) = checked(num_steps=num_steps)
    n, b, sigma = checked_one(
        num_examples=num_examples, batch_size=batch_size, noise_std__positive=noise_std
    )
    if b > n:
        raise ValueError(f"batch_size must be at most num_examples = {n:g}, got {b:g}")
    eta, bound, span, _ = _scalars(
        learning_rate, lipschitz, smoothness, strong_convexity, diameter
    )
    step = GaussianStep(
        WithoutReplacement("example", size=b, population=n),
        noise_multiplier=b * sigma / bound * np.sqrt(np.append(_SHARES, 1.0)),
        neighboring_relation="replace_one",
    )
    one_step = np.asarray(rdp(step, alpha))  # (shares, K)
    cost, times = one_step[:-1], steps[..., None]
    most = np.maximum(times, 1)[..., None]
    # Where a step costs inf, so do all; inf - inf and inf * 0 are no bounds.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        composed = np.where(times > 0, times * one_step[-1], 0.0)
        far = alpha * span**2 / (2 * (eta * sigma) ** 2 * (1 - _SHARES[:, None]))
        best = np.sqrt(far / cost)
        bounds = [
            tau * cost + far / tau
            for tau in (np.clip(f(best), 1, most) for f in (np.floor, np.ceil))
        ]
        settled = np.fmin(*bounds).min(axis=-2)
    return np.fmin(composed, np.where(times > 0, settled, 0.0))


def _one_pass(
    *arrays: Any, lipschitz: Any = 1.0, batch_size: Any = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns learning rates, noise, sensitivities and contraction factors, (T,)."""
    eta, sigma, beta, m = checked(**dict(zip(_ARRAYS, arrays, strict=True)))
    shape = np.shape(arrays[0])
    if len(shape) != 1 or shape == (0,):
        raise ValueError(f"learning_rates must be a vector, got shape {shape}")
    if eta.shape != shape:
        raise ValueError(
            "noise_stds, smoothness and strong_convexity must be numbers or of shape "
            f"{shape}, got an array of {eta.shape}"
        )
    factors = contraction_factors(eta, smoothness=beta, strong_convexity=m)
    bound, size = checked_one(lipschitz=lipschitz, batch_size=batch_size)
    return eta, sigma, 2 * eta * bound / size, factors


def _scalars(*scalars: Any) -> tuple[float, float, float, float]:
    """Returns learning rate, Lipschitz bound, diameter and contraction factor."""
    named = dict(zip(_SCALARS, scalars, strict=True))
    eta, bound, beta, m, span = checked_one(**named)
    factor = contraction_factors(eta, smoothness=beta, strong_convexity=m)
    return eta, bound, span, float(factor)


def _geometric(c: float, count: np.ndarray) -> np.ndarray:
    """Returns ``1 + c + … + c^{count-1}``."""
    if c == 1:
        return np.asarray(count, np.float64)
    return np.expm1(count * np.log(c)) / np.expm1(np.log(c))
