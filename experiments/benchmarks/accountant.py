"""Speed, tightness and memory of the accountant, next to other accountants.

    make bench          # by Rényi DP
    make bench-exact    # exact and certified, against PLD and PRV

or, in any environment with the library (a peer that is missing is named and skipped),
``python experiments/benchmarks/accountant.py [--quick] [--only PART ...]``.

It compares epsilon by Rényi DP of a Poisson-sampled Gaussian mechanism, and the noise
for a target epsilon. This library answers a whole grid in one call on all cores. The
peers have no such call: they run in a loop on one core over a sample of the grid, one
random setting in each cell. Times are per setting.

``batch``, ``exact`` and ``memory`` measure exact and certified epsilons at log-uniform
settings in `RANGES`. Settings with an epsilon by Rényi DP outside of `EPSILONS` are
left out, as they are unusual and the peers need unbounded memory for them. Each kind of
step is one call. The peers' answers are bounds or estimates by design; ours are checked
against our certified intervals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from harness import Rows, peak_mib, run_parts, spread, timed
from peers import DELTA, EPSILON, EXACT, NOISE, peer_rows

import jaxdp_episodic as jde

SEED, NUM_STEPS = 20_240, 1_000
RATES, NOISE_MULTIPLIERS = (1e-4, 0.3), (0.5, 8.0)
TARGETS, STEP_COUNTS = (0.5, 10.0), (100, 10_000)
# Of exact settings: rates, noise, numbers of steps, deltas.
RANGES = (1e-4, 0.3), (0.5, 5.0), (10, 1e5), (1e-9, 1e-4)
EPSILONS = (0.1, 20.0)
KINDS = ("sampled", "swapped", "antipodal", "episodes")


class Sizes(NamedTuple):
    """How much is measured."""

    cells: int = 8  # the peers have a setting in each of cells x cells cells
    per_cell: int = 32  # our grid has per_cell x per_cell settings in each
    million: tuple[int, int, int] = (100, 100, 100)  # rates, noises, numbers of steps
    calibrations: tuple[int, int, int] = (
        25,
        20,
        20,
    )  # rates, targets, numbers of steps
    peer_calibrations: int = 16  # of them
    calls: int = 200  # of one setting each
    repeats: int = 3  # of our timings; the best counts
    batch: int = 4_000  # exact settings of each kind, enough for JAX
    exact_peers: int = 64  # sampled Gaussians that the peers get
    memory: tuple[int, ...] = (10_000, 100_000)  # settings of whose call it is measured


QUICK = Sizes(4, 8, (10, 20, 20), (5, 4, 3), 2, 20, 1, 16, 4, (64,))


def sampled_gaussian(rate: Any, noise: Any) -> jde.GaussianStep:
    """Returns the step that every system here knows."""
    draw = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(draw, noise_multiplier=noise)


def epsilon(step: jde.GaussianStep, num_steps: Any = NUM_STEPS) -> np.ndarray:
    """Epsilon by Rényi DP."""
    question: dict[str, Any] = {"num_steps": num_steps, "delta": DELTA, "method": "rdp"}
    return np.asarray(jde.epsilon(step, **question))


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
    question: dict[str, Any] = {"epsilon": target, "delta": DELTA, "num_steps": count}

    def calibrated() -> np.ndarray:
        return np.asarray(
            jde.calibrate_noise_multiplier(step, method="rdp", **question)
        )

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
    rows: Rows = []
    for method in ("rdp", "exact"):
        question: dict[str, Any] = {"num_steps": NUM_STEPS, "delta": DELTA}

        def all_of_them(
            question: dict[str, Any] = question | {"method": method},
        ) -> Any:
            steps = (sampled_gaussian(*setting) for setting in settings)
            return np.array([jde.epsilon(step, **question) for step in steps])

        rows.append({"system": method, **timed(all_of_them, sizes.repeats)[0]})
    return rows


def draw(kind: str, size: int) -> np.ndarray:
    """Returns rates, noise, steps, deltas and numbers of episodes, each (size,)."""
    generator = np.random.default_rng([SEED + 1, KINDS.index(kind)])
    parts: list[np.ndarray] = []
    while sum(part.shape[1] for part in parts) < size:
        ends = np.log(list(RANGES))
        # Of a fixed length, so that a longer batch begins with the shorter one.
        fields = np.exp(generator.uniform(*ends.T[..., None], size=(4, 256)))
        fields[2] = np.rint(fields[2])
        fields = np.vstack([fields, generator.integers(2, 6, 256)])
        step, question = described(kind, fields)
        bound = jde.epsilon(step, method="rdp", **question)
        parts.append(fields[:, (bound > EPSILONS[0]) & (bound < EPSILONS[1])])
    return np.concatenate(parts, axis=1)[:, :size]


def described(kind: str, fields: np.ndarray) -> tuple[jde.GaussianStep, dict[str, Any]]:
    """Returns the step for settings of one kind, and the question about it."""
    rate, noise, steps, delta, episodes = fields
    design: Any = jde.Poisson("example", sampling_probability=rate)
    options: dict[str, Any] = {}
    if kind == "episodes":
        design = jde.IndependentEpisodes(design, num_episodes=episodes.astype(int))
    elif kind == "antipodal":
        # Classes are drawn and clipped, half of a class's examples are used.
        classes = jde.Poisson("class", sampling_probability=rate)
        half = jde.Poisson("example", sampling_probability=0.5)
        design = jde.MultistageSampling(classes, half)
        options["clip_unit"] = "class"
    elif kind == "swapped":
        options["clip_unit"] = "step"
    step = jde.GaussianStep(design, noise_multiplier=noise, **options)
    return step, {"num_steps": steps.astype(np.int64), "delta": delta}


def one_each(fields: np.ndarray) -> list[tuple[float, float, int, float]]:
    """Returns rate, noise, number of steps and delta of each setting."""
    return [(p, s, int(t), d) for p, s, t, d, _ in fields.T.tolist()]


def batch(sizes: Sizes) -> Rows:
    """Batches by the exact accountant on JAX, kind by kind."""
    rows: Rows = []
    for kind in KINDS:
        step, question = described(kind, draw(kind, sizes.batch))
        # By itself "auto" leaves to NumPy what is not worth compiling for one call.
        question["engine"] = "jax"
        row, epsilon = timed(
            lambda s=step, a=question: jde.epsilon(s, **a), sizes.repeats
        )
        _, info = jde.epsilon(step, return_info=True, **question)
        stated = spread(info.error / epsilon)
        certified = int(np.sum(info.is_certified_bound))
        more = {"stated relative error": stated, "certified only": certified}
        rows.append({"system": kind, **row, **more})
    return rows


def exact(sizes: Sizes) -> Rows:
    """Exact and certified on the peers' settings, and the peers."""
    fields = draw("sampled", sizes.exact_peers)
    step, question = described("sampled", fields)
    exact, epsilon = timed(lambda: jde.epsilon(step, **question), sizes.repeats)
    certified, (lower, upper) = timed(
        lambda: np.stack(jde.epsilon_interval(step, **question)), sizes.repeats
    )
    outside = int(
        ((epsilon < lower * (1 - 1e-9)) | (epsilon > upper * (1 + 1e-9))).sum()
    )
    settings = one_each(fields)
    for name in ("ms each", "CPU ms each"):
        certified[name] *= 2  # of both ends
    return [
        {"system": "exact", **exact, "outside the interval": outside},
        {
            "system": "certified",
            **certified,
            "settings": sizes.exact_peers,
            "width / epsilon": spread((upper - lower) / epsilon),
        },
        *peer_rows(EXACT, settings, epsilon, exact),
    ]


def memory(sizes: Sizes) -> Rows:
    """One call over many sampled Gaussians, the smallest batch first."""
    rows: Rows = []
    for size in sizes.memory:
        step, question = described("sampled", draw("sampled", size))
        row, _ = timed(lambda s=step, a=question: jde.epsilon(s, **a), 0)
        rows.append({"system": "exact", **row, "peak MiB": peak_mib()})
    return rows


PARTS = {
    "grid": grid,
    "million": million,
    "calibration": calibration,
    "one_by_one": one_by_one,
    "batch": batch,
    "exact": exact,
    "memory": memory,
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, sizes=Sizes(), quick=QUICK, out="results/benchmark")
