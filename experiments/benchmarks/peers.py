"""Other accountants, each behind the same call, and the loop that times them.

Each maker imports its package, which may be missing, and returns a function of one
setting. The calls are the ones that the packages document.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

DELTA = 1e-5
NUM_STEPS = 1_000


def dp_accounting_epsilon() -> Callable[[float, float], float]:
    """Epsilon by dp-accounting with its default orders."""
    from dp_accounting import dp_event, rdp

    def epsilon(sampling_probability: float, noise_multiplier: float) -> float:
        gaussian = dp_event.GaussianDpEvent(noise_multiplier)
        event = dp_event.PoissonSampledDpEvent(sampling_probability, gaussian)
        return rdp.RdpAccountant().compose(event, NUM_STEPS).get_epsilon(DELTA)

    return epsilon


def opacus_epsilon() -> Callable[[float, float], float]:
    """Epsilon by opacus' analysis module with its accountant's default orders."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = RDPAccountant.DEFAULT_ALPHAS

    def epsilon(sampling_probability: float, noise_multiplier: float) -> float:
        curve = rdp.compute_rdp(
            q=sampling_probability,
            noise_multiplier=noise_multiplier,
            steps=NUM_STEPS,
            orders=orders,
        )
        return float(rdp.get_privacy_spent(orders=orders, rdp=curve, delta=DELTA)[0])

    return epsilon


def autodp_epsilon() -> Callable[[float, float], float]:
    """Epsilon by autodp with its tight bound for Poisson sampling."""
    from autodp.mechanism_zoo import GaussianMechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    def epsilon(sampling_probability: float, noise_multiplier: float) -> float:
        sampled = AmplificationBySampling(PoissonSampling=True)(
            GaussianMechanism(sigma=noise_multiplier),
            sampling_probability,
            improved_bound_flag=True,
        )
        return float(Composition()([sampled], [NUM_STEPS]).get_approxDP(DELTA))

    return epsilon


def dp_accounting_noise() -> Callable[[float, float, int], float]:
    """Noise by ``dp_accounting.calibrate_dp_mechanism``, to its default 1e-6."""
    import dp_accounting
    from dp_accounting import dp_event, rdp

    def noise(sampling_probability: float, epsilon: float, num_steps: int) -> float:
        def event(noise_multiplier: float) -> dp_event.DpEvent:
            gaussian = dp_event.GaussianDpEvent(noise_multiplier)
            one = dp_event.PoissonSampledDpEvent(sampling_probability, gaussian)
            return dp_event.SelfComposedDpEvent(one, num_steps)

        found = dp_accounting.calibrate_dp_mechanism(
            rdp.RdpAccountant, event, epsilon, DELTA
        )
        return float(found)

    return noise


def opacus_noise() -> Callable[[float, float, int], float]:
    """Noise by ``opacus.accountants.utils.get_noise_multiplier``, epsilon to 0.01."""
    from opacus.accountants.utils import get_noise_multiplier

    def noise(sampling_probability: float, epsilon: float, num_steps: int) -> float:
        return get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=sampling_probability,
            steps=num_steps,
            accountant="rdp",
        )

    return noise


EPSILON_PEERS = {
    "dp-accounting": dp_accounting_epsilon,
    "opacus": opacus_epsilon,
    "autodp": autodp_epsilon,
}
NOISE_PEERS = {"dp-accounting": dp_accounting_noise, "opacus": opacus_noise}


def run_peers(
    makers: dict[str, Callable[[], Callable[..., float]]],
    settings: list[tuple[Any, ...]],
    ours: np.ndarray,
) -> dict[str, dict[str, Any]]:
    """Times every peer once over the settings, and compares its answers with ours.

    Args:
      makers: a function for each peer that returns its call.
      settings: the arguments of the calls.
      ours: our answers, one a setting, each > 0.

    Returns:
      For each peer its times in seconds, the settings it fails in, and how far above
      ours its answers are; or why it was skipped.
    """
    # A line for each order that a peer leaves out, and for each grid that is too short.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, Any]] = {}
    for name, maker in makers.items():
        try:
            call = maker()
        except ImportError as error:
            results[name] = {"skipped": f"cannot be imported ({error})"}
        else:
            results[name] = _run_peer(call, settings, ours)
    return results


def summary(values: Any) -> dict[str, float] | None:
    """Smallest, median and largest value; None if there is no value."""
    values = np.asarray(values)
    if values.size == 0:
        return None
    smallest, median, largest = np.quantile(values, (0.0, 0.5, 1.0))
    return {
        "smallest": float(smallest),
        "median": float(median),
        "largest": float(largest),
    }


def _run_peer(
    call: Callable[..., float], settings: list[tuple[Any, ...]], ours: np.ndarray
) -> dict[str, Any]:
    """One peer's loop over the settings, after one call that is not timed."""
    with suppress(Exception):  # if it fails it is counted below
        call(*settings[0])
    seconds, answers = [], []
    for setting in settings:
        start = time.perf_counter()
        try:
            answers.append(call(*setting))
        except Exception:  # whatever a peer raises: it has no answer here
            answers.append(np.nan)
        seconds.append(time.perf_counter() - start)
    excess = np.asarray(answers) / ours - 1
    good = np.isfinite(excess)
    return {
        "num_settings": len(settings),
        "total_seconds": sum(seconds),
        "median_seconds": float(np.median(seconds)),
        "largest_seconds": max(seconds),
        "num_failed": int((~good).sum()),
        "relative_excess": summary(excess[good]),
    }
