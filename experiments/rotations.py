"""Glyphs with rotated classes against without, at epsilon 8: docs/copies.md.

    python experiments/rotations.py

Takes some ten minutes of a core.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path

from jaxdp_episodic.data import load_glyphs, with_rotations
from jaxdp_episodic.training import (
    Evaluation,
    TrainingConfig,
    load_release,
    run_training,
)

CONFIG = """
version = 1
epsilon = 8.0
delta = 1e-5
[data]
type = "Glyphs"
size = 14
[step]
neighboring_relation = "zero_out"
[step.sampling]
type = "GroupedClasses"
num_classes = 1_800
ways = 5
episodes = { type = "Poisson", name = "episode", sampling_probability = 1.0 }
examples = { type = "WithoutReplacement", name = "example", size = 4, population = 20 }
[learner]
kind = "protonet"
shots = 1
"""
EPISODES = 60  # of a step, on average
STATISTICS = {"features": {"kind": "wavelets"}, "learner": {"kind": "plda", "shots": 1}}
STEPS = {
    "num_steps": 150,
    "l2_clip_norm": 0.1,
    "model": {"kind": "conv_embedding", "channels": [16, 32], "embedding": 32},
    "optimizer": {"kind": "adam", "learning_rate": 6e-3, "schedule": "cosine"},
}


def main() -> None:
    """Prints accuracies on upright and on rotated test classes."""
    upright = load_glyphs("test", size=14)
    tests = {"upright": upright, "rotated": with_rotations(upright)}
    for name, learner in (("statistics", STATISTICS), ("steps", STEPS)):
        for copies in (1, 4):
            table = tomllib.loads(CONFIG) | learner
            classes = 1_800 * copies
            table["data"]["rotations"] = copies > 1
            sampling = table["step"]["sampling"]
            sampling["num_classes"] = classes
            sampling["episodes"]["sampling_probability"] = EPISODES / (classes // 5)
            with tempfile.TemporaryDirectory() as folder:
                run_training(
                    TrainingConfig.from_dict({"type": "TrainingConfig", **table}),
                    Path(folder) / "run",
                )
                release = load_release(Path(folder) / "run" / "release")
            for kind, data in tests.items():
                seen = (
                    data if release.features is None else release.features.table(data)
                )
                score = Evaluation(seen, ways=5, shots=1, queries=5, num_episodes=400)
                accuracy = score(release.learner, release.params).mean
                print(f"{name}, {copies} copies, {kind}: {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
