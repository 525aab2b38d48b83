"""One episode: what is learned from, and what it is judged by."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Episode(NamedTuple):
    """Support and query of one episode (no leading axis over episodes).

    Attributes:
      support_inputs: (S, *features).
      support_targets: (S,) int32 classes in [0, ways), or float32 values.
      support_mask: (S,) float32, 1 where there is an example.
      query_inputs: (Q, *features).
      query_targets: (Q,).
      query_mask: (Q,) float32.
    """

    support_inputs: Array
    support_targets: Array
    support_mask: Array
    query_inputs: Array
    query_targets: Array
    query_mask: Array


def classification_episode(inputs: Array, mask: Array, *, shots: int) -> Episode:
    """Returns the episode of ``ways`` classes, the label being the class's place.

    Args:
      inputs: (ways, shots + queries, *features). The slots of a class are in random
        order with those that are filled first, so the support is filled first.
      mask: (ways, shots + queries) float32.
      shots: support examples of each class.
    """
    ways, slots = mask.shape
    labels = jnp.broadcast_to(jnp.arange(ways)[:, None], (ways, slots))

    def part(array: Array, first: int, last: int) -> Array:
        return array[:, first:last].reshape(-1, *array.shape[2:])

    return Episode(
        *(part(array, 0, shots) for array in (inputs, labels, mask)),
        *(part(array, shots, slots) for array in (inputs, labels, mask)),
    )


def regression_episode(
    inputs: Array, targets: Array, mask: Array, *, shots: int
) -> Episode:
    """Returns the episode of one task.

    Args:
      inputs: (n, *features), filled slots first.
      targets: (n,) float32.
      mask: (n,) float32.
      shots: support examples.
    """
    arrays = (inputs, targets, mask)
    return Episode(*(a[:shots] for a in arrays), *(a[shots:] for a in arrays))
