"""Rotations of every class as classes of their own."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable

TURNS = 4
"""Classes that are made of each: turned by 0, 90, 180 and 270 degrees."""
_SUFFIXES = ("", "@90", "@180", "@270")  # of the names of classes


def with_rotations(table: ExampleTable) -> ExampleTable:
    """Returns the table with four classes of each: its images turned by 90 degrees.

    The classes of ``"a"`` are ``"a"``, ``"a@90"``, ``"a@180"`` and ``"a@270"``, in the
    same unit of the level above. ``originals`` of the table says which examples are
    copies of one: protect them together, by ``privacy_unit="original"`` with
    ``PersonBounds(examples=1, classes=4)``. A run that would protect one copy alone is
    refused. Rotate each part of a split, so that all copies of a class are in one part.
    Features are read into memory, four times as many as before.

    Args:
      table: images (R, side, side) or (R, side, side, channels) in classes, without
        targets.

    Raises:
      ValueError: no classes, no square images, targets, copies that are there already,
        or classes that are called as copies will be.
    """
    shape = table.features.shape
    if len(shape) not in (3, 4) or shape[1] != shape[2]:
        raise ValueError(
            "rotations are of square images, (side, side) or (side, side, channels), "
            f"got features of shape {shape[1:]}"
        )
    if len(table.level_names) < 2:
        raise ValueError(f"rotations are of classes, got levels {table.level_names}")
    if table.targets is not None:
        raise ValueError("rotations are of classes without targets, got targets")
    if table.originals is not None:
        raise ValueError("rotations are of data without copies, got a table with some")
    *above, sizes = table.population.children_counts
    above[-1] = above[-1] * TURNS
    starts = np.cumsum(sizes) - sizes
    # Four classes in place of each: of which row, turned how often, each one is.
    turned_sizes = np.repeat(sizes, TURNS)
    turn = np.repeat(np.tile(np.arange(TURNS), len(sizes)), turned_sizes)
    begins = np.cumsum(turned_sizes) - turned_sizes
    row = np.repeat(np.repeat(starts, TURNS) - begins, turned_sizes)
    row = row + np.arange(len(turn))
    images = np.asarray(table.features[:])
    features = np.empty((len(turn), *shape[1:]), images.dtype)
    for times in range(TURNS):
        here = turn == times
        features[here] = np.rot90(images, times, axes=(1, 2))[row[here]]
    tree = Population((*above, turned_sizes), table.level_names, _turned_ids(table))
    return dataclasses.replace(
        table,
        features=features,
        population=tree,
        owners=None if table.owners is None else table.owners.take(row),
        originals=Owners(row, np.arange(table.num_examples)),
    )


def _turned_ids(table: ExampleTable) -> tuple[np.ndarray, ...] | None:
    """Ids of the units, with those of the copies beside each class's own."""
    last = len(table.level_names) - 1
    ids = table.population.unit_ids
    if ids is None or len(ids) < last:
        return ids
    *above, classes = ids[:last]
    made = [f"{name}{suffix}" for name in classes.tolist() for suffix in _SUFFIXES]
    if len(set(made)) < len(made):
        raise ValueError(
            f"classes must not have the name of a rotation, such as 'a{_SUFFIXES[1]}' "
            "beside 'a'"
        )
    return (*above, np.array(made))
