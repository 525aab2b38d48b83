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
"distribution" is that of one epoch's distribution, both ends, "exact" that of its
tables. Then those of random settings, of either relation, alone and in a batch, and of
whole exact epsilons. Nothing here fails for being slow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
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
    from jaxdp_episodic.accountant.losses.allocation_tables import (
        forget_tables,
        sum_tables,
    )
    from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum

    steps, noise, epochs, delta = setting
    drawn = jde.RandomAllocation("example", steps_per_epoch=steps)
    step = jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation="add_remove"
    )
    forget_tables()
    for cached in (lognormal_sum, epoch_distribution):
        cached.cache_clear()
    start = time.process_time()
    sum_tables(steps, 1 / noise)
    exact = time.process_time() - start
    lognormal_sum.cache_clear()
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
        "exact_seconds": exact,
        "seconds": spent,
    }


def table_times(number: int) -> dict[str, dict[str, float]]:
    """Milliseconds of random settings' tables and exact epsilons, none of them kept.

    Of each kind and question processor time alone (median and most), and of one setting
    of all in a batch, with wall time.
    """
    import numpy as np

    import jaxdp_episodic as jde
    from jaxdp_episodic.accountant.losses import allocation_tables as tables

    random = np.random.default_rng(1)
    steps = np.rint(10 ** random.uniform(0.5, 4.0, number)).astype(int)
    noise = random.uniform(0.5, 4.0, number)

    def epsilon_of(relation: str) -> Callable[[slice], object]:
        def ask(part: slice) -> object:
            drawn = jde.RandomAllocation("example", steps_per_epoch=steps[part])
            step = jde.GaussianStep(
                drawn, noise_multiplier=noise[part], neighboring_relation=relation
            )
            return jde.epsilon(step, delta=1e-6, num_steps=10 * steps[part])

        return ask

    sums = list(zip(steps.tolist(), (1 / noise).tolist(), strict=True))
    both = [(n, n, s) for n, s in sums]
    asked: dict[str, Callable[[slice], object]] = {
        "tables of add_remove": lambda part: tables.make_sum_tables(sums[part]),
        "tables of replace_one": lambda part: tables.make_antipodal_tables(both[part]),
        "epsilon of add_remove": epsilon_of("add_remove"),
        "epsilon of replace_one": epsilon_of("replace_one"),
    }

    def spent(ask: Callable[[slice], object], part: slice) -> tuple[float, float]:
        tables.forget_tables()
        start = time.process_time(), time.perf_counter()
        ask(part)
        return (
            1e3 * (time.process_time() - start[0]),
            1e3 * (time.perf_counter() - start[1]),
        )

    found = {}
    for name, ask in asked.items():
        ask(slice(0, 2))  # what is imported and computed once
        alone = [spent(ask, slice(i, i + 1))[0] for i in range(number)]
        processor, wall = spent(ask, slice(None))
        found[name] = {
            "alone": float(np.median(alone)),
            "alone at most": max(alone),
            "in the batch": processor / number,
            "wall": wall / number,
        }
    return found


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
    parser.add_argument("--batch", type=int, default=64, help="settings of the batch")
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
            f"in all {ours['seconds']:.2f} s, "
            f"exact {1e3 * ours['exact_seconds']:.0f} ms"
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
    times = table_times(arguments.batch)
    for name, row in times.items():
        print(
            name, *(f"{kind} {value:.1f} ms" for kind, value in row.items()), sep=", "
        )
    rows.append({"tables": times, "settings": arguments.batch})
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
