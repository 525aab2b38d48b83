"""Training, validation and test splits, what they share, and rotated copies."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.data.fields import CheckedSpec, within
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
SPLITS = (TRAIN, VALIDATION, TEST)

_SALT = "jaxdp-episodic split 1: "
_Share = Annotated[float, within(0.0, 1.0, "[)")]
_salt = functools.partial(_validation.instance, kinds=str, words="a string")


def salted_fraction(salt: str, name: Any) -> float:
    """Returns a number in [0, 1) that depends only on a name and a salt."""
    digest = hashlib.sha256(f"{salt}{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


class ClassSplit(CheckedSpec):
    """Splits classes into train, validation and test by a keyed hash of their names.

    A class is the unit directly above the examples (for regression, a task). Its split
    depends only on its own name and on the fields below: not on the number, size,
    order or content of the classes. So adding or removing a class never moves another.
    Tables that differ by one unit added, removed or emptied have training parts that
    differ in at most that unit, and a guarantee for the training part holds for the
    whole table. It does not hold for a unit replaced by one of *another* name, because
    that unit may fall into another split. Held-out classes are not protected: scores
    computed on them disclose them.

    The shares are expected shares. A public size in a design, such as ``num_classes``,
    must be that of the training part: count it with `mask` on the public list of names.
    If classes are protected and their number is private, bound it without looking at
    the data.

    Attributes:
      validation: expected share of classes for choosing settings, in [0, 1).
      test: expected share of classes for testing; both shares sum to less than 1. A
        test class stays a test class for any share of validation.
      salt: key of the hash.
    """

    validation: _Share = 0.0
    test: _Share = 0.0
    salt: Annotated[str, _salt] = ""

    def check_values(self) -> None:
        """Refuses shares that leave nothing for training."""
        if not self.validation + self.test < 1:
            raise ValueError(
                "validation + test must be less than 1, so that some classes are left "
                f"for training; got {self.validation:g} + {self.test:g}"
            )

    def split_of(self, name: Any) -> str:
        """Returns "train", "validation" or "test" for the class of this name.

        Names are normalized, so both Unicode forms of a name give the same split.
        """
        composed = unicodedata.normalize("NFC", str(name))
        fraction = salted_fraction(f"{_SALT}{self.salt}: ", composed)
        if fraction < self.test:
            return TEST
        return VALIDATION if fraction < self.test + self.validation else TRAIN

    def mask(self, names: Sequence[Any] | np.ndarray, split: str) -> np.ndarray:
        """Returns (C,) bool: which classes are in a split.

        Raises:
          ValueError: an unknown split, or one without any class.
        """
        _validation.choice("split", split, SPLITS)
        found = np.array([self.split_of(name) == split for name in names], bool)
        if not found.any():
            raise ValueError(
                f"validation={self.validation:g} and test={self.test:g} assign none of "
                f"{len(found)} classes to {split!r} (by the hash of their names); take "
                "other shares, another split_salt, or separate data"
            )
        return found

    def part(self, data: ExampleTable, split: str) -> ExampleTable:
        """Returns the part of a table that is in a split.

        The training part keeps empty classes, and units above without any class left,
        because they are on public lists. The other parts drop both.

        Raises:
          ValueError: an unknown split, one without any class, or classes without names.
        """
        level, ids = len(data.level_names) - 2, data.population.unit_ids
        if level < 0 or ids is None:
            raise ValueError("data must have classes with names to be split by name")
        kept = self.mask(ids[level].tolist(), split)
        if split == TRAIN:
            return data.of_classes(kept)
        filled = kept & (data.population.children_counts[-1] > 0)
        if not filled.any():
            raise ValueError(
                f"one of the classes in {split!r} must have an example, but all "
                f"{int(kept.sum())} are empty; take other shares or another split_salt"
            )
        return data.select(data.level_names[level], ids[level][filled].tolist())


TURNS = 4
"""Number of classes made from each: turned by 0, 90, 180 and 270 degrees."""
_SUFFIXES = ("", "@90", "@180", "@270")  # of class names


def with_rotations(table: ExampleTable) -> ExampleTable:
    """Returns the table with four classes for each: images turned by 90 degrees.

    Class ``"a"`` becomes ``"a"``, ``"a@90"``, ``"a@180"`` and ``"a@270"``, in the same
    unit of the level above. The returned table's ``originals`` says which examples are
    copies of the same image. Protect these together, with ``privacy_unit="original"``
    and ``PersonBounds(examples=1, classes=4)``; a run that would protect single copies
    is refused. Rotate each split separately, so that all copies of a class are in one
    split. Features are read into memory and take four times as much as before.

    Args:
      table: images (R, side, side) or (R, side, side, channels) in classes, without
        targets.

    Raises:
      ValueError: no classes, images that are not square, targets, a table with copies,
        or class names that collide with those of the copies.
    """
    shape = table.features.shape
    if len(shape) not in (3, 4) or shape[1] != shape[2]:
        raise ValueError(
            "rotations need square images, (side, side) or (side, side, channels), "
            f"got features of shape {shape[1:]}"
        )
    if len(table.level_names) < 2:
        raise ValueError(f"rotations need classes, got levels {table.level_names}")
    if table.targets is not None:
        raise ValueError("rotations need classes without targets, got targets")
    if table.originals is not None:
        raise ValueError("rotations need data without copies, got a table with copies")
    *above, sizes = table.population.children_counts
    above[-1] = above[-1] * TURNS
    # The original row of each copy, and how often it is turned.
    rows = np.split(np.arange(table.num_examples), np.cumsum(sizes)[:-1])
    row = np.concatenate([np.tile(own, TURNS) for own in rows])
    turn = np.concatenate([np.repeat(np.arange(TURNS), len(own)) for own in rows])
    images = np.asarray(table.features[:])
    features = np.empty((len(turn), *shape[1:]), images.dtype)
    for times in range(TURNS):
        here = turn == times
        features[here] = np.rot90(images, times, axes=(1, 2))[row[here]]
    sizes = np.repeat(sizes, TURNS)
    last, ids = len(table.level_names) - 1, table.population.unit_ids
    if ids is not None and len(ids) >= last:
        *over, classes = ids[:last]
        made = [f"{name}{suffix}" for name in classes.tolist() for suffix in _SUFFIXES]
        if len(set(made)) < len(made):
            raise ValueError(
                "classes must not already be named like rotations, such as "
                f"'a{_SUFFIXES[1]}' next to 'a'"
            )
        ids = (*over, np.array(made))
    tree = Population((*above, sizes), table.level_names, ids)
    return dataclasses.replace(
        table,
        features=features,
        population=tree,
        owners=None if table.owners is None else table.owners.take(row),
        originals=Owners(row, np.arange(table.num_examples)),
    )


# Equal examples of at least so many numbers are copies, and not equal by chance.
_LEAST_COMPARED = 64
_READ_AT_ONCE = 256  # examples


def shared_rows(
    data: ExampleTable, other: ExampleTable, *, reads: bool = True
) -> list[int]:
    """Returns which examples another table has too; data on disk only if ``reads``."""
    both = data.features, other.features
    if math.prod(data.features.shape[1:]) < _LEAST_COMPARED or not len(both[1]):
        return []
    if not reads and not all(isinstance(one, np.ndarray) for one in both):
        return []
    seen = {hash(row.tobytes()) for row in _rows(both[1])}
    same = (i for i, row in enumerate(_rows(both[0])) if hash(row.tobytes()) in seen)
    return [i for i in same if np.ptp(both[0][i]) > 0]


def _rows(features: Any) -> Iterator[np.ndarray]:
    """Yields the features of each example; those on disk are read in parts."""
    for first in range(0, len(features), _READ_AT_ONCE):
        yield from features[first : first + _READ_AT_ONCE]


def rows_held_out(data: ExampleTable, held_out: Iterable[ExampleTable]) -> np.ndarray:
    """Returns the rows, ascending, of examples that held-out data have too."""
    found = [shared_rows(data, other) for other in held_out]
    return np.unique(np.array([row for rows in found for row in rows], int))


def without_rows(data: ExampleTable, rows: np.ndarray) -> ExampleTable:
    """Returns the table without some rows; units that lose all of theirs stay."""
    return data.take(np.setdiff1d(np.arange(data.num_examples), rows))
