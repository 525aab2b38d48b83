"""From a draw to blocks of episodes: static shapes for the compiler, nothing dropped.

A Poisson draw has a different size at every step. Its clip units are cut into blocks of
one fixed size; what a block has too much is masked, and a draw that is larger than a
block makes more blocks. No drawn unit is ever left out: a cap would void the guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.draw.sampler import Draw, EpisodeSampler

T = TypeVar("T")


class Block(NamedTuple):
    """B clip units of one draw, with everything that was drawn of each.

    Attributes:
      inputs: (B, *slots, *features).
      targets: (B, *slots) float32: the examples' targets, or the places of their
        classes among all classes.
      slot_mask: (B, *slots) float32, 1 where a slot holds an example.
      unit_mask: (B,) float32, 1 where a row holds a drawn unit without a null one in
        it; all other rows contribute zero.
    """

    inputs: Any
    targets: Any
    slot_mask: Any
    unit_mask: Any


def default_block_size(sampler: EpisodeSampler, num_shards: int = 1) -> int:
    """Returns a block size that holds almost every draw, a multiple of the shards."""
    mean = sampler.expected_units
    wanted = min(math.ceil(mean + 3.0 * math.sqrt(mean) + 1), sampler.max_units)
    return num_shards * math.ceil(max(wanted, 1) / num_shards)


def make_blocks(
    draw: Draw, table: ExampleTable, *, block_size: int, num_shards: int = 1
) -> list[Block]:
    """Returns the blocks of a draw: at least one, also for an empty draw.

    Args:
      draw: of a sampler over ``table.population``.
      table: the data, in the order of that population.
      block_size: units a block, a multiple of ``num_shards``.
      num_shards: devices that share a block, each a run of consecutive rows. Units are
        dealt out in turn, so that every device gets equally many.
    """
    number = len(draw.mask)
    blocks = []
    for start in range(0, max(number, 1), block_size):
        stop = min(start + block_size, number)
        rows = np.full(block_size, -1)
        rows[: stop - start] = np.arange(start, stop)
        rows = rows.reshape(-1, num_shards).T.ravel()
        blocks.append(_block(draw, table, rows))
    return blocks


def _block(draw: Draw, table: ExampleTable, rows: np.ndarray) -> Block:
    present = rows >= 0
    if len(draw.mask):
        if draw.holds_null is not None:
            # Under zero_out: the whole contribution, not only the null's slots.
            present &= ~draw.holds_null[rows]
        examples = draw.examples[rows]  # row -1 is masked below
        mask = draw.mask[rows] & _column(present, draw.mask.ndim)
    else:
        examples = np.zeros((len(rows), *draw.mask.shape[1:]), np.int64)
        mask = np.zeros(examples.shape, bool)
    examples = np.where(mask, examples, 0)
    features = table.features
    # Not a product: what stands in for a masked slot is example 0, and were that one
    # not finite, its product with zero would be in everybody's slots.
    inputs = np.where(
        _column(mask, mask.ndim + features.ndim - 1),
        features[examples],
        features.dtype.type(0),
    )
    of_example = table.class_places if table.targets is None else table.targets
    targets = np.where(mask, of_example[examples], 0).astype(np.float32)
    return Block(inputs, targets, mask.astype(np.float32), present.astype(np.float32))


def _column(array: np.ndarray, num_axes: int) -> np.ndarray:
    """The array with trailing axes of size 1."""
    return array.reshape(array.shape + (1,) * (num_axes - array.ndim))


def prefetched(
    make: Callable[[int], T], first: int, last: int, *, depth: int = 2
) -> Iterator[T]:
    """Yields ``make(first), ..., make(last)``, made ahead by another thread.

    ``make`` must depend on its argument only. What it raises is raised here. A consumer
    that stops early waits for at most the item being made.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="draw") as pool:
        waiting: list[Future[T]] = []
        try:
            for number in range(first, last + 1):
                waiting.append(pool.submit(make, number))
                if len(waiting) > depth:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
