"""Checks of correlated noise: real runs of the trainer, killed three times."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.signal import lfilter

import jaxdp_episodic as jde
from crash_rigs import Killed
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.learners import Supervised
from jaxdp_episodic.trainer.run.mechanisms import GradientStep, RunDraws
from jaxdp_episodic.trainer.run.store import RunStore
from jaxdp_episodic.trainer.run.trainer import Trainer
from mutation.verdicts import Effort, Verdict
from oracles import banded
from training_runs import PlainBudget

BANDS = 3
STEPS = 24  # gradient steps, eight of each group
NOISE = 2.5  # noise multiplier
_MOST = 4_000  # canaries
_WIDTH = 5.0  # standard errors


class Run(NamedTuple):
    """What an attacker sees of a run, and what the run held."""

    canaries: int  # number of units and entries; the first half is in the data
    drawn: dict[int, list[int]]  # by turn: users
    released: dict[int, np.ndarray]  # by turn: the decoded sum
    starts: list[int]  # turns at which the memory was empty
    coefficients: np.ndarray  # of norm 1

    @property
    def noise(self) -> dict[int, np.ndarray]:
        """By turn: the decoded sum minus the sum of contributions of -1."""
        sums = {turn: np.zeros(self.canaries) for turn in self.released}
        for turn, total in sums.items():
            total[self.drawn[turn]] = -1.0
        return {turn: self.released[turn] - total for turn, total in sums.items()}

    def rise(self, turn: int) -> float:
        """Noise deviation of a decoded sum, relative to a row of column norm 1."""
        length = turn - self.start(turn) + 1
        unit = np.eye(1, length).ravel()
        return float(np.linalg.norm(lfilter([1.0], self.coefficients, unit)))

    def start(self, turn: int) -> int:
        """The turn at which the memory of this turn began."""
        return max(start for start in self.starts if start <= turn)


def _step(noise: float = NOISE) -> jde.GaussianStep:
    """Everybody in the current group takes part."""
    sampling = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=1.0),
        jde.WithoutReplacement("example", size=1, population=1),
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=noise, clip_unit="user", privacy_unit="user"
    )
    return jde.banded(step, jde.Bands(BANDS, level="user"))


def _trainer(canaries: int, noise: float, clipping: ClippingConfig | None) -> Trainer:
    """Users with gradients far above the clip norm, each in its own entry."""
    there = canaries // 2
    features = np.zeros((there, canaries), np.float32)
    features[np.arange(there), np.arange(there)] = 1_000.0
    data = ExampleTable.from_records(
        features, np.ones(there), units={"user": range(there)}
    )
    return Trainer(
        _LEARNER,
        {"w": jnp.zeros((canaries, 1))},
        data=data,
        budget=PlainBudget(_step(noise), 1e9, 1e-5, STEPS, STEPS),
        shots=0,
        optimizer=optax.set_to_zero(),
        l2_clip_norm=1.0,
        normalizer=1.0,
        clipping=clipping,
        block_size=there,
    )


_LEARNER = Supervised(
    lambda params, inputs: inputs @ params["w"], task_loss="squared_error"
)


def killed(
    canaries: int, noise: float = NOISE, clipping: ClippingConfig | None = None
) -> Run:
    """A run that is killed three times and drops one more step within a process."""
    drawn: dict[int, list[int]] = {}
    released: dict[int, np.ndarray] = {}
    starts, lost, dies = [0], {8: True, 15: False}, {12, 19}
    draw, release, store = RunDraws.draw, GradientStep.release, RunStore.release

    def watched_draw(self: RunDraws, secret: Any) -> Any:
        found = draw(self, secret)
        drawn[number_of[secret.key]] = found.examples[found.mask].tolist()
        return found

    number_of: dict[bytes, int] = {}
    made = RunDraws.secret

    def watched_secret(self: RunDraws, step: int) -> Any:
        secret = made(self, step)
        number_of[secret.key] = step - 1
        return secret

    def watched_release(self: Any, state: Any, number: int, prepared: Any) -> Any:
        found, private = release(self, state, number, prepared)
        if number not in lost:
            released[number - 1] = np.asarray(found.gradient["w"], np.float64).ravel()
        return found, private

    def watched_store(self: RunStore, number: int, arrays: Any) -> None:
        if number in lost:
            starts.append(number)
            raise Killed if lost[number] else OSError("the disk is full")
        store(self, number, arrays)
        if number in dies:
            starts.append(number)
            raise Killed

    with (
        tempfile.TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        patch.setattr(RunDraws, "draw", watched_draw)
        patch.setattr(RunDraws, "secret", watched_secret)
        patch.setattr(GradientStep, "release", watched_release)
        patch.setattr(RunStore, "release", watched_store)
        warnings.simplefilter("ignore", UserWarning)  # of steps given up
        folder, run = Path(name) / "run", _trainer(canaries, noise, clipping)
        while True:
            try:
                run.train(folder, checkpoint_every=3)
                break
            except OSError:
                pass
            except Killed:
                run = _trainer(canaries, noise, clipping)
                run.resume(folder)
    k = np.array(run._gradient._bands.coefficients, float)
    return Run(canaries, drawn, released, starts, k / np.linalg.norm(k))


def turns(effort: Effort) -> Verdict:
    """Nobody takes part in two of as many steps in a row as there are bands."""
    del effort
    drawn = killed(60).drawn
    close = [
        turn
        for turn in range(1, STEPS)
        for before in range(max(turn - BANDS + 1, 0), turn)
        if set(drawn[turn]) & set(drawn[before])
    ]
    return Verdict(bool(close), f"users of steps shortly before in steps {close}")


def decoded(effort: Effort) -> Verdict:
    """The optimizer gets the sum plus noise with mean zero."""
    deviation = 0.5
    run = killed(min(effort.releases, _MOST), deviation)
    found = [
        abs(noise[run.drawn[other]].mean())
        * np.sqrt(len(run.drawn[other]))
        / (deviation * run.rise(turn))
        for turn, noise in run.noise.items()
        for other in range(turn + 1)
    ]
    off = float(max(found))
    return Verdict(bool(off > _WIDTH), f"{off:.1f} standard errors off")


def noised(effort: Effort) -> Verdict:
    """The noise is that of the charge."""
    return _noise(killed(min(effort.releases, _MOST)), NOISE)


def counted(effort: Effort) -> Verdict:
    """A vote as long as the gradient: the noise of both is sqrt(2) times as large."""
    clipping = ClippingConfig(count_noise=0.5, rate=1e-6)
    run = killed(min(effort.releases, _MOST), clipping=clipping)
    return _noise(run, NOISE * np.sqrt(2))


def _noise(run: Run, charged: float) -> Verdict:
    """The deviation of the noise of all releases, against the charged one."""
    noise = np.concatenate([n / run.rise(turn) for turn, n in run.noise.items()])
    error = charged / np.sqrt(len(noise))  # more than that of a deviation
    words = f"noise {noise.std():.4f}, {charged:.4f} charged"
    return Verdict(bool(noise.std() < charged - _WIDTH * error), words)


def sizes(effort: Effort) -> Verdict:
    """One of seven slots in four groups: the smallest group has one, always drawn."""
    step = jde.banded(
        jde.GaussianStep(
            jde.WithoutReplacement("example", size=1, population=7),
            noise_multiplier=2.0,
            neighboring_relation="zero_out",
        ),
        jde.Bands(4, level="example"),
    )
    runs = banded.independent([{("u",) if t == 3 else (): 1.0} for t in range(8)])
    worlds = tuple(
        banded.World(runs, {"u": lambda t, y, value=value: value})
        for value in (1.0, 0.0)
    )
    mechanism = banded.Mechanism(np.full(4, 0.5), 2.0)
    rng = np.random.default_rng(0)
    found = banded.simulated(mechanism, worlds, (0.5,), 4 * effort.draws, rng)
    claimed = float(jde.delta(step, num_steps=4, epsilon=0.5))
    true, error = found.values.max(), found.errors.max()
    words = f"delta {true:.4f} +- {error:.4f} simulated, {claimed:.4f} claimed"
    return Verdict(bool(true > claimed + _WIDTH * error), words)
