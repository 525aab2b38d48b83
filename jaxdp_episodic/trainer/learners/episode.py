"""From a draw to the loss of each clip unit: blocks and episodes.

The size of a Poisson draw varies. Its clip units are cut into blocks of one fixed size;
unused rows are masked, and a draw larger than a block fills several. No drawn unit is
ever left out, because a cap would void the guarantee.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler

T = TypeVar("T")
# Items made ahead.
_AHEAD = 2


class Block(NamedTuple):
    """B clip units of one draw, with all of their drawn examples."""

    inputs: Any  # (B, *slots, *features)
    # (B, *slots) float32: the examples' targets, or the indices of their classes among
    # all classes.
    targets: Any
    slot_mask: Any  # (B, *slots) float32, 1 where a slot holds an example
    # (B,) float32, 1 where a row holds a drawn unit without a null slot. All other rows
    # contribute zero.
    unit_mask: Any


def default_block_size(sampler: EpisodeSampler, num_shards: int = 1) -> int:
    """Returns a block size that fits almost every draw, a multiple of the shards."""
    mean = sampler.expected_units
    wanted = min(math.ceil(mean + 3.0 * math.sqrt(mean) + 1), sampler.max_units)
    return num_shards * math.ceil(max(wanted, 1) / num_shards)


def make_blocks(
    draw: Draw,
    table: ExampleTable,
    *,
    block_size: int,
    num_shards: int = 1,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Block]:
    """Yields the blocks of a draw: at least one, also for an empty draw."""
    # Each device that shares a block gets consecutive rows; units are assigned in turn.
    # A process, (index, number), gets the units whose index has this remainder.
    mine = np.arange(len(draw.mask))[share[0] :: share[1]]
    for place in range(math.ceil(max(len(mine), 1) / block_size)):
        taken = mine[place * block_size : (place + 1) * block_size]
        rows = np.full(block_size, -1)
        rows[: len(taken)] = taken
        rows = rows.reshape(-1, num_shards).T.ravel()
        present = rows >= 0
        if len(draw.mask):
            if draw.holds_null is not None:
                # Under zero_out the whole contribution is zero, not only null slots.
                present &= ~draw.holds_null[rows]
            examples = draw.examples[rows]  # row -1 is masked below
            mask = draw.mask[rows] & _column(present, draw.mask.ndim)
        else:
            examples = np.zeros((block_size, *draw.mask.shape[1:]), np.int64)
            mask = np.zeros(examples.shape, bool)
        yield block_of(table, examples, mask, present)


def block_of(
    table: ExampleTable, examples: np.ndarray, mask: np.ndarray, present: np.ndarray
) -> Block:
    """Returns the block with these examples in its slots, and zeros where masked."""
    of_example = table.class_places if table.targets is None else table.targets
    inputs = np.zeros((*mask.shape, *table.features.shape[1:]), table.features.dtype)
    targets = np.zeros(mask.shape, np.float32)
    inputs[mask], targets[mask] = (
        column[examples[mask]] for column in (table.features, of_example)
    )
    return Block(inputs, targets, mask.astype(np.float32), present.astype(np.float32))


def zero_block(
    table: ExampleTable,
    slot_shape: tuple[int, ...],
    block_size: int,
    seen: int | None = None,
) -> Block:
    """Returns a block of zeros like a table's, of ``seen`` features if projected."""
    none = np.zeros((block_size, *slot_shape), bool)
    block = block_of(table, none.astype(int), none, np.zeros(block_size))
    if seen is None:
        return block
    return block._replace(inputs=np.zeros((*none.shape, seen), np.float32))


def _column(array: Any, num_axes: int) -> Any:
    """Returns the array with trailing axes of size 1."""
    return array.reshape(array.shape + (1,) * (num_axes - array.ndim))


def prefetched(
    make: Callable[..., T], arguments: Iterable[tuple[Any, ...]]
) -> Generator[T, None, None]:
    """Yields ``make(*each)`` for each item of ``arguments``, made ahead in a thread.

    A consumer that may stop early must close this generator, which waits for at most
    the item in progress. If it were left to the garbage collector, it might wait in a
    thread that holds a lock needed by that item.
    """
    # The caller's thread iterates over the arguments. The trainer makes draws and
    # noise, and reads data, ahead in this way, before their step is charged. That is
    # safe: nothing leaves this process before the charge is on disk, and unused items
    # are discarded.
    with ThreadPoolExecutor(1, thread_name_prefix="draw") as pool:
        waiting: list[Future[T]] = []
        try:
            for each in arguments:
                waiting.append(pool.submit(make, *each))
                if len(waiting) > _AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


class Episode(NamedTuple):
    """Support and query set of one episode (no leading axis over episodes).

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
    """Returns the episode of ``ways`` classes; labels are the classes' indices.

    Args:
      inputs: (ways, shots + queries, *features). Each class's slots are in random order
        with the filled ones first, so the support is filled first.
      mask: (ways, shots + queries) float32.
      shots: support examples per class.
    """
    places = jnp.arange(len(mask), dtype=jnp.int32)
    arrays = inputs, jnp.broadcast_to(places[:, None], mask.shape), mask
    halves = [a[:, :shots] for a in arrays] + [a[:, shots:] for a in arrays]
    return Episode(*(half.reshape(-1, *half.shape[2:]) for half in halves))


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


class Learner(Protocol):
    """The interface that the trainer requires of a learner.

    If the loss is a mean over examples that do not interact, the learner may have an
    attribute ``couples_examples = False``. Single examples may then be clipped.
    """

    @property
    def is_regression(self) -> bool:
        """Whether targets are numbers (True) or classes (False)."""
        ...

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the query loss of one episode, a scalar; 0 without queries."""
        ...

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns predictions for the queries: (Q, ways) logits, or (Q,) values."""
        ...


def to_episode(unit: Block, *, shots: int, is_regression: bool) -> Episode:
    """Returns the episode in a block's row whose slots form one episode."""
    if is_regression:
        return regression_episode(*unit[:3], shots=shots)
    return classification_episode(unit.inputs, unit.slot_mask, shots=shots)


def contribution_loss(
    learner: Learner, slot_shape: tuple[int, ...], *, shots: int
) -> Callable[[Any, Block], Array]:
    """Returns ``loss(params, unit)``, whose gradient is a clip unit's contribution."""
    # The clip unit must contain at least one whole episode, because within an episode
    # every support example changes every term of the loss. If a part of an episode were
    # clipped, one example would change all parts (locality; docs/theory.md, "The
    # setting and its preconditions"). For a learner that couples nothing
    # (`Supervised`), any unit may be clipped, even a single example.
    if not getattr(learner, "couples_examples", True):
        if shots != 0:
            raise ValueError(
                f"shots must be 0 with {type(learner).__name__}, which uses no "
                f"support, got {shots!r}"
            )
        return _supervised_loss(learner, slot_shape)
    _validation.whole_number("shots", shots)
    axes = 1 if learner.is_regression else 2
    if len(slot_shape) < axes:
        raise ValueError(
            f"clip_unit must contain a whole episode of {type(learner).__name__} "
            f"({axes} level(s) below it: support and query interact), but has "
            f"{len(slot_shape)} level(s) below it; clip the episode or task"
        )
    if slot_shape[-1] <= shots:
        raise ValueError(
            "shots must be less than the sampled examples (some must be queries), "
            f"got shots={shots} of {slot_shape[-1]}"
        )
    ways = None if learner.is_regression else getattr(learner, "ways", None)
    if ways is not None and ways != slot_shape[-2]:
        raise ValueError(
            "ways must be the number of classes in a sampled episode, "
            f"{slot_shape[-2]}, got a {type(learner).__name__} with ways={ways}"
        )
    return _episodic_loss(learner, slot_shape, axes, shots)


# Cached: returns one function per learner, which is compiled once.
@functools.lru_cache(maxsize=8)
def _episodic_loss(
    learner: Learner, slot_shape: tuple[int, ...], axes: int, shots: int
) -> Callable[[Any, Block], Array]:
    """Returns the mean loss over the drawn episodes of a clip unit."""
    # Dividing by the number of slots would be wrong: for Poisson sampling it is the
    # largest number of children of *any* unit, so that one growing unit would change
    # all contributions.
    around, within = slot_shape[:-axes], slot_shape[-axes:]
    number = math.prod(around)

    def episode_loss(params: Any, unit: Block) -> Array:
        episode = to_episode(unit, shots=shots, is_regression=learner.is_regression)
        return learner.loss(params, episode)

    if not around:
        return episode_loss

    def mean_loss(params: Any, unit: Block) -> Array:
        episodes = Block(
            *(
                a.reshape(number, *within, *a.shape[len(slot_shape) :])
                for a in unit[:3]
            ),
            unit_mask=jnp.ones(number, unit.slot_mask.dtype),
        )
        # Each is recomputed in the backward pass, which needs memory for one episode.
        one = jax.checkpoint(lambda episode: episode_loss(params, episode))
        losses = jax.lax.map(one, episodes)
        there = jnp.any(episodes.slot_mask.reshape(number, -1) > 0, axis=1)
        total = jnp.sum(jnp.where(there, losses, 0.0))
        return total / jnp.maximum(jnp.sum(there.astype(total.dtype)), 1.0)

    return mean_loss


@functools.lru_cache(maxsize=8)
def _supervised_loss(
    learner: Learner, slot_shape: tuple[int, ...]
) -> Callable[[Any, Block], Array]:
    """Returns the mean loss over all examples in the clip unit, as queries."""
    number = math.prod(slot_shape)

    def loss(params: Any, unit: Block) -> Array:
        inputs = unit.inputs.reshape(number, *unit.inputs.shape[len(slot_shape) :])
        kind = unit.slot_mask.dtype if learner.is_regression else jnp.int32
        targets = unit.targets.reshape(number).astype(kind)
        mask = unit.slot_mask.reshape(number)
        episode = regression_episode(inputs, targets, mask, shots=0)
        return learner.loss(params, episode)

    return loss
