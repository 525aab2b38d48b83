"""From a step to the tables of a run of it: of epochs by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxdp_episodic.accountant.describe.designs import block_lengths, epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import ShuffledEpochs
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.audit.worst_case import Branches, dominating_branches


def tables_of_run(
    make: Callable[[GaussianStep, int], Branches],
    step: GaussianStep,
    num_steps: int,
    path: int = 0,
) -> list[tuple[Branches, int]]:
    """Returns the tables of so many steps, and how often each of them comes.

    Args:
      make: `worst_case` or `dominating_branches`.
      step: one setting; all fields scalars.
      num_steps: of the run. The last epoch may be a part, fixed in advance.
      path: which of the distinct paths of the step's population.
    """
    table, scheme = make(step, path), epoch_scheme(step.design)
    if scheme is None:
        return [(table, num_steps)]
    is_pair = make is dominating_branches and step.neighboring_relation != "zero_out"
    if is_pair and isinstance(scheme, ShuffledEpochs):
        # The pair of an epoch, begun or finished.
        return [(table, -(-num_steps // int(block_lengths(scheme).sum())))]
    found = Counter(blocks_of_run(step, num_steps))
    return [
        (table._replace(block=length, taken=taken), count)
        for (length, taken), count in found.items()
    ]


def blocks_of_run(step: GaussianStep, num_steps: int) -> list[tuple[int, int]]:
    """Returns the length of each block of a run in epochs, and how much is taken.

    Steps that draw anew are blocks of one.
    """
    scheme = epoch_scheme(step.design)
    if scheme is None:
        return [(1, 1)] * num_steps
    lengths = block_lengths(scheme).tolist()
    epochs, rest = divmod(num_steps, sum(lengths))
    found = [(length, length) for length in lengths] * epochs
    for length in lengths:
        if rest > 0:
            found.append((length, min(rest, length)))
        rest -= length
    return found
