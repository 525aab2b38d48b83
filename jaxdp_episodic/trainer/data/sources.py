"""Where a run's examples come from, as plain data that a file can hold.

Every source has ``load(split, base)``, which returns an `ExampleTable`; paths are
relative to ``base``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.trainer.data.built_in import (
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
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    ClassSplit,
)
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, refuse_unnamed

FileOwner = str  # a regular expression, or a name for one: see `owner_of_name`
GlyphOwner = str  # what `load_glyphs` takes
HeldOut = float | str  # a share of the classes, or a path


@dataclass(frozen=True, eq=False)
class _Source(Spec):
    """What all sources share: fields are checked by the types they are declared of."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind, may_be_none, _ = str(field.type).partition(" | None")
            if value is not None or not may_be_none:
                object.__setattr__(self, field.name, _CHECKS[kind](field.name, value))


@dataclass(frozen=True, eq=False, kw_only=True)
class FileSource(_Source):
    """What sources share whose held-out data are classes of theirs, or other paths.

    Attributes:
      path: file or folder of what is trained on.
      validation: what settings are chosen by: a share of the classes of ``path``, by a
        hash of their names (`ClassSplit`), or a path of its own; None: nothing.
      test: what is tested on, likewise.
      split_salt: key of the hash; None: "".
    """

    also_read: ClassVar[tuple[str, ...]] = ("held_out",)

    path: str
    validation: HeldOut | None = None
    test: HeldOut | None = None
    split_salt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_split is None and self.split_salt is not None:
            raise ValueError(
                "split_salt is for shares of the classes, got no share as validation "
                "or test"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the source with these fields.

        Raises:
          ValueError: ``held_out``, which was validation and test at once.
        """
        if "held_out" in fields:
            raise ValueError(
                "held_out is not read any more, as it was validation and test at once; "
                "write test and validation, each a path or a share of the classes"
            )
        return super().from_fields(fields)

    @property
    def class_split(self) -> ClassSplit | None:
        """How the classes of ``path`` are split; None: all are trained on."""
        given = {name: getattr(self, name) for name in (VALIDATION, TEST)}
        shares = {name: one for name, one in given.items() if isinstance(one, float)}
        return ClassSplit(**shares, salt=self.split_salt or "") if shares else None

    def located(self, split: str, base: Path | None) -> tuple[Path, ClassSplit | None]:
        """Returns where a split lies, and how to part it from others there, if any.

        Raises:
          ValueError: an unknown split, one that is not given, or two that are one.
        """
        _validation.choice("split", split, SPLITS)
        given = {"path": self.path, VALIDATION: self.validation, TEST: self.test}
        base = base or Path()
        paths = {
            name: base / one for name, one in given.items() if isinstance(one, str)
        }
        refuse_same_paths(paths)
        if split in paths:
            return paths[split], None
        if split != TRAIN and given[split] is None:
            raise ValueError(
                f"{split} must be given for the split {split!r}, a path or a share of "
                "the classes, got None: evaluation needs classes or tasks that are not "
                "trained on"
            )
        return paths["path"], self.class_split


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
class Npz(FileSource):
    """A user's arrays; see `load_npz`.

    Attributes:
      owner: name of the array of owners; None: not known.
    """

    owner: str | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        path, parts = self.located(split, base)
        if parts is not None:
            refuse_unnamed(path)
        data = load_npz(path, owner=self.owner)
        return data if parts is None else parts.part(data, split)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassFolders(FileSource):
    """One folder of images a class; see `load_class_folders`.

    Attributes:
      size: side to which images are brought; None: they must all be alike.
      grey: convert to grey.
      owner: how a file's name says whose it is; None: not known.
    """

    size: int | None = None
    grey: bool = False
    owner: FileOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split; of other classes no image is opened."""
        path, parts = self.located(split, base)
        return load_class_folders(
            path,
            size=self.size,
            grey=self.grey,
            owner=self.owner,
            keeps=None if parts is None else functools.partial(parts.mask, split=split),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Omniglot(FileSource):
    """Omniglot's folders; see `load_omniglot`.

    The custom: ``path`` is ``images_background``, ``test`` is ``images_evaluation``.

    Attributes:
      size: side to which images are brought.
      alphabets: keep the alphabets as the top level.
      owner: "drawer", or as of `ClassFolders`; None: not known.
    """

    size: int = 28
    alphabets: bool = False
    owner: FileOwner | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        path, parts = self.located(split, base)
        data = load_omniglot(
            path, size=self.size, alphabets=self.alphabets, owner=self.owner
        )
        return data if parts is None else parts.part(data, split)


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
class Table(FileSource):
    """Columns of a CSV or Parquet file; see `load_table`.

    Attributes:
      groups: columns of unit ids, top level first, which name the levels; the last
        one's are split.
      features: columns of numbers.
      target: column of numbers; None: the last group is the class.
      label: column of classes, in place of groups: their level is called "class".
      public_units: public list of ids of the only group of ``path``; those without a
        record are empty units. None: every unit has one.
      owner: column of owners; None: not known.
    """

    groups: tuple[str, ...] | None = None
    features: tuple[str, ...]
    target: str | None = None
    label: str | None = None
    public_units: tuple[str | int, ...] | None = None
    owner: str | None = None

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        path, parts = self.located(split, base)
        is_training_file = parts is not None or split == TRAIN
        data = load_table(
            path,
            groups=self.groups or (),
            features=self.features,
            target=self.target,
            label=self.label,
            public_units=self.public_units if is_training_file else None,
            owner=self.owner,
        )
        return data if parts is None else parts.part(data, split)


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


def refuse_same_paths(paths: Mapping[str, Path]) -> None:
    """Refuses to hold out what is trained on or held out otherwise, by whatever name.

    Raises:
      ValueError: one file or folder is there under two of the keys.
    """
    for (first, one), (second, other) in itertools.combinations(paths.items(), 2):
        with contextlib.suppress(FileNotFoundError):  # the loader reports it
            if os.path.samefile(one, other):
                raise ValueError(
                    f"{second} must be other data than {first}, got {other}, which is "
                    f"{one}"
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


def _held_out(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return _text(name, value)
    return _validation.single(name, _validation.open_unit_array(name, value))


# By how a field is declared, apart from None.
_CHECKS = {
    "FileOwner": _file_owner,
    "GlyphOwner": _glyph_owner,
    "HeldOut": _held_out,
    "bool": _validation.flag,
    "int": _validation.whole_number,
    "str": _text,
    "tuple[str, ...]": _names,
    "tuple[str | int, ...]": _ids,
}
