"""Parts of the data: to train on, to choose settings by, to test on."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec
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
