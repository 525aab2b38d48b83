"""The pairs of random allocation, simulated by their definition, against exact delta.

``python experiments/trust/allocation.py --out results/allocation`` draws each pair 10^8
times (``--draws``) in each direction: the noise of every step, the unit's step, and,
for units below the allocated level, whether they are drawn. The
mean of ``(1 - g / ratio)_+`` estimates delta without bias. Its terms are between 0 and
1, so its standard error is reliable; float32 ratios change delta by 1e-6 of it.

If the pair is the accounted one, the mean must agree with the claim. The other
direction, and several epochs of units below the allocated level, have larger claims,
which the mean must not exceed. The exit code is 1 if a difference exceeds 5.5 standard
errors (probability 1e-5 for all rows together), or if claims for noise that is 1 %
less, or more, would have passed for any pair.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from provenance import provenance

import jaxdp_episodic as jde

FAR = 5.5  # standard errors
SEED = 0
PLANTED = 0.99, 1.01
NUMBERS = 1 << 18  # normal numbers at once, which stay in a cache


class Case(NamedTuple):
    """A run in epochs."""

    relation: str  # "replace_one" where something is drawn below
    steps: int  # of an epoch
    noise: float  # multiplier
    rate: float  # at which the protected unit is drawn into what is allocated
    num_steps: int  # of the run
    epsilons: tuple[float, ...]  # at which delta is computed

    def step(self, factor: float = 1.0) -> jde.GaussianStep:
        """The accounted step, with the noise times a factor."""
        bins: Any = jde.RandomAllocation("task", steps_per_epoch=self.steps)
        fields: dict[str, Any] = {"noise_multiplier": factor * self.noise}
        fields["neighboring_relation"] = self.relation
        if self.rate == 1:
            return jde.GaussianStep(bins, **fields)
        drawn = round(100 * self.rate)
        below = jde.WithoutReplacement("example", size=drawn, population=100)
        levels = jde.MultistageSampling(bins, below)
        fields |= {"clip_unit": "task", "privacy_unit": "example"}
        return jde.GaussianStep(levels, **fields)

    @property
    def epochs(self) -> list[int]:
        """Number of steps of the run in each epoch."""
        whole, part = divmod(self.num_steps, self.steps)
        return [self.steps] * whole + [part] * (part > 0)

    def is_attained(self, direction: str) -> bool:
        """True if the simulated pair is the accounted one."""
        if direction == "backward" and self.relation == "add_remove":
            return False  # the larger direction is what is claimed
        return self.rate == 1 or len(self.epochs) == 1 and direction == "forward"


CASES = (
    Case("add_remove", 10, 1.0, 1.0, 10, (0.25, 0.5, 1.0, 1.5)),
    Case("add_remove", 30, 0.5, 1.0, 20, (0.25, 0.5, 1.0, 4.0)),
    Case("add_remove", 5, 1.5, 1.0, 17, (0.5, 1.0, 2.0, 3.0)),
    Case("replace_one", 10, 1.0, 1.0, 10, (0.5, 1.0, 2.0)),
    Case("replace_one", 40, 0.4, 1.0, 40, (0.5, 2.0, 5.0)),
    Case("replace_one", 4, 1.5, 1.0, 14, (1.0, 2.0, 4.0)),
    Case("replace_one", 10, 1.0, 0.2, 10, (0.25, 0.5, 1.0)),
    Case("replace_one", 20, 0.7, 0.5, 13, (0.5, 1.0, 2.0)),
    Case("replace_one", 5, 1.0, 0.2, 15, (0.5, 1.0, 2.0)),
)


def ratios(
    rng: np.random.Generator, case: Case, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Likelihood ratios of simulated runs, with the unit and without."""
    shift, total = 1 / case.noise, np.float32(case.steps)
    turn = np.float32(np.exp(shift * shift))
    found = np.ones((2, number), np.float32)
    for taken in case.epochs:
        terms = rng.standard_normal((taken, number), np.float32)
        terms *= np.float32(shift)
        terms -= np.float32(shift * shift / 2)
        np.exp(terms, out=terms)
        # The unit's step is the first, by symmetry, if it is among those taken; with
        # the unit the noise there is moved by the shift, its term times e^{s²}.
        is_here = rng.random(number, np.float32) < taken / case.steps
        own, idle = terms[0].copy(), total - taken
        ups = idle + terms.sum(axis=0)
        if case.relation == "add_remove":
            found[0] *= (ups + np.where(is_here, (turn - 1) * own, 0)) / total
            found[1] *= ups / total
            continue
        other = 1 / (turn * terms)  # of the opposite contribution
        downs, opposite = idle + other.sum(axis=0), other[0]
        drawn = rng.random(number, np.float32) < case.rate
        for row, moved in ((0, np.where(drawn, turn, 1 / turn)), (1, 1 / turn)):
            moved = np.where(is_here, moved, np.float32(1))
            up = ups + (moved - 1) * own
            down = downs + (1 / moved - 1) * opposite
            found[row] *= 1 - np.float32(case.rate) * (1 - up / down)
    return found[0], found[1]


def simulated(case: Case, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error, each (2, epsilons): forward, backward."""
    rng = np.random.Generator(np.random.SFC64([seed, CASES.index(case)]))
    number = max(1, NUMBERS // max(case.epochs))
    gains = np.exp(np.asarray(case.epsilons, np.float32))[:, None]
    sums, squares = np.zeros((2, 2, len(gains)))
    chunks = -(-draws // number)
    for _ in range(chunks):
        with_unit, without = ratios(rng, case, number)
        gain = 1 - gains / with_unit, 1 - gains * without
        for row, values in enumerate(gain):
            values = np.maximum(values, 0).astype(np.float64)
            sums[row] += values.sum(axis=1)
            squares[row] += (values * values).sum(axis=1)
    total = chunks * number
    mean = sums / total
    # One more draw that gives 1 is nothing, but where there was none.
    return mean, np.sqrt((squares / total - mean**2 + 1 / total) / total)


def claims(case: Case, factor: float = 1.0) -> np.ndarray:
    """Lower and upper ends of delta, (2, epsilons); equal if it is exact."""
    step = case.step(factor)
    question: dict[str, Any] = {"epsilon": list(case.epsilons)}
    question["num_steps"] = case.num_steps
    larger, info = jde.delta(step, return_info=True, **question)
    if np.any(info.is_certified_bound):
        return np.asarray(jde.delta_interval(step, **question))
    return np.stack([larger, larger])


def rows(case: Case, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    """Claims and simulated values, at every epsilon in both directions."""
    begun = time.process_time()
    mean, error = simulated(case, draws, seed)
    seconds = time.process_time() - begun
    claimed, *planted = (claims(case, factor) for factor in (1.0, *PLANTED))
    for row, direction in enumerate(("forward", "backward")):
        equal = case.is_attained(direction)
        for place, epsilon in enumerate(case.epsilons):
            value, one = float(mean[row, place]), float(error[row, place])
            off, *others = (
                float((value - min(max(value, low), high)) / one)
                for low, high in (ends[:, place] for ends in (claimed, *planted))
            )
            yield {
                **case._asdict(),
                "epsilons": [epsilon],
                "direction": direction,
                "is_attained": equal,
                "claimed": float(claimed[1, place]),
                "claimed_low": float(claimed[0, place]),
                "simulated": value,
                "standard_error": one,
                "deviations": off,
                "deviations_planted": others,
                "is_refuted": off > FAR or equal and off < -FAR,
                "is_planted_found": min(map(abs, others)) > FAR,
                "seconds": round(seconds, 1),
            }


def main() -> int:
    """Simulates all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=float, default=1e8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    draws = int(options.draws)
    about = {"version": 1, **provenance(), "draws": draws, "seed": SEED}
    found: list[dict[str, Any]] = []
    bad: list[str] = []
    for case in CASES:
        noticed: dict[str, bool] = {}
        for row in rows(case, draws, SEED):
            found.append(row)
            direction, epsilon = row["direction"], row["epsilons"][0]
            print(
                f"{case[:5]} {direction} epsilon {epsilon:g}: {row['claimed']:.6g} "
                f"claimed, {row['simulated']:.6g} simulated, {row['deviations']:+.2f} "
                f"standard errors; planted {row['deviations_planted']}",
                flush=True,
            )
            if row["is_refuted"]:
                bad.append(f"REFUTED: {row}")
            if row["is_attained"]:
                is_found = noticed.get(direction, False) or row["is_planted_found"]
                noticed[direction] = is_found
        bad += [
            f"planted, not found: {case}, {direction}"
            for direction, is_found in noticed.items()
            if not is_found
        ]
        text = json.dumps({**about, "rows": found}, indent=1, allow_nan=False)
        (options.out / "allocation.json").write_text(text + "\n", encoding="utf-8")
    print(*bad, sep="\n", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
