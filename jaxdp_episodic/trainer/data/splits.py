"""Parts of the data (train, validation, test), and rotated copies of its classes."""

from __future__ import annotations

import dataclasses
import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
SPLITS = (TRAIN, VALIDATION, TEST)

_SALT = "jaxdp-episodic split 1: "


def salted_fraction(salt: str, name: Any) -> float:
    """Returns a number in [0, 1) that depends on a name and a salt alone."""
    digest = hashlib.sha256(f"{salt}{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassSplit(Spec):
    """Splits classes into train, validation and test by a keyed hash of their names.

    A class is the unit that examples lie directly in: a task, for regression. Its part
    depends on its own name and on what is written here alone: not on how many classes
    there are, how large they are, in which order they come, or what they hold. So no
    class that joins or leaves moves another one; tables of which one unit is added,
    removed or empty have training parts that differ in that unit at most; and whatever
    is proven of a run on the training part holds for neighbours of the whole. For a
    unit replaced by one of *another* name it does not hold: it may come from another
    part. The held-out classes are protected by nothing: scores on them disclose them.

    The shares are expected ones. Public sizes that a design states, such as
    ``num_classes``, are those of the training part: to be counted with `mask` on the
    public list of names, or, where classes are protected and their number is private
    with them, bounded without looking at the data.

    Attributes:
      validation: share of the classes to choose settings by, in [0, 1).
      test: share of those to test on; the two sum to less than 1. A class of test stays
        there whatever the share of validation.
      salt: key of the hash.
    """

    validation: float = 0.0
    test: float = 0.0
    salt: str = ""

    def __post_init__(self) -> None:
        for name in (VALIDATION, TEST):
            share = _validation.real_array(name, getattr(self, name))
            object.__setattr__(self, name, _validation.single(name, share))
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {share}")
        if not isinstance(self.salt, str):
            raise TypeError(f"salt must be a string, got {self.salt!r}")
        if not self.validation + self.test < 1:
            raise ValueError(
                "validation + test must be less than 1, some classes are to train on; "
                f"got {self.validation:g} + {self.test:g}"
            )

    def split_of(self, name: Any) -> str:
        """Returns "train", "validation" or "test", of the class of this name.

        Of a name that Unicode writes in two ways, as systems of files do, it is one.
        """
        composed = unicodedata.normalize("NFC", str(name))
        fraction = salted_fraction(f"{_SALT}{self.salt}: ", composed)
        if fraction < self.test:
            return TEST
        return VALIDATION if fraction < self.test + self.validation else TRAIN

    def mask(self, names: Sequence[Any] | np.ndarray, split: str) -> np.ndarray:
        """Returns (C,) bool: which classes are in a split.

        Raises:
          ValueError: an unknown split, or one that none is in.
        """
        _validation.choice("split", split, SPLITS)
        found = np.array([self.split_of(name) == split for name in names], bool)
        if not found.any():
            raise ValueError(
                f"validation={self.validation:g} and test={self.test:g} leave none of "
                f"{len(found)} classes to {split!r}, by the hash of their names; take "
                "other shares, another split_salt, or sets of their own"
            )
        return found

    def part(self, data: ExampleTable, split: str) -> ExampleTable:
        """Returns the part of a table that is in a split.

        To train on, empty classes stay, and units above the classes that have none left
        do: they are on public lists. Elsewhere both go.

        Raises:
          ValueError: an unknown split, or one that no class is in; classes without
            names.
        """
        level, ids = len(data.level_names) - 2, data.population.unit_ids
        if level < 0 or ids is None:
            raise ValueError("data must have classes with names to be split by these")
        kept = self.mask(ids[level].tolist(), split)
        if split == TRAIN:
            return data.of_classes(kept)
        filled = kept & (data.population.children_counts[-1] > 0)
        if not filled.any():
            raise ValueError(f"no class in {split!r} has an example")
        return data.select(data.level_names[level], ids[level][filled].tolist())


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
