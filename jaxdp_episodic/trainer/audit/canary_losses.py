"""What a model's loss says of each canary: episodes made around it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.trainer.audit.canaries import Canaries
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import Block, block_of, to_episode

# Episodes around each canary, with other random companions.
_CONTEXTS = 8


def canary_losses(
    learner: Any,
    params: Sequence[Any],
    canaries: Canaries,
    *,
    slot_shape: tuple[int, ...],
    shots: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns each canary's loss under each of the parameters, (len(params), number).

    An episode is made around every canary, whether it was in or out: an example is its
    only query, a larger unit is support and query. Means over a few episodes with other
    companions, which the generator picks.

    Raises:
      NotImplementedError: clip units that are more than one episode.
    """
    axes = 1 if learner.is_regression else 2
    if len(slot_shape) != axes:
        raise NotImplementedError(
            "input canaries need clip units that are one episode (of slots "
            f"{'(example,)' if axes == 1 else '(class, example)'}), got slots of shape "
            f"{slot_shape}"
        )
    total = np.zeros((len(params), canaries.number))
    slots_of = _task if axes == 1 else _classes
    make = functools.partial(slots_of, canaries.table.class_places, generator)
    groups = [canaries.rows[canaries.owner == c] for c in range(canaries.number)]

    @jax.jit
    def losses(one: Any, block: Block) -> Any:
        def loss(unit: Block) -> Any:
            unit = as_trained(unit, training_dtype(one))
            episode = to_episode(unit, shots=shots, is_regression=learner.is_regression)
            return learner.loss(one, episode)

        return jax.lax.map(loss, block)

    for _ in range(_CONTEXTS):
        slots = np.stack([make(rows, slot_shape, shots) for rows in groups])
        block = block_of(canaries.table, slots, slots >= 0, np.ones(len(slots)))
        for of_params, one in zip(total, params, strict=True):
            of_params += np.asarray(losses(one, block), np.float64)
    return total / _CONTEXTS


def _task(
    class_of: np.ndarray,
    generator: np.random.Generator,
    rows: np.ndarray,
    slot_shape: tuple[int, ...],
    shots: int,
) -> np.ndarray:
    """(n,) rows of one task, -1 where a slot stays empty; ``rows`` are the canary's."""
    task = np.flatnonzero(class_of == class_of[rows[0]])
    slots = np.full(slot_shape, -1)
    if len(rows) == 1 and len(task) > 1:  # an example: learned from the others
        support = generator.permutation(np.setdiff1d(task, rows))[:shots]
        slots[: len(support)] = support
        slots[shots] = rows[0]
    else:
        own = generator.permutation(rows)[: slot_shape[0]]
        slots[: len(own)] = own
    return slots


def _classes(
    class_of: np.ndarray,
    generator: np.random.Generator,
    rows: np.ndarray,
    slot_shape: tuple[int, ...],
    shots: int,
) -> np.ndarray:
    """(ways, n) rows of an episode of classes, likewise."""
    ways, number = slot_shape
    own = np.unique(class_of[rows])
    is_example = len(rows) == 1 and np.sum(class_of == own[0]) > 1
    asked = generator.permutation(own)[:ways]
    others = np.setdiff1d(np.unique(class_of), own)
    fill = generator.permutation(others)[: ways - len(asked)]
    slots = np.full(slot_shape, -1)
    for way, class_ in enumerate([*asked, *fill]):
        members = np.flatnonzero(class_of == class_)
        if is_example:
            members = np.setdiff1d(members, rows)
        most = shots if is_example or way >= len(asked) else number
        members = generator.permutation(members)[:most]
        slots[way, : len(members)] = members
    if is_example:
        slots[0, shots] = rows[0]
    return slots
