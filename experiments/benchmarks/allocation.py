"""Random allocation: width and time of certified ends, next to its authors' packages.

    python experiments/benchmarks/allocation.py [--peer PYTHON] [--limit SECONDS]

The peers of Feldman and Shenfeld are ``random-allocation==1.0.5`` (with pandas), which
needs an older NumPy than this library, and its successor ``pld-accounting==2.0``:
``--peer`` names the Python of an environment that has them (``make bench-exact`` makes
one); without one they are not asked. The former's upper end is the least of its bounds
(``allocation_epsilon_combined``, orders as in its README), its lower one
``allocation_epsilon_lower_bound``, which is searched for to 1e-3 only and given for a
single epoch alone; the latter's ends are refined to its own relative accuracy
(``gaussian_allocation_epsilon_range``). Each is asked in one process a setting, up to a
limit, after its imports. Times are of the processor, nothing cached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Setting = tuple[int, float, int, float]
# Steps in an epoch, noise multiplier, epochs, delta.
SETTINGS: tuple[Setting, ...] = (
    (10, 1.0, 1, 1e-6),
    (20, 1.0, 1, 9.8e-5),
    (100, 0.5, 1, 1e-6),
    (100, 1.0, 10, 1e-6),
    (1_000, 0.7, 10, 1e-6),
    (1_000, 1.0, 100, 1e-6),
    (10_000, 1.0, 100, 1e-6),
)


def random_allocation(setting: Setting) -> Callable[[], tuple[float, float]]:
    """Ends of epsilon; in an environment that has the peer."""
    from random_allocation.comparisons import structs
    from random_allocation.random_allocation_scheme import (
        allocation_epsilon_combined,
        allocation_epsilon_lower_bound,
    )

    steps, noise, epochs, delta = setting
    asked = structs.PrivacyParams(
        sigma=noise, num_steps=steps, num_epochs=epochs, delta=delta
    )
    config = structs.SchemeConfig(allocation_direct_alpha_orders=list(range(2, 61)))

    def ends() -> tuple[float, float]:
        lower = allocation_epsilon_lower_bound(asked, config) if epochs == 1 else 0.0
        return lower, allocation_epsilon_combined(asked, config)

    return ends


def pld_accounting(setting: Setting) -> Callable[[], tuple[float, float]]:
    """Ends of epsilon; in an environment that has the peer."""
    from PLD_accounting import gaussian_allocation_epsilon_range  # pyright: ignore[reportMissingImports]

    steps, noise, epochs, delta = setting
    asked: dict[str, Any] = {"delta": delta, "sigma": noise, "num_steps": steps}
    return lambda: gaussian_allocation_epsilon_range(num_epochs=epochs, **asked)[::-1]


def ours(setting: Setting) -> Callable[[], tuple[float, float]]:
    """Our ends of epsilon."""
    import jaxdp_episodic as jde

    steps, noise, epochs, delta = setting
    drawn = jde.RandomAllocation("example", steps_per_epoch=steps)
    step = jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation="add_remove"
    )
    asked: dict[str, Any] = {"delta": delta, "num_steps": steps * epochs}
    return lambda: jde.epsilon_interval(step, **asked)


SYSTEMS = {
    "ours": ours,
    "random-allocation": random_allocation,
    "pld-accounting": pld_accounting,
}


def asked(name: str, python: str, setting: Setting, limit: float) -> str:
    """Returns a system's answer, in a process of its own, or why there is none."""
    command = [python, __file__, "--worker", json.dumps([name, setting])]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"more than {limit:g} s"
    if found.returncode:
        return (found.stderr.strip().splitlines() or ["failed"])[-1]
    lower, upper, seconds = json.loads(found.stdout.strip().splitlines()[-1])
    return (
        f"[{lower:.6f}, {upper:.6f}] width {upper - lower:.1e}, {seconds:.2f} s of CPU"
    )


def main() -> None:
    """Prints a line for each setting and system."""
    parser = argparse.ArgumentParser(description="certified ends of random allocation")
    parser.add_argument("--peer", help="Python of an environment with the peers")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a setting")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, setting = json.loads(arguments.worker)
        ends = SYSTEMS[name](setting)
        begun = time.process_time()
        lower, upper = ends()
        spent = time.process_time() - begun
        print(json.dumps([float(lower), float(upper), spent]))
        return
    for setting in SETTINGS:
        steps, noise, epochs, delta = setting
        print(f"{steps} steps, noise {noise:g}, {epochs} epochs, delta {delta:g}")
        for name in SYSTEMS:
            python = sys.executable if name == "ours" else arguments.peer
            if python:
                found = asked(name, python, setting, arguments.limit)
                print(f"  {name:18} {found}", flush=True)


if __name__ == "__main__":
    main()
