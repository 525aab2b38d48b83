"""Checks of correlated noise: its size, and a step that is given up."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.noise import BandMemory
from jaxdp_episodic.trainer.learners.learners import Supervised
from jaxdp_episodic.trainer.run.mechanisms import GradientStep, RunDraws
from jaxdp_episodic.trainer.run.store import RunStore
from jaxdp_episodic.trainer.run.trainer import Trainer
from mutation.verdicts import Effort, Verdict
from oracles.banded import Mechanism
from test_banded_attacks import DESIGNS, claimed, excess, unit, worst
from training_runs import PlainBudget

BANDS = 3
NOISE = 2.5  # noise multiplier
_MOST = 4_000  # entries whose noise is measured
_WIDTH = 5.0  # standard errors
_STEPS, _LOST = 9, 5  # the step that is given up
_LEARNER = Supervised(
    lambda params, inputs: inputs @ params["w"], task_loss="squared_error"
)


def _trainer(
    users: int, empty: int, num_steps: int, clipping: ClippingConfig | None = None
) -> Trainer:
    """Users with gradients far above the clip norm, each in its own entry.

    All of the current group take part. ``empty`` entries more hold noise alone.
    """
    sampling = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=1.0),
        jde.WithoutReplacement("example", size=1, population=1),
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=NOISE, clip_unit="user", privacy_unit="user"
    )
    step = jde.banded(step, jde.Bands(BANDS, level="user"))
    features = 1_000.0 * np.eye(users, users + empty, dtype=np.float32)
    return Trainer(
        _LEARNER,
        {"w": jnp.zeros((users + empty, 1))},
        data=ExampleTable.from_records(
            features, np.ones(users), units={"user": range(users)}
        ),
        budget=PlainBudget(step, 1e9, 1e-5, num_steps, num_steps),
        shots=0,
        optimizer=optax.set_to_zero(),
        l2_clip_norm=1.0,
        normalizer=1.0,
        clipping=clipping,
        block_size=users,
    )


def noised(effort: Effort) -> Verdict:
    """The noise is that of the charge."""
    return _noise(effort, None, NOISE)


def counted(effort: Effort) -> Verdict:
    """A vote as long as the gradient: the noise of both is sqrt(2) times as large."""
    clipping = ClippingConfig(count_noise=0.5, rate=1e-6)
    return _noise(effort, clipping, NOISE * np.sqrt(2))


def _noise(effort: Effort, clipping: ClippingConfig | None, charged: float) -> Verdict:
    """The deviation of the noise of a first release, against the charged one."""
    released: list[np.ndarray] = []
    release = GradientStep.release

    def watched(self: Any, *given: Any) -> Any:
        found = release(self, *given)
        released.append(np.asarray(found[0].gradient["w"], np.float64).ravel())
        return found

    number = min(effort.releases, _MOST)
    run = _trainer(2 * BANDS, number, 1, clipping)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientStep, "release", watched)
        run.train(Path(name) / "run")
    k = np.array(run._gradient._bands.coefficients, float)
    # Decoding divides a first release by the first coefficient.
    noise = released[-1][-number:] * k[0] / np.linalg.norm(k)
    error = charged / np.sqrt(number)  # more than that of a deviation
    words = f"noise {noise.std():.4f}, {charged:.4f} charged"
    return Verdict(bool(noise.std() < charged - _WIDTH * error), words)


def given_up(effort: Effort) -> Verdict:
    """A step is given up by a process that goes on.

    The memory is then empty, and nobody takes part in two of as many steps in a row as
    there are bands.
    """
    del effort
    held: list[int] = []
    drawn: dict[int, set[int]] = {}  # by step; draws ahead of a loss are repeated
    step_of: dict[bytes, int] = {}
    draw, make = RunDraws.draw, RunDraws.secret
    release, store = BandMemory.release, RunStore.release

    def watched_secret(self: RunDraws, step: int) -> Any:
        secret = make(self, step)
        step_of[secret.key] = step
        return secret

    def watched_draw(self: RunDraws, secret: Any) -> Any:
        found = draw(self, secret)
        drawn[step_of[secret.key]] = set(found.examples[found.mask].tolist())
        return found

    def watched_release(self: BandMemory, *given: Any) -> Any:
        held.append(len(self._sums))
        return release(self, *given)

    def watched_store(self: RunStore, number: int, arrays: Any) -> None:
        if number == _LOST:
            raise OSError("the disk is full")
        store(self, number, arrays)

    run = _trainer(30, 0, _STEPS)
    with (
        tempfile.TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        patch.setattr(RunDraws, "secret", watched_secret)
        patch.setattr(RunDraws, "draw", watched_draw)
        patch.setattr(BandMemory, "release", watched_release)
        patch.setattr(RunStore, "release", watched_store)
        warnings.simplefilter("ignore", UserWarning)  # of the step given up
        with pytest.raises(OSError, match="the disk is full"):
            run.train(Path(name) / "run")
        run.train(Path(name) / "run")
    close = [
        step
        for step in range(2, _STEPS + 1)
        for before in range(max(step - BANDS + 1, 1), step)
        if drawn[step] & drawn[before]
    ]
    words = f"{held[_LOST]} sums kept; users of steps shortly before in steps {close}"
    return Verdict(bool(close or held[_LOST]), words)


def sizes(effort: Effort) -> Verdict:
    """The smallest of two groups of five slots has two, of which one is drawn."""
    (design,) = (d for d in DESIGNS if str(d) == "slots, zero_out")
    found = worst(design, Mechanism(unit(4, 3), 1.5), [0, 1, 0, 1], 4 * effort.draws)
    off = excess(found, claimed(design.step(1.5), 4))
    return Verdict(bool(off > _WIDTH), f"{off:.1f} standard errors above the claim")
