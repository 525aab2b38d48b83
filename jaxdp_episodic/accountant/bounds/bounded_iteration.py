"""Iteration on a bounded set: a price that stops growing with the number of steps.

Projected noisy gradient descent on a convex set of diameter D. However far back two
runs parted, they are never more than D apart, so only the last ``tau`` steps count:

    rdp(alpha) <= tau S(alpha) + alpha D² / (2 tau (eta sigma_2)²),

where the noise is split, ``sigma² = sigma_1² + sigma_2²``: the first part pays for the
sampled gradients of the last tau steps (S, one step's RDP with sigma_1), the second for
the distance D. After a burn-in the best tau is below the number of steps T and the
bound is constant in T.

*Why a step costs S.* Batches of b out of n are drawn without replacement. Let A be a
batch of other examples, and let the differing one take a random place in it with
probability b/n. At one point the three possible gradient steps, without it, with its
one value and with its other, are within ``2 eta L / b`` of each other; by advanced
joint convexity the pair of mixtures is dominated by that of a sampled Gaussian with
rate ``b/n`` and shift ``2 L / (b sigma_1)``, in both directions. Each branch is a
contraction for convex losses and ``eta <= 2/beta``, so the shift technique carries
the remaining distance along.

Both functions take one ``learning_rate`` and the bounds of the losses as in
`iteration`, and ``diameter``: D >= 0 of the set projected onto, ``inf`` for no
projection. ``noise_std`` is that of every coordinate, in units of the (mean) gradient.
A step that expands is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.bounds.iteration import contraction_factors
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.losses.sampled_gaussian import mixture_excess
from jaxdp_episodic.accountant.numerics.loops import Array

# Shares of the variance tried for the sampled gradients; any share is a bound.
_SHARES = np.linspace(0.1, 0.9, 17)
# The quadrature of method "rdp": 1e-10 relative.
_RULE = MomentRule("symmetric", Quadrature(32, 16))
# Numbers of last steps tried, on a logarithmic grid; any number is a bound.
_CANDIDATES = 512


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
    """RDP slope of full-batch noisy gradient descent that releases its last iterate.

    A step is ``theta <- P(theta - eta (mean gradient + N(0, sigma² I)))``, P the
    projection onto a convex set of the given diameter. Over the last tau steps the
    distance ``D c^tau + s (1 + c + … + c^{tau-1})``, ``s = 2 eta L / n``, is paid for
    in the best parts:

        rho = min_tau (D c^tau + s sum_i c^i)² / (2 (eta sigma)² sum_i c^{2i})

    or, over all T steps from the same start, the same without D. At c = 1 that is the
    smaller of composition, ``2 T L² / (n sigma)²``, and about ``4 D L / (n eta
    sigma²)``, from ``T = 2 D n / (eta L)`` steps on.

    ``num_steps`` T >= 0 and ``num_examples`` n >= 1 are whole numbers, ``noise_std`` is
    sigma >= 0; these broadcast.

    Returns:
      float64 of the broadcast shape: RDP is ``rho alpha`` at every order, under
      ``replace_one``. *Upper bound*; ``inf`` without noise, 0 without steps.

    Reference: Altschuler and Talwar (2022), "Privacy of noisy stochastic gradient
    descent: more iterations without more privacy loss", arXiv:2205.13710 (the idea and
    the rate); the constants by Theorem 22 of Feldman et al. (2018), arXiv:1808.06651.
    """
    steps = _validation.integer_array("num_steps", num_steps, minimum=0)
    n = _validation.integer_array("num_examples", num_examples, minimum=1)
    sigma = _validation.nonnegative_array("noise_std", noise_std)
    _validation.broadcast_shape(num_steps=steps, num_examples=n, noise_std=sigma)
    eta, bound, span, c = _scalars(
        learning_rate, lipschitz, smoothness, strong_convexity, diameter
    )
    steps, n, sigma = np.broadcast_arrays(steps, n, sigma)
    part = 2 * bound / n  # s / eta
    tau = _last_steps(steps, span / eta / part)
    window = np.concatenate([tau, np.maximum(steps, 1)[..., None]], axis=-1)
    far = np.where(np.arange(window.shape[-1]) < tau.shape[-1], span / eta, 0.0)
    once, twice = _geometric(c, window), _geometric(c * c, window)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        carried = np.where(far > 0, far * c**window, 0.0)
        carried = np.where(np.isnan(carried), np.inf, carried)  # inf * 0
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
    """RDP of noisy SGD with random batches on a bounded set, last iterate only.

    ``min(T S_sigma(alpha), min_{tau <= T, split} tau S_{sigma_1}(alpha) + alpha D² /
    (2 tau (eta sigma_2)²))``; see the head of this module.

    ``orders`` are (K,) each > 1, ``num_steps`` whole numbers T >= 0 of any shape,
    ``num_examples`` n and ``batch_size`` b in [1, n] whole numbers, ``noise_std`` is
    sigma > 0. Batches are drawn without replacement, fresh and secret. Strong convexity
    is allowed, and not used.

    Returns:
      float64 nats of shape ``num_steps.shape + (K,)``; an *upper bound* under
      ``replace_one``, constant in T after the burn-in.

    Reference: Altschuler and Talwar (2022), arXiv:2205.13710, Theorem 3.1 and its
    proof, with the split of the noise and tau optimised.
    """
    alpha = _validation.order_array("orders", orders)
    if alpha.ndim != 1:
        raise ValueError(f"orders must be a vector, got shape {alpha.shape}")
    steps = _validation.integer_array("num_steps", num_steps, minimum=0)
    n = int(_validation.integer_array("num_examples", num_examples, minimum=1))
    b = int(_validation.integer_array("batch_size", batch_size, minimum=1))
    if b > n:
        raise ValueError(f"batch_size must be at most num_examples = {n}, got {b}")
    sigma = float(_validation.positive_array("noise_std", noise_std))
    eta, bound, span, _ = _scalars(
        learning_rate, lipschitz, smoothness, strong_convexity, diameter
    )
    shift = 2 * bound / (b * sigma)
    shares = np.append(_SHARES, 1.0)[:, None]
    grid = np.broadcast_arrays(alpha - 1, b / n, shift / np.sqrt(shares))
    log_excess = _swapped_excess(*(a.ravel() for a in grid)).reshape(grid[0].shape)
    one_step = np.logaddexp(0.0, log_excess) / (alpha - 1)  # (shares, K)
    composed = steps[..., None] * one_step[-1]
    if np.isinf(span):
        return composed
    far = alpha * span**2 / (2 * (eta * sigma) ** 2 * (1 - _SHARES[:, None]))
    cost = one_step[:-1]
    with np.errstate(divide="ignore", over="ignore"):
        best = np.sqrt(far / cost)
    most = np.maximum(steps, 1)[..., None, None]
    bounds = [
        tau * cost + far / tau
        for tau in (np.clip(f(best), 1, most) for f in (np.floor, np.ceil))
    ]
    settled = np.minimum(*bounds).min(axis=-2)
    return np.where(steps[..., None] > 0, np.minimum(composed, settled), 0.0)


def _swapped_kernel(t: Array, rate: Array, shift: Array) -> Array:
    """Log-excess of the sampled Gaussian pair, both profiles the forward one."""
    return mixture_excess(t, rate, shift, _RULE)[0]


_swapped_excess = float64_boundary(_swapped_kernel)


def _scalars(
    learning_rate: Any,
    lipschitz: Any,
    smoothness: Any,
    strong_convexity: Any,
    diameter: Any,
) -> tuple[float, float, float, float]:
    """Learning rate, Lipschitz bound, diameter and contraction factor, checked."""
    factor = contraction_factors(
        learning_rate, smoothness=smoothness, strong_convexity=strong_convexity
    )
    bound = _validation.positive_array("lipschitz", lipschitz)
    span = _validation.nonnegative_array("diameter", diameter)
    if factor.ndim or bound.ndim or span.ndim:
        raise ValueError(
            "learning_rate, lipschitz, smoothness, strong_convexity and diameter must "
            "be numbers"
        )
    return float(learning_rate), float(bound), float(span), float(factor)


def _last_steps(steps: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Candidates for tau up to T, on a last axis: a grid, the optimum at c = 1."""
    most = np.maximum(steps, 1)[..., None].astype(np.float64)
    share = np.linspace(0.0, 1.0, _CANDIDATES)
    grid = np.rint(most**share)
    around = np.stack([np.floor(best), np.ceil(best)], axis=-1)
    return np.concatenate([grid, np.clip(around, 1, most)], axis=-1)


def _geometric(c: float, count: np.ndarray) -> np.ndarray:
    """``1 + c + … + c^{count-1}``."""
    if c == 1:
        return np.asarray(count, np.float64)
    if c == 0:
        return np.ones(count.shape)
    return np.expm1(count * np.log(c)) / np.expm1(np.log(c))
