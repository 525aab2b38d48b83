"""Where a run's examples come from, as plain data that a file can hold.

Every source has ``load(split, base)``, which returns an `ExampleTable`; paths are
relative to ``base``.
"""

from __future__ import annotations

import contextlib
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.trainer.data.built_in import (
    SPLITS,
    TYPEFACE,
    load_glyphs,
    load_schools,
    make_sinusoids,
)
from jaxdp_episodic.trainer.data.folders import (
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
)
from jaxdp_episodic.trainer.data.owners import owner_of_name
from jaxdp_episodic.trainer.data.stored import TRAIN, load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table

FileOwner = str  # a regular expression, or a name for one: see `owner_of_name`
GlyphOwner = str  # what `load_glyphs` takes


class _Source(Spec):
    """What all sources share: fields are checked by the types they are declared of."""

    def __post_init__(self) -> None:
        for name, declared in type(self).__annotations__.items():
            value = getattr(self, name)
            kind, may_be_none, _ = declared.partition(" | None")
            if value is not None or not may_be_none:
                object.__setattr__(self, name, _CHECKS[kind](name, value))


@dataclass(frozen=True, eq=False, kw_only=True)
class Glyphs(_Source):
    """The embedded glyphs; see `load_glyphs`. Splits train, validation, test."""

    size: int = 14
    small: bool = False
    owner: GlyphOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return load_glyphs(split, size=self.size, small=self.small, owner=self.owner)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schools(_Source):
    """Pupils of English schools; see `load_schools`. Splits train, validation, test."""

    authorities: bool = False

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return load_schools(split, authorities=self.authorities)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sinusoids(_Source):
    """Made-up tasks; see `make_sinusoids`. Splits train, validation, test."""

    num_tasks: int = 5_000
    points: int = 40

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split; held-out ones have 600 tasks."""
        _validation.choice("split", split, SPLITS)
        tasks = self.num_tasks if split == TRAIN else 600
        return make_sinusoids(tasks, points=self.points, seed=SPLITS.index(split))


@dataclass(frozen=True, eq=False, kw_only=True)
class Npz(_Source):
    """A user's arrays; see `load_npz`.

    Attributes:
      path: file of the training data.
      held_out: file of the held-out data; every other split is this one.
      owner: name of the array of owners; None: not known.
    """

    path: str
    held_out: str | None = None
    owner: str | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return load_npz(_path(self, split, base), owner=self.owner)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassFolders(_Source):
    """One folder of images a class; see `load_class_folders`.

    Attributes:
      path: folder of the training classes.
      held_out: folder of the held-out classes.
      size: side to which images are brought; None: they must all be alike.
      grey: convert to grey.
      owner: how a file's name says whose it is; None: not known.
    """

    path: str
    held_out: str | None = None
    size: int | None = None
    grey: bool = False
    owner: FileOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        path = _path(self, split, base)
        return load_class_folders(
            path, size=self.size, grey=self.grey, owner=self.owner
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Omniglot(_Source):
    """Omniglot's folders; see `load_omniglot`.

    Attributes:
      path: folder of the training alphabets, ``images_background``.
      held_out: folder of the held-out ones, ``images_evaluation``.
      size: side to which images are brought.
      alphabets: keep the alphabets as the top level.
      owner: "drawer", or as of `ClassFolders`; None: not known.
    """

    path: str
    held_out: str | None = None
    size: int = 28
    alphabets: bool = False
    owner: FileOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        path = _path(self, split, base)
        return load_omniglot(
            path, size=self.size, alphabets=self.alphabets, owner=self.owner
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class MiniImageNet(_Source):
    """Folders ``train``, ``val`` and ``test``; see `load_mini_imagenet`."""

    path: str
    size: int = 84
    owner: FileOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split; "validation" is the folder ``val``."""
        path = (base or Path()) / self.path
        return load_mini_imagenet(path, split, size=self.size, owner=self.owner)


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(_Source):
    """Columns of a CSV or Parquet file; see `load_table`.

    Attributes:
      path: file of the training records.
      groups: columns of unit ids, top level first.
      features: columns of numbers.
      target: column of numbers; None: the last group is the class.
      held_out: file of the held-out records.
      public_units: public list of ids of the only group of the training data; those
        without a record are empty units. None: every unit has one.
      owner: column of owners; None: not known.
    """

    path: str
    groups: tuple[str, ...]
    features: tuple[str, ...]
    target: str | None = None
    held_out: str | None = None
    public_units: tuple[str | int, ...] | None = None
    owner: str | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return load_table(
            _path(self, split, base),
            groups=self.groups,
            features=self.features,
            target=self.target,
            public_units=self.public_units if split == TRAIN else None,
            owner=self.owner,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored(_Source):
    """A folder made by `jaxdp-episodic data import`, which stays on the disk.

    Attributes:
      path: the folder; its splits, and whose the examples are, are as imported. See
        `load_stored`.
    """

    path: str

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return load_stored((base or Path()) / self.path, split)


DataSource = (
    Glyphs
    | Schools
    | Sinusoids
    | Npz
    | ClassFolders
    | Omniglot
    | MiniImageNet
    | Table
    | Stored
)
SOURCES: tuple[type, ...] = typing.get_args(DataSource)


def _path(
    source: Npz | ClassFolders | Omniglot | Table, split: str, base: Path | None
) -> Path:
    """The training file or folder, or the held-out one for every other split."""
    name = source.path if split == TRAIN else source.held_out
    if name is None:
        raise ValueError(
            f"held_out must be given for the split {split!r}, got None: evaluation "
            "needs classes or tasks that are not trained on"
        )
    path, trained = (base or Path()) / name, (base or Path()) / source.path
    if split != TRAIN:
        refuse_same_path(trained, path)
    return path


def refuse_same_path(trained: Path, held_out: Path) -> None:
    """Refuses to hold out what is trained on, by whatever name.

    Raises:
      ValueError: one file or folder.
    """
    with contextlib.suppress(FileNotFoundError):  # the loader reports it
        if os.path.samefile(trained, held_out):
            raise ValueError(
                f"held_out must be other data than those trained on, got {held_out}, "
                f"which is {trained}"
            )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        shown = _validation.shown(value)
        raise TypeError(f"{name} must be a non-empty string, got {shown}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold
        encoded = b"\0"
    if b"\0" in encoded:
        raise ValueError(f"{name} must be text without NUL, got {value!r}")
    return value


def _names(name: str, value: Any, kinds: tuple[type, ...] = (str,)) -> tuple[Any, ...]:
    fits = isinstance(value, list | tuple) and all(
        isinstance(one, kinds) and not isinstance(one, bool) for one in value
    )
    if not fits or not value:
        shown = _validation.shown(value)
        raise TypeError(f"{name} must be a list of names, got {shown}")
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[Any, ...]:
    return _names(name, value, kinds=(str, int))


def _file_owner(name: str, value: Any) -> str:
    owner_of_name(_text(name, value))
    return value


def _glyph_owner(name: str, value: Any) -> str:
    return _validation.choice(name, value, (TYPEFACE,))


# By how a field is declared, apart from None.
_CHECKS = {
    "FileOwner": _file_owner,
    "GlyphOwner": _glyph_owner,
    "bool": _validation.flag,
    "int": _validation.whole_number,
    "str": _text,
    "tuple[str, ...]": _names,
    "tuple[str | int, ...]": _ids,
}
