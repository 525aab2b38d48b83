"""Speed, error and memory of the exact and the certified epsilon, next to peers.

    make bench-exact

or, in any environment with the library (a peer that is missing is named and skipped),
``python experiments/benchmarks/exact.py [--quick] [--only PART ...]``.

Settings: numbers of steps 10 to 1e5, delta 1e-9 to 1e-4, rates 1e-4 to 0.3, noise 0.5
to 5, log-uniform, of which those are kept whose epsilon by Rényi-DP lies between 0.1
and 20: outside of that nobody trains, and the peers' memory is not bounded. Each kind
of step is one call. The peers get the first sampled Gaussians one by one, as that is
what they offer; a peer's process runs on one core, ours on all. Their answers are
bounds or estimates by design; ours are checked against our certified intervals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from harness import Rows, peak_mib, run_parts, spread, timed
from peers import EXACT, peer_rows

import jaxdp_episodic as jde

SEED = 20_241
NUM_STEPS, DELTAS = (10, 1e5), (1e-9, 1e-4)
RATES, NOISE_MULTIPLIERS = (1e-4, 0.3), (0.5, 5.0)
EPSILONS = (0.1, 20.0)
KINDS = ("sampled", "swapped", "antipodal", "episodes")


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      batch: settings of each kind, enough for JAX.
      peers: sampled Gaussians that the peers get.
      memory: sizes of the batches whose memory is measured.
      repeats: of our timings; the best counts.
    """

    batch: int = 4_000
    peers: int = 64
    memory: tuple[int, ...] = (10_000, 100_000)
    repeats: int = 3


QUICK = Sizes(16, 4, (64,), 1)


def draw(kind: str, size: int) -> np.ndarray:
    """Returns rates, noise, steps, deltas and numbers of episodes, each (size,)."""
    generator = np.random.default_rng([SEED, KINDS.index(kind)])
    parts: list[np.ndarray] = []
    while sum(part.shape[1] for part in parts) < size:
        ends = np.log([RATES, NOISE_MULTIPLIERS, NUM_STEPS, DELTAS])
        # Of a fixed length, so that a longer batch begins with the shorter one.
        fields = np.exp(generator.uniform(*ends.T[..., None], size=(4, 256)))
        fields[2] = np.rint(fields[2])
        fields = np.vstack([fields, generator.integers(2, 6, 256)])
        step, asked = described(kind, fields)
        bound = jde.epsilon(step, method="rdp", **asked)
        parts.append(fields[:, (bound > EPSILONS[0]) & (bound < EPSILONS[1])])
    return np.concatenate(parts, axis=1)[:, :size]


def described(kind: str, fields: np.ndarray) -> tuple[jde.GaussianStep, dict[str, Any]]:
    """Returns settings of one kind of step: the step, and what is asked."""
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
        step, asked = described(kind, draw(kind, sizes.batch))
        # By itself "auto" leaves to NumPy what is not worth compiling for one call.
        asked["engine"] = "jax"
        row, epsilon = timed(lambda s=step, a=asked: jde.epsilon(s, **a), sizes.repeats)
        _, info = jde.epsilon(step, return_info=True, **asked)
        stated = spread(info.error / epsilon)
        certified = int(np.sum(info.is_certified_bound))
        more = {"stated relative error": stated, "certified only": certified}
        rows.append({"system": kind, **row, **more})
    return rows


def peers(sizes: Sizes) -> Rows:
    """Exact and certified on the peers' settings, and the peers."""
    fields = draw("sampled", sizes.peers)
    step, asked = described("sampled", fields)
    exact, epsilon = timed(lambda: jde.epsilon(step, **asked), sizes.repeats)
    interval = lambda: np.stack(jde.epsilon_interval(step, **asked))  # noqa: E731
    certified, (lower, upper) = timed(interval, sizes.repeats)
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
            "settings": sizes.peers,
            "width / epsilon": spread((upper - lower) / epsilon),
        },
        *peer_rows(EXACT, settings, epsilon, exact),
    ]


def one_by_one(sizes: Sizes) -> Rows:
    """One exact epsilon a call, by NumPy."""
    settings = one_each(draw("sampled", sizes.peers))

    def call() -> np.ndarray:
        answers = []
        for rate, noise, count, delta in settings:
            example = jde.Poisson("example", sampling_probability=rate)
            one = jde.GaussianStep(example, noise_multiplier=noise)
            answers.append(jde.epsilon(one, num_steps=count, delta=delta))
        return np.array(answers)

    return [{"system": "exact", **timed(call, sizes.repeats)[0]}]


def memory(sizes: Sizes) -> Rows:
    """One call over many sampled Gaussians, the smallest batch first."""
    rows: Rows = []
    for size in sizes.memory:
        step, asked = described("sampled", draw("sampled", size))
        row, _ = timed(lambda s=step, a=asked: jde.epsilon(s, **a), 0)
        rows.append({"system": "exact", **row, "peak MiB": peak_mib()})
    return rows


PARTS = {"batch": batch, "peers": peers, "one_by_one": one_by_one, "memory": memory}

if __name__ == "__main__":
    out = "results/benchmark-exact"
    run_parts(__doc__, PARTS, sizes=Sizes(), quick=QUICK, out=out)
