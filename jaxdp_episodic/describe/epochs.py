"""How the epochs of a run lie: its blocks, and what is owed within one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.describe.designs import Sampling, epoch_scheme
from jaxdp_episodic.describe.schemes import EpochScheme, RandomAllocation


def block_lengths(scheme: EpochScheme) -> np.ndarray:
    """Returns the steps in each block of an epoch, in order.

    A unit takes part in one step of every block; shuffled epochs are one block.

    Args:
      scheme: its fields scalars.
    """
    steps = int(np.asarray(scheme.steps_per_epoch))
    is_allocated = isinstance(scheme, RandomAllocation)
    times = int(np.asarray(scheme.times)) if is_allocated else 1
    return np.full(times, steps // times) + (np.arange(times) < steps % times)


def steps_owed(sampling: Sampling, num_steps: ArrayLike, planned: int) -> np.ndarray:
    """Returns the steps that a run owes if it ends, or stands, after ``num_steps``.

    Where every step draws anew, so many. Within an epoch those of the whole one, which
    a run that stopped for what it saw would have finished: the accounting of a part
    holds for a part that was fixed in advance, and the end that was planned is.

    Args:
      sampling: of the steps, its fields scalars.
      num_steps: whole numbers >= 0 of any shape.
      planned: the number of steps that was fixed before the first.

    Returns:
      int64 of that shape.
    """
    taken = np.asarray(num_steps, np.int64)
    scheme = epoch_scheme(sampling)
    if scheme is None:
        return taken
    length = int(np.asarray(scheme.steps_per_epoch))
    whole = -(-taken // length) * length
    return np.where(taken <= planned, np.minimum(whole, planned), whole)
