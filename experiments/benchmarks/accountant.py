"""Speed and tightness of the accountant by Rényi-DP, next to other accountants.

    make bench

or, in any environment with the library (a peer that is missing is named and skipped),
``python experiments/benchmarks/accountant.py [--quick] [--only PART ...]``.

What is compared: epsilon by Rényi-DP of a Poisson-sampled Gaussian mechanism, and the
noise for a target epsilon. Ours is one call for a whole grid on all cores, theirs a
loop on one core, which is what they offer. The peers get a sample of the grid, drawn at
random in each of its cells, and times are compared by the setting.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from harness import Rows, peak_mib, run_parts, timed
from peers import DELTA, EPSILON, NOISE, peer_rows

import jaxdp_episodic as jde

SEED, NUM_STEPS = 20_240, 1_000
RATES, NOISE_MULTIPLIERS = (1e-4, 0.3), (0.5, 8.0)
TARGETS, STEP_COUNTS = (0.5, 10.0), (100, 10_000)


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      cells: the peers' sample has one setting in each of cells x cells cells.
      per_cell: our grid has per_cell x per_cell settings in each cell.
      million: how many rates, noise multipliers and numbers of steps.
      calibrations: how many rates, target epsilons and numbers of steps.
      peer_calibrations: how many of them the peers get.
      calls: of one setting each.
      repeats: of our timings; the best counts.
    """

    cells: int = 8
    per_cell: int = 32
    million: tuple[int, int, int] = (100, 100, 100)
    calibrations: tuple[int, int, int] = (25, 20, 20)
    peer_calibrations: int = 16
    calls: int = 200
    repeats: int = 3


QUICK = Sizes(4, 8, (10, 20, 20), (5, 4, 3), 2, 20, 1)


def sampled_gaussian(rate: Any, noise: Any) -> jde.GaussianStep:
    """Returns the step that every system here knows."""
    draw = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(draw, noise_multiplier=noise)


def epsilon(step: jde.GaussianStep, num_steps: Any = NUM_STEPS) -> np.ndarray:
    """Epsilon by Rényi-DP."""
    asked: dict[str, Any] = {"num_steps": num_steps, "delta": DELTA, "method": "rdp"}
    return np.asarray(jde.epsilon(step, **asked))


def grid(sizes: Sizes) -> Rows:
    """Epsilons over rates x noise: ours in one call, the peers' on a sample."""
    length = sizes.cells * sizes.per_cell
    rates, noise = (np.geomspace(*ends, length) for ends in (RATES, NOISE_MULTIPLIERS))
    step = sampled_gaussian(rates[:, None], noise)
    own, epsilons = timed(lambda: epsilon(step), sizes.repeats)
    generator = np.random.default_rng(SEED)
    corners = np.indices((sizes.cells, sizes.cells)).reshape(2, -1) * sizes.per_cell
    row, column = corners + generator.integers(sizes.per_cell, size=corners.shape)
    settings = [
        (rate, one, NUM_STEPS)
        for rate, one in zip(rates[row].tolist(), noise[column].tolist(), strict=True)
    ]
    peers = peer_rows(EPSILON, settings, epsilons[row, column], own)
    return [{"system": "ours", **own}, *peers]


def million(sizes: Sizes) -> Rows:
    """Epsilons over rates x noise x numbers of steps."""
    rates, noises, counts = sizes.million
    step = sampled_gaussian(
        np.geomspace(*RATES, rates)[:, None, None],
        np.geomspace(*NOISE_MULTIPLIERS, noises)[:, None],
    )
    steps = np.rint(np.geomspace(1, 100_000, counts))
    row, _ = timed(lambda: epsilon(step, steps), sizes.repeats)
    return [{"system": "ours", **row, "peak MiB": peak_mib()}]


def calibration(sizes: Sizes) -> Rows:
    """The smallest noise for rates x target epsilons x numbers of steps."""
    rates, targets, counts = sizes.calibrations
    fields = np.broadcast_arrays(
        np.geomspace(*RATES, rates)[:, None, None],
        np.geomspace(*TARGETS, targets)[:, None],
        np.rint(np.geomspace(*STEP_COUNTS, counts)).astype(np.int64),
    )
    rate, target, count = (field.ravel() for field in fields)
    step = sampled_gaussian(rate, 1.0)  # whose noise is ignored
    asked: dict[str, Any] = {"epsilon": target, "delta": DELTA, "num_steps": count}

    def calibrated() -> np.ndarray:
        return np.asarray(jde.calibrate_noise_multiplier(step, method="rdp", **asked))

    own, noise = timed(calibrated, sizes.repeats)
    generator = np.random.default_rng(SEED)
    chosen = generator.choice(noise.size, sizes.peer_calibrations, replace=False)
    columns = (field[chosen].tolist() for field in (rate, target, count))
    settings = list(zip(*columns, strict=True))
    return [{"system": "ours", **own}, *peer_rows(NOISE, settings, noise[chosen], own)]


def one_by_one(sizes: Sizes) -> Rows:
    """One epsilon a call, other numbers in each, the description included."""
    generator = np.random.default_rng(SEED)
    ends = np.log([RATES, NOISE_MULTIPLIERS])
    settings = np.exp(generator.uniform(*ends.T, size=(sizes.calls, 2))).tolist()

    def all_of_them() -> np.ndarray:
        return np.array([epsilon(sampled_gaussian(*setting)) for setting in settings])

    row, _ = timed(all_of_them, sizes.repeats)
    return [{"system": "ours", **row}]


PARTS = {
    "grid": grid,
    "million": million,
    "calibration": calibration,
    "one_by_one": one_by_one,
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, sizes=Sizes(), quick=QUICK, out="results/benchmark")
