"""Episodes that ask a model about one canary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic.audit.canaries import Canaries
from jaxdp_episodic.training.blocks import Block
from jaxdp_episodic.training.contribution import to_episode

# Each canary is asked about among several random companions.
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
    """Returns each canary's loss under each of several parameters.

    An episode is made around every canary, whether it was in or out: an example is its
    only query, a larger unit is learned from and asked by its own examples. The mean
    over a few episodes with other companions.

    Args:
      learner: of the run.
      params: several parameters.
      canaries: with all contents.
      slot_shape: of the run's sampler.
      shots: support examples.
      generator: picks the companions.

    Returns:
      (len(params), number) float64.

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
    make = _task if axes == 1 else _classes

    @jax.jit
    def losses(one: Any, block: Block) -> Any:
        def loss(unit: Block) -> Any:
            episode = to_episode(unit, shots=shots, is_regression=learner.is_regression)
            return learner.loss(one, episode)

        return jax.lax.map(loss, block)

    for _ in range(_CONTEXTS):
        slots = [
            make(canaries, canary, slot_shape, shots, generator)
            for canary in range(canaries.number)
        ]
        block = _block(canaries, np.stack(slots))
        for place, one in enumerate(params):
            total[place] += np.asarray(losses(one, block), np.float64)
    return total / _CONTEXTS


def _task(
    canaries: Canaries,
    canary: int,
    slot_shape: tuple[int, ...],
    shots: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """(n,) rows of one task, -1 where a slot stays empty."""
    places = canaries.table.class_places
    rows = canaries.rows[canaries.owner == canary]
    task = np.flatnonzero(places == places[rows[0]])
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
    canaries: Canaries,
    canary: int,
    slot_shape: tuple[int, ...],
    shots: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """(ways, n) rows of an episode of classes, -1 where a slot stays empty."""
    ways, number = slot_shape
    places = canaries.table.class_places
    rows = canaries.rows[canaries.owner == canary]
    own = np.unique(places[rows])
    is_example = len(rows) == 1 and np.sum(places == own[0]) > 1
    asked = generator.permutation(own)[:ways]
    others = np.setdiff1d(np.unique(places), own)
    fill = generator.permutation(others)[: ways - len(asked)]
    slots = np.full(slot_shape, -1)
    for way, class_ in enumerate([*asked, *fill]):
        members = np.flatnonzero(places == class_)
        if is_example:
            members = np.setdiff1d(members, rows)
        members = generator.permutation(members)
        if is_example or way >= len(asked):
            slots[way, : min(shots, len(members))] = members[:shots]
            continue
        slots[way, : min(number, len(members))] = members[:number]
    if is_example:
        slots[0, shots] = rows[0]
    return slots


def _block(canaries: Canaries, slots: np.ndarray) -> Block:
    """The rows as a block, one episode each."""
    table = canaries.table
    mask = slots >= 0
    features = table.features[np.where(mask, slots, 0)]
    shape = mask.shape + (1,) * (features.ndim - mask.ndim)
    of_example = table.class_places if table.targets is None else table.targets
    targets = np.where(mask, of_example[np.where(mask, slots, 0)], 0)
    return Block(
        jnp.asarray(features * mask.reshape(shape).astype(features.dtype)),
        jnp.asarray(targets, jnp.float32),
        jnp.asarray(mask, jnp.float32),
        jnp.ones(len(slots), jnp.float32),
    )
