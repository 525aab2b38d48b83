"""Correlated noise against independent noise, trained, on the glyphs.

Results are in ``correlated.csv``; see `study` for the command. *steps*: episodes of two
of 20 drawings, one drawing protected, the config ``glyphs_linear``; with independent
noise these are the runs P1 of ``few_shot.csv``. *users*: 1,000 made-up users with four
drawings of each of five syllables, 50 users a step, 200 steps, one user protected under
add_remove. ``--only pilot`` trains other learning rates once, to choose one on the
validation classes; no epsilon includes this choice.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from drawing import markdown
from study import CONFIGS, HERE, Results, Run, Study, cpu_seconds, shown, trained

import jaxdp_episodic as jde
from jaxdp_episodic.data import ExampleTable
from jaxdp_episodic.trainer.config.training_config import StepConfig
from jaxdp_episodic.trainer.config.training_parts import NoiseConfig
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.training import TrainingConfig, read_config

EPSILONS = (1.0, 2.0, 4.0, 8.0)
STEPS, USERS = "steps", "users"
PILOT = "pilot"
FEW_SHOT = ("pipeline", "change", "protected", "relation", "epsilon")
CLASSES, DRAWINGS, HAND, SYLLABLES = 1_800, 20, 4, 5
NUMBER, ROUND, EPOCH = 1_000, 50, 20  # users, of a step, steps of an epoch
DEALT = 7  # the seed by which drawings are dealt


class Noise(NamedTuple):
    """How a setting draws and noises."""

    bands: int  # 1 is independent noise
    is_allocated: bool = False  # users by random allocation, not by Poisson sampling
    rate: float = 0.02  # Adam's learning rate
    pilots: tuple[float, ...] = ()  # others that were tried


NOISES = {
    (STEPS, "independent"): Noise(1, pilots=(0.05,)),
    (STEPS, "10 bands"): Noise(10, rate=0.05, pilots=(0.02,)),
    (USERS, "Poisson, independent"): Noise(1, pilots=(0.01, 0.04)),
    (USERS, "epochs, independent"): Noise(1, is_allocated=True, pilots=(0.01, 0.04)),
    (USERS, "epochs, 10 bands"): Noise(
        10, is_allocated=True, rate=0.05, pilots=(0.02,)
    ),
}


class UserTables(Tables):
    """The glyphs, of which those for training are dealt to users."""

    def load(self, split: str) -> ExampleTable:
        """Returns a split; in each of five rounds a class gives one user four."""
        table = super().load(split)
        if split != TRAIN:
            return table
        random = np.random.default_rng(DEALT)
        order = random.permuted(np.tile(np.arange(DRAWINGS), (CLASSES, 1)), axis=1)
        of_round = order // HAND  # (classes, drawings)
        place = np.stack([random.permutation(CLASSES) for _ in range(SYLLABLES)])
        each = CLASSES // SYLLABLES  # users of one round
        user = (place // SYLLABLES + each * np.arange(SYLLABLES)[:, None])[
            of_round, np.arange(CLASSES)[:, None]
        ].ravel()
        kept = user < NUMBER
        syllable = np.repeat(np.arange(CLASSES), DRAWINGS)
        units = {"user": user[kept], "class": (user * CLASSES + syllable)[kept]}
        return ExampleTable.from_records(np.asarray(table.features)[kept], units=units)


class Correlated(Study):
    """Both settings at each epsilon, also where correlated noise gains nothing."""

    name, repeats, rare = "correlated", 3, (PILOT,)
    keys = ("setting", "noise", "rate", "use", "epsilon")

    def __init__(self) -> None:
        self._tables: dict[str, Tables] = {}

    def runs(self) -> Iterator[Run]:
        """All, those that say most first."""
        for epsilon in (8.0, 1.0, 4.0, 2.0):
            for (setting, name), noise in NOISES.items():
                if (setting, noise.bands) != (STEPS, 1):  # else in few_shot.csv
                    yield setting, name, noise.rate, "", epsilon
                for rate in (noise.rate, *noise.pilots):
                    if epsilon == 8.0:
                        yield setting, name, rate, PILOT, epsilon
        yield USERS, "Poisson, independent", 0.02, "", math.inf

    def number_of(self, run: Run, repeats: int) -> int:
        """Pilots and runs without noise are trained once."""
        return min(repeats, 1) if run[3] or math.isinf(run[4]) else repeats

    def config(self, run: Run) -> TrainingConfig:
        """Returns a run as a config."""
        setting, name, rate, _, epsilon = run
        noise = NOISES[setting, name]
        config = read_config(CONFIGS / "glyphs_linear.toml")
        evaluation, model = config.evaluation, config.model
        assert evaluation is not None and model is not None
        level = "example" if setting == STEPS else "user"
        if setting == USERS:
            config = dataclasses.replace(
                config,
                start=None,
                num_steps=10 * EPOCH,
                normalizer=float(ROUND),
                model=dataclasses.replace(model, embedding=16),
                step=StepConfig(
                    sampling=sampling(noise),
                    clip_unit="user",
                    privacy_unit="user",
                    neighboring_relation="add_remove",
                ),
            )
        if noise.bands > 1:
            bands = NoiseConfig(bands=noise.bands, groups=level, horizon=math.inf)
            config = dataclasses.replace(config, noise=bands)
        return dataclasses.replace(
            config,
            epsilon=epsilon,
            num_steps=self.steps or config.num_steps,
            optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
            features=dataclasses.replace(
                config.features, cache=str(self.out / "features")
            ),
            evaluation=dataclasses.replace(
                evaluation, splits=("validation", "test"), without_noise=False
            ),
        )

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Scores on both splits, the noise, and epsilon by the ledger."""
        del repeat
        begun, config = time.process_time(), self.config(run)
        if run[0] not in self._tables:
            kind = Tables if run[0] == STEPS else UserTables
            # Of classes and drawings: users are made up after the features are loaded.
            plain = self.config((STEPS, "independent", 0.02, "", 8.0))
            self._tables[run[0]] = kind(plain, None)
        scores, trainer, epsilon = trained(
            config, self._tables[run[0]], self.out / "run"
        )
        multiplier = float(trainer.budget.step.noise_multiplier)
        values = {"multiplier": multiplier, "ledger": epsilon}
        return scores | values | cpu_seconds(begun)

    def tables(self, found: Results) -> dict[str, str]:
        """Accuracy at each epsilon; and of the pilots."""
        plain = Results(HERE / "few_shot.csv", FEW_SHOT)
        rows, pilots = [], []
        for (setting, name), noise in NOISES.items():
            cells = []
            for epsilon in EPSILONS:
                run: Run = (setting, name, noise.rate, "", epsilon)
                scores = found.column("test", run)
                if (setting, noise.bands) == (STEPS, 1):
                    run = ("P1", "", "example", "zero_out", epsilon)
                    scores = plain.column("test", run)
                cells.append(shown(scores))
            rows.append([setting, name, *cells])
            for rate in sorted((noise.rate, *noise.pilots)):
                tried = found.column("validation", (setting, name, rate, PILOT, 8.0))
                pilots.append([setting, name, f"{rate:g}", shown(tried)])
        head = ["setting", "noise", *(f"epsilon {e:g}" for e in EPSILONS)]
        tried = ["setting", "noise", "rate", "validation, epsilon 8"]
        return {"correlated": markdown(head, rows), "pilots": markdown(tried, pilots)}


def sampling(noise: Noise) -> jde.MultistageSampling:
    """Returns how a step draws users; in a group each is drawn as often."""
    rate = ROUND * noise.bands / NUMBER
    scheme = (
        jde.RandomAllocation("user", steps_per_epoch=EPOCH // noise.bands)
        if noise.is_allocated
        else jde.Poisson("user", sampling_probability=rate)
    )
    return jde.MultistageSampling(
        scheme,
        jde.WithoutReplacement("class", size=SYLLABLES, population=SYLLABLES),
        jde.WithoutReplacement("example", size=2, population=HAND),
    )


if __name__ == "__main__":
    Correlated().main(__doc__)
