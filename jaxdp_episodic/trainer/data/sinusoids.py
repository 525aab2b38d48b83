"""Sinusoids: the regression tasks of the MAML paper, made up on the spot."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.table import ExampleTable

_MOST_POINTS = 10**7


def make_sinusoids(num_tasks: int, *, points: int, seed: int) -> ExampleTable:
    """Returns tasks ``y = amplitude sin(x - phase)``; levels "task" and "point".

    Amplitude is uniform in [0.1, 5], phase in [0, pi], x in [-5, 5].

    Args:
      num_tasks: whole number >= 1.
      points: points of each task, >= 1.
      seed: whole number >= 0.

    Raises:
      TypeError: no numbers.
      ValueError: a number out of range, or more than 10^7 points in all.

    Reference: Finn, Abbeel, Levine (2017), arXiv:1703.03400, section 5.1.
    """
    for name, value in (("num_tasks", num_tasks), ("points", points)):
        _validation.integer_array(name, value, minimum=1)
    if num_tasks * points > _MOST_POINTS:
        raise ValueError(
            f"num_tasks * points must be at most {_MOST_POINTS}, got {num_tasks} and "
            f"{points}"
        )
    random = np.random.default_rng(seed)
    amplitude = random.uniform(0.1, 5.0, (num_tasks, 1))
    phase = random.uniform(0.0, np.pi, (num_tasks, 1))
    x = random.uniform(-5.0, 5.0, (num_tasks, points))
    y = amplitude * np.sin(x - phase)
    return ExampleTable.from_records(
        x.reshape(-1, 1),
        y.reshape(-1),
        units={"task": np.repeat(np.arange(num_tasks), points)},
        example_level="point",
    )
