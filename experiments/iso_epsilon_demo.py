"""Lines of equal epsilon around the demo: noise against steps, with the demo's place.

``python experiments/iso_epsilon_demo.py --out results/iso_epsilon_demo``.

Evaluates ``configs/sweep_glyphs.toml`` and draws it, as ``jaxdp-episodic sweep`` and
``plot --kind contours`` do; the star is ``configs/glyphs_5w1s.toml``, whose noise is
calibrated here as the trainer does it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from drawing import rounded, write_table

import jaxdp_episodic as jde
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import run_sweep
from jaxdp_episodic.tools.sweep.table import read_columns
from jaxdp_episodic.trainer.run.assemble import plan
from jaxdp_episodic.training import read_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NOISE, STEPS, RATE = "noise_multiplier", "num_steps", "episode.sampling_probability"
LEVELS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)


def demo() -> dict[str, float]:
    """Where the demo is on the sweep's axes."""
    config = read_config(CONFIGS / "glyphs_5w1s.toml")
    budget = plan(config, config.data.load("train"))
    design = budget.step.design
    assert isinstance(design, jde.GroupedClasses)
    assert isinstance(design.episodes, jde.Poisson)
    return {
        NOISE: float(f"{np.asarray(budget.step.noise_multiplier).item():.5g}"),
        STEPS: budget.num_steps,
        RATE: np.asarray(design.episodes.sampling_probability).item(),
    }


def main() -> None:
    """Prints and writes the table, draws the picture."""
    name = "iso_epsilon_demo"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results") / name)
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    place = demo()
    columns = (RATE, STEPS, NOISE, "epsilon")
    with tempfile.TemporaryDirectory() as sweep:
        outcome = run_sweep(read_sweep(CONFIGS / "sweep_glyphs.toml"), sweep)
        assert outcome.table is not None  # of a whole sweep there is one
        blocks = list(read_columns(outcome.table, columns))
        draw(
            Path(sweep),
            kind="contours",
            x=NOISE,
            y=STEPS,
            by=RATE,
            levels=LEVELS,
            mark={field: str(value) for field, value in place.items()},
            out=folder / f"{name}.png",
        )
    rate, steps, noise, epsilon = (
        np.concatenate([block[column] for block in blocks]) for column in columns
    )
    rows = (rate == place[RATE]) & (steps == place[STEPS])
    table = {
        "demo": place,
        "at the demo's rate and steps": {
            "noise multiplier": rounded(noise[rows]),
            "epsilon": rounded(epsilon[rows]),
        },
    }
    write_table(table, folder / f"{name}.json")
    print(f"the demo: {place}")
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
