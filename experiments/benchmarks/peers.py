"""Other accountants, each behind the same call, and the loop that times them.

Each maker imports its package, which may be missing, and returns a function of one
setting. The calls are the ones that the packages document.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from harness import Rows, spread

DELTA = 1e-5
Call = Callable[..., float]


def dp_accounting_rdp() -> Call:
    """Epsilon by dp-accounting with its default orders."""
    from dp_accounting import dp_event, rdp

    def epsilon(rate: float, noise: float, num_steps: int) -> float:
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        return rdp.RdpAccountant().compose(event, num_steps).get_epsilon(DELTA)

    return epsilon


def opacus_rdp() -> Call:
    """Epsilon by opacus' analysis module with its accountant's default orders."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = RDPAccountant.DEFAULT_ALPHAS

    def epsilon(rate: float, noise: float, num_steps: int) -> float:
        question: dict[str, Any] = {"noise_multiplier": noise, "steps": num_steps}
        curve = rdp.compute_rdp(q=rate, orders=orders, **question)
        return float(rdp.get_privacy_spent(orders=orders, rdp=curve, delta=DELTA)[0])

    return epsilon


def autodp_rdp() -> Call:
    """Epsilon by autodp with its tight bound for Poisson sampling."""
    from autodp.mechanism_zoo import GaussianMechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    def epsilon(rate: float, noise: float, num_steps: int) -> float:
        sampled = AmplificationBySampling(PoissonSampling=True)(
            GaussianMechanism(sigma=noise), rate, improved_bound_flag=True
        )
        return float(Composition()([sampled], [num_steps]).get_approxDP(DELTA))

    return epsilon


def dp_accounting_noise() -> Call:
    """Noise by ``dp_accounting.calibrate_dp_mechanism``, to its default 1e-6."""
    import dp_accounting
    from dp_accounting import dp_event, rdp

    def noise(rate: float, epsilon: float, num_steps: int) -> float:
        def event(noise_multiplier: float) -> dp_event.DpEvent:
            gaussian = dp_event.GaussianDpEvent(noise_multiplier)
            one = dp_event.PoissonSampledDpEvent(rate, gaussian)
            return dp_event.SelfComposedDpEvent(one, num_steps)

        search = dp_accounting.calibrate_dp_mechanism
        return float(search(rdp.RdpAccountant, event, epsilon, DELTA))

    return noise


def opacus_noise() -> Call:
    """Noise by ``opacus.accountants.utils.get_noise_multiplier``, epsilon to 0.01."""
    from opacus.accountants.utils import get_noise_multiplier

    def noise(rate: float, epsilon: float, num_steps: int) -> float:
        target: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": DELTA}
        return get_noise_multiplier(
            **target, sample_rate=rate, steps=num_steps, accountant="rdp"
        )

    return noise


def dp_accounting_pld() -> Call:
    """Epsilon by dp-accounting's privacy-loss distributions (pessimistic, 1e-4)."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    def epsilon(rate: float, noise: float, num_steps: int, delta: float) -> float:
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        return PLDAccountant().compose(event, num_steps).get_epsilon(delta)

    return epsilon


def prv_accountant() -> Call:
    """Epsilon by prv-accountant: the estimate between its bounds.

    Its errors are those that its documentation names, 0.1 in epsilon and delta / 1000.
    """
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant  # pyright: ignore[reportMissingImports]

    def epsilon(rate: float, noise: float, num_steps: int, delta: float) -> float:
        step = PoissonSubsampledGaussianMechanism(
            sampling_probability=rate, noise_multiplier=noise
        )
        accountant = PRVAccountant(
            prvs=[step],
            max_self_compositions=[num_steps],
            eps_error=0.1,
            delta_error=delta / 1_000,
        )
        ask = accountant.compute_epsilon
        return float(ask(delta=delta, num_self_compositions=[num_steps])[1])

    return epsilon


EPSILON = {
    "dp-accounting": dp_accounting_rdp,
    "opacus": opacus_rdp,
    "autodp": autodp_rdp,
}
NOISE = {"dp-accounting": dp_accounting_noise, "opacus": opacus_noise}
EXACT = {"dp-accounting, PLD": dp_accounting_pld, "prv-accountant": prv_accountant}


def peer_rows(
    makers: dict[str, Callable[[], Call]],
    settings: Sequence[tuple[Any, ...]],
    ours: np.ndarray,
    own: dict[str, Any],
) -> Rows:
    """Times every peer once over the settings, and compares its answers with ours.

    ``ours`` are our answers, > 0; ``own`` is our row, of `harness.timed`. A row has a
    peer's times, how many times as long as ours they are, in how many settings it
    fails, and how far above ours its answers are; or why it was skipped.
    """
    # A line for each order that a peer leaves out, and for each grid that is too short.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: Rows = []
    for name, maker in makers.items():
        try:
            call = maker()
        except ImportError as error:
            rows.append({"system": name, "excess over ours": f"skipped: {error}"})
            continue
        with suppress(Exception):  # not timed; if it fails it is counted below
            call(*settings[0])
        answers = []
        begun, worked = time.perf_counter(), time.process_time()
        for setting in settings:
            try:
                answers.append(call(*setting))
            except Exception:  # whatever a peer raises: it has no answer here
                answers.append(np.nan)
        each = 1e3 * (time.perf_counter() - begun) / len(settings)
        cpu = 1e3 * (time.process_time() - worked) / len(settings)
        excess = np.asarray(answers) / ours - 1
        good = np.isfinite(excess)
        rows.append(
            {
                "system": name,
                "settings": len(settings),
                "ms each": each,
                "CPU ms each": cpu,
                "times ours": each / own["ms each"],
                "failed": int((~good).sum()),
                "excess over ours": spread(excess[good]),
            }
        )
    return rows
