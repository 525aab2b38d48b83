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
limit, after its imports.

Times are of the processor, of one question each with nothing cached:
"distribution" is that of one epoch's distribution, both ends. Nothing here fails for
being slow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Steps in an epoch, noise multiplier, epochs, delta.
SETTINGS = (
    (10, 1.0, 1, 1e-6),
    (20, 1.0, 1, 9.8e-5),
    (100, 0.5, 1, 1e-6),
    (100, 1.0, 10, 1e-6),
    (1_000, 0.7, 10, 1e-6),
    (1_000, 1.0, 100, 1e-6),
    (10_000, 1.0, 100, 1e-6),
)


def random_allocation_ends(setting: list[Any]) -> dict[str, float]:
    """Ends of epsilon and their time; in an environment that has the peer."""
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
    start = time.process_time()
    lower = allocation_epsilon_lower_bound(asked, config) if epochs == 1 else 0.0
    upper = allocation_epsilon_combined(asked, config)
    spent = time.process_time() - start
    return {"lower": float(lower), "upper": float(upper), "seconds": spent}


def pld_accounting_ends(setting: list[Any]) -> dict[str, float]:
    """Ends of epsilon and their time; in an environment that has the peer."""
    from PLD_accounting import gaussian_allocation_epsilon_range  # pyright: ignore[reportMissingImports]

    steps, noise, epochs, delta = setting
    start = time.process_time()
    upper, lower = gaussian_allocation_epsilon_range(
        delta=delta, sigma=noise, num_steps=steps, num_epochs=epochs
    )
    spent = time.process_time() - start
    return {"lower": float(lower), "upper": float(upper), "seconds": spent}


PEERS = {
    "random-allocation": random_allocation_ends,
    "pld-accounting": pld_accounting_ends,
}


def our_ends(setting: tuple[int, float, int, float]) -> dict[str, float]:
    """Our ends of epsilon, the time they take, and those of the distributions alone."""
    import jaxdp_episodic as jde
    from jaxdp_episodic.accountant.losses.allocated_bounds import epoch_distribution
    from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum

    steps, noise, epochs, delta = setting
    drawn = jde.RandomAllocation("example", steps_per_epoch=steps)
    step = jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation="add_remove"
    )
    for cached in (lognormal_sum, epoch_distribution):
        cached.cache_clear()
    start = time.process_time()
    for above in (0.0, 1.0):
        epoch_distribution(1 / noise, float(steps), float(steps), above)
    distribution = time.process_time() - start
    low, high = jde.epsilon_interval(step, delta=delta, num_steps=steps * epochs)
    spent = time.process_time() - start
    return {
        "lower": float(low),
        "upper": float(high),
        "distribution_seconds": distribution,
        "seconds": spent,
    }


def ask_peer(
    name: str, python: str, setting: tuple[int, float, int, float], limit: float
) -> dict[str, float] | str:
    """A peer's answer, in a process of its own, or why there is none."""
    command = [python, __file__, "--as-peer", json.dumps([name, setting])]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"more than {limit:g} s"
    if found.returncode:
        return (found.stderr.strip().splitlines() or ["failed"])[-1]
    return json.loads(found.stdout.strip().splitlines()[-1])


def main() -> None:
    """Prints the table, a line a setting, and writes it."""
    parser = argparse.ArgumentParser(description="certified ends of random allocation")
    parser.add_argument("--peer", help="Python of an environment with the peers")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a setting")
    parser.add_argument("--out", type=Path, help="file to write the results to")
    parser.add_argument("--as-peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_peer:
        name, setting = json.loads(arguments.as_peer)
        print(json.dumps(PEERS[name](setting)))
        return
    our_ends(SETTINGS[0])  # what is imported and computed once
    rows = []
    for setting in SETTINGS:
        ours = our_ends(setting)
        peers: dict[str, dict[str, float] | str] = {}
        if arguments.peer:
            peers = {
                name: ask_peer(name, arguments.peer, setting, arguments.limit)
                for name in PEERS
            }
        rows.append({"setting": setting, "ours": ours, "peers": peers})
        line = (
            f"t {setting[0]:>6} noise {setting[1]:g} epochs {setting[2]:>3} "
            f"delta {setting[3]:g}: [{ours['lower']:.6f}, {ours['upper']:.6f}] "
            f"width {ours['upper'] - ours['lower']:.1e}, distribution "
            f"{1e3 * ours['distribution_seconds']:.0f} ms, "
            f"in all {ours['seconds']:.2f} s"
        )
        for name, ends in peers.items():
            if isinstance(ends, str):
                line += f"; {name}: {ends}"
                continue
            line += (
                f"; {name} [{ends['lower']:.4f}, {ends['upper']:.4f}] "
                f"width {ends['upper'] - ends['lower']:.1e}, {ends['seconds']:.1f} s"
            )
        print(line, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
