"""Amplification by iteration: steps that follow hide the steps before.

Noisy gradient descent releases its *last* iterate only. For convex losses that are
smooth, a gradient step of length at most 2 / smoothness does not expand distances; a
difference made by one example can only shrink on its way, while noise is added at
every step. The shift technique of Feldman, Mironov, Talwar and Thakurta turns that into
Rényi-DP: a difference ``s`` made at step t may be paid for in parts ``a_t, …, a_T`` at
the steps that follow,

    rdp(alpha) = alpha sum_i a_i² / (2 w_i),     w_i = (eta_i sigma_i)²,

if the parts add up once each is carried to the end. The best parts (Cauchy-Schwarz)
give, with ``C_i`` the product of the contraction factors after step i,

    rho_t = (s_t C_t)² / (2 sum_{i >= t} w_i C_i²),     rdp(alpha) = rho_t alpha.

A run on ``replace_one`` neighbours makes ``s_t = 2 eta_t L / b``: two gradients of norm
at most L, averaged over b examples. All ``rho`` here are such slopes (zero-concentrated
DP): they bound the RDP at every order.

What several functions, and those of `bounded_iteration`, take:

* ``learning_rates``: (T,) eta_t, each in (0, 2 / smoothness];
* ``noise_stds``: (T,) sigma_t >= 0 of every coordinate, in units of the gradient; a
  scalar is repeated;
* ``lipschitz``: L > 0: every gradient of every loss has norm at most L (clipping a
  gradient gives that, but not convexity);
* ``smoothness``: beta > 0: the gradient of every loss is beta-Lipschitz;
* ``strong_convexity``: m >= 0 of every loss; 0 for losses that are convex and no more.
  There is no way to say "not convex": the theorems do not hold there;
* ``batch_size``: b, whole number >= 1.

A step that expands, lengths that disagree and more convexity than smoothness are
errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.releases import ZeroConcentratedDP
from jaxdp_episodic.accountant.questions.api import epsilon

# Smallest normal number: what underflows is rounded up to it.
_TINY = float(np.finfo(np.float64).tiny)


class _OnePass(NamedTuple):
    """Checked settings of a one-pass run; every array is (T,)."""

    learning_rates: np.ndarray
    noise_stds: np.ndarray
    sensitivities: np.ndarray
    factors: np.ndarray


def contraction_factors(
    learning_rates: Any, *, smoothness: Any, strong_convexity: Any
) -> np.ndarray:
    """How much a gradient step contracts: ``max(|1 - eta m|, |1 - eta beta|)``.

    Returns:
      float64 of the broadcast shape, in [0, 1].

    Reference: Feldman, Mironov, Talwar and Thakurta (2018), arXiv:1808.06651,
    Proposition 18 (m = 0); Nesterov (2004), Theorem 2.1.12.
    """
    eta = _validation.positive_array("learning_rates", learning_rates)
    beta = _validation.positive_array("smoothness", smoothness)
    m = _validation.nonnegative_array("strong_convexity", strong_convexity)
    _validation.broadcast_shape(learning_rates=eta, smoothness=beta, strong_convexity=m)
    if np.any(m > beta):
        raise ValueError("strong_convexity must be at most smoothness")
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
    """RDP slope of every position of a one-pass run that releases its last iterate.

    Step t is ``theta <- P(theta - eta_t (mean gradient + N(0, sigma_t² I)))``, the mean
    over batch t, P any projection onto a convex set; every example is used in exactly
    one step.

    Returns:
      (T,) rho_t of the examples of batch t under ``replace_one``: RDP is ``rho_t
      alpha`` at every order. *Upper bound*; ``inf`` where no noise follows. With
      constant steps and noise it is ``2 L² / (b² sigma² (T + 1 - t))``.

    Reference: Feldman, Mironov, Talwar and Thakurta (2018), "Privacy amplification by
    iteration", arXiv:1808.06651, Theorems 22 and 23 (equal noise); here for steps,
    noise and contraction that vary, by the same theorem with the best parts.
    """
    run = _one_pass(
        learning_rates, noise_stds, lipschitz, smoothness, strong_convexity, batch_size
    )
    # V_t = sum_{i >= t} w_i (C_i / C_t)², backwards: nothing underflows.
    noise = (run.learning_rates * run.noise_stds) ** 2
    total = np.empty_like(noise)
    later = 0.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for t in range(len(noise) - 1, -1, -1):
            total[t] = noise[t] + later
            later = total[t] / run.factors[t] ** 2 if total[t] > 0 else 0.0
        rho = run.sensitivities**2 / (2 * total)
    return np.maximum(rho * (1 + 1e-14 * len(noise)), _TINY)


def final_variance(
    *,
    learning_rates: Any,
    noise_stds: Any,
    smoothness: float,
    strong_convexity: float,
) -> float:
    """Variance a coordinate of the last iterate, if every step contracts the most.

    ``sum_i w_i C_i²``, the noise of all steps carried to the end: what a schedule costs
    in accuracy. An *upper bound* for maps that contract no less.

    Returns:
      The variance, squared units of the parameters.
    """
    run = _one_pass(learning_rates, noise_stds, 1.0, smoothness, strong_convexity, 1)
    after = np.append(np.cumprod(run.factors[::-1])[::-1][1:], 1.0)
    return float(np.sum((run.learning_rates * run.noise_stds * after) ** 2))


def optimal_noise_stds(
    rho: Any,
    *,
    learning_rates: Any,
    lipschitz: float,
    smoothness: float,
    strong_convexity: float,
    batch_size: int = 1,
) -> np.ndarray:
    """The schedule of noise that keeps every position within ``rho`` at least cost.

    "Less noise early", worked out: position t needs ``U_t = sum_{i >= t} w_i C_i² >=
    (s_t C_t)² / (2 rho_t)``. The smallest suffix sums that decrease in t are the
    running maxima of the right-hand side from the end, which is the schedule. They are
    smallest at every t at once, hence also the final variance ``U_1``.

    With one target and steps that do not shrink, *all noise goes into the last step*:
    what is optimal is to perturb the output.

    ``rho`` is the target slope, > 0, a scalar or (T,), one a position.

    Returns:
      (T,) noise_stds, rounded up: `one_pass_rho` of them is within ``rho``. *Optimal*
      for the bound of `one_pass_rho`, under ``replace_one``.

    Raises:
      ValueError: contraction so strong that the schedule leaves the range of float64.

    Reference: the bound is Feldman et al. (2018), arXiv:1808.06651, Theorem 22; the
    idea of less noise early is the lecture's.
    """
    run = _one_pass(
        learning_rates, 1.0, lipschitz, smoothness, strong_convexity, batch_size
    )
    target = _validation.positive_array("rho", rho)
    if target.ndim and target.shape != run.learning_rates.shape:
        raise ValueError(f"rho must be a scalar or of shape {run.factors.shape}")
    after = np.append(np.cumprod(run.factors[::-1])[::-1][1:], 1.0)
    if np.any(after < 1e-140):
        raise ValueError(
            "strong_convexity contracts the first steps by more than 1e140: their "
            "noise is beyond float64; start the run later"
        )
    needed = (run.sensitivities * after) ** 2 / (2 * target)
    suffix = np.maximum.accumulate(needed[::-1])[::-1]
    share = suffix - np.append(suffix[1:], 0.0)
    rounding = 1 + 1e-13 * len(share)
    return np.sqrt(share * rounding) / (after * run.learning_rates)


def rho_to_epsilon(rho: Any, *, delta: Any) -> Any:
    """Epsilon of an RDP curve ``rho alpha`` at a delta, at the best real order.

    For rho >= 0, ``inf`` included, and delta in (0, 1); nats, an *upper bound*
    (whatever order the search ends on is valid).

    Reference: Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    slope = _validation.nonnegative_array("rho", rho)
    small = _validation.open_unit_array("delta", delta)
    _validation.broadcast_shape(rho=slope, delta=small)
    return epsilon(ZeroConcentratedDP(slope), delta=small, num_steps=1, method="rdp")


def _one_pass(
    learning_rates: Any,
    noise_stds: Any,
    lipschitz: Any,
    smoothness: Any,
    strong_convexity: Any,
    batch_size: Any,
) -> _OnePass:
    """Checks the settings of a run."""
    factors = contraction_factors(
        learning_rates, smoothness=smoothness, strong_convexity=strong_convexity
    )
    eta = _validation.positive_array("learning_rates", learning_rates)
    if eta.ndim != 1 or eta.size == 0:
        raise ValueError(f"learning_rates must be a vector, got shape {eta.shape}")
    sigma = _validation.nonnegative_array("noise_stds", noise_stds)
    if sigma.shape not in ((), eta.shape):
        raise ValueError(
            f"noise_stds must be a scalar or of shape {eta.shape}, got {sigma.shape}"
        )
    bound = _validation.positive_array("lipschitz", lipschitz)
    size = _validation.integer_array("batch_size", batch_size, minimum=1)
    if bound.ndim or size.ndim or factors.shape != eta.shape:
        raise ValueError(
            "lipschitz, batch_size, smoothness and strong_convexity must be numbers"
        )
    return _OnePass(
        eta, np.broadcast_to(sigma, eta.shape), 2 * eta * bound / size, factors
    )
