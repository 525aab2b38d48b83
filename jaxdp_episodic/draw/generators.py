"""The random generators of a run's draws: functions of its entropy."""

from __future__ import annotations

import numpy as np


def step_generator(entropy: int, step: int) -> np.random.Generator:
    """Returns the random generator of one step, a function of its arguments only.

    So a resumed run draws what the interrupted one would have drawn, with the same
    version of NumPy. The generator (PCG64DXSM, seeded through a 128-bit hash) is
    statistically strong, not cryptographically: whoever sees many raw numbers of it
    could predict others. Draws therefore stay secret, and so does the entropy.

    Args:
      entropy: whole number >= 0 of any size; from the operating system, of 128 bits or
        more, for a private run.
      step: whole number >= 0; different steps have independent streams.

    Raises:
      TypeError: an argument that is not a whole number.
      ValueError: a negative one.
    """
    return _generator(entropy=entropy, step=step)


def epoch_generator(entropy: int, epoch: int) -> np.random.Generator:
    """Returns that of an epoch, counted from 0; see `step_generator`.

    Its stream is none of a step's: the words of a number end in one that is not 0,
    unless it is 0 itself, and those of an epoch in a 0 behind its number.
    """
    return _generator(0, entropy=entropy, epoch=epoch)


def _generator(*more: int, entropy: int, **number: int) -> np.random.Generator:
    for name, value in {"entropy": entropy, **number}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number >= 0, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be a whole number >= 0, got {value}")
    key = (*map(int, number.values()), *more)
    seed = np.random.SeedSequence(int(entropy), spawn_key=key)
    return np.random.Generator(np.random.PCG64DXSM(seed))
