"""Data sources as plain data, as a training config states them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import spec_fields
from jaxdp_episodic.trainer.data import folders
from jaxdp_episodic.trainer.data.built_in import (
    TYPEFACE,
    load_glyphs,
    load_schools,
    make_sinusoids,
)
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Flag,
    Names,
    Text,
    listed,
    one_of,
    text,
    within,
)
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, owner_of_name
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    TURNS,
    VALIDATION,
    ClassSplit,
    with_rotations,
)
from jaxdp_episodic.trainer.data.stored import Records, load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import npz_records, table_records


def _file_owner(name: str, value: Any) -> str:
    owner_of_name(text(name, value))
    return value


def _held_out(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return text(name, value)
    return within(0.0, 1.0, "()")(name, value)


Ids = Annotated[tuple[str | int, ...], functools.partial(listed, kinds=(str, int))]
FileOwner = Annotated[str, _file_owner]  # see `owner_of_name`
GlyphOwner = Annotated[str, one_of(TYPEFACE)]
HeldOut = Annotated[float | str, _held_out]  # a share of the classes, or a path


# Fields of a source that are no options of its loader.
_PLACES = {"path", VALIDATION, TEST, "split_salt", "rotations"}


class Source(CheckedSpec):
    """Base of the sources; `load` returns one split."""

    loader: ClassVar[Callable[..., ExampleTable]]  # called with `options`

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split, with rotated copies of its classes if configured."""
        data = self.read(split, base)
        return with_rotations(data) if self.copies > 1 else data

    def read(self, split: str, base: Path | None) -> ExampleTable:
        """Returns a split without rotated copies."""
        return self.loader(split, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The reader's other arguments: those that say how files become examples."""
        names = set(spec_fields(self)) - _PLACES
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def copies(self) -> int:
        """Number of classes made from each class of the source."""
        return TURNS if getattr(self, "rotations", None) else 1


class RecordSource(Source):
    """Base of sources of files, whose records can be read in parts."""

    lister: ClassVar[Callable[..., Records]]  # called with `options`
    most: ClassVar[int | None] = MAX_BYTES  # of features in memory
    path: Text

    def read(self, split: str, base: Path | None) -> ExampleTable:
        """Returns a split."""
        return self.records(split, base).table(self.most)

    def records(self, split: str, base: Path | None = None, **more: Any) -> Records:
        """Returns the records of a split; ``more`` goes to the lister."""
        return self.lister((base or Path()) / self.path, split, **self.options, **more)


class FileSource(RecordSource):
    """Base of sources whose held-out data are a share of their classes, or a path."""

    # ``path`` has the training data.
    validation: HeldOut | None = None  # data for choosing settings
    test: HeldOut | None = None  # data for testing
    split_salt: Text | None = None  # key of the hash in `ClassSplit`

    def check_values(self) -> None:
        """Raises if there is a ``split_salt`` but nothing to split."""
        if self.class_split is None and self.split_salt is not None:
            raise ValueError(
                "split_salt requires validation or test to be a share of the classes, "
                f"got {self.validation!r} and {self.test!r}"
            )

    @property
    def class_split(self) -> ClassSplit | None:
        """How the classes of ``path`` are split; None: all are for training."""
        given = {name: getattr(self, name) for name in (VALIDATION, TEST)}
        shares = {name: one for name, one in given.items() if isinstance(one, float)}
        return ClassSplit(**shares, salt=self.split_salt or "") if shares else None

    def located(self, split: str, base: Path | None) -> tuple[Path, ClassSplit | None]:
        """Returns a split's path, and the `ClassSplit` to apply to it, if any."""
        _validation.choice("split", split, SPLITS)
        given = {"path": self.path, VALIDATION: self.validation, TEST: self.test}
        base = base or Path()
        paths = {
            name: base / one for name, one in given.items() if isinstance(one, str)
        }
        for (first, one), (second, other) in itertools.combinations(paths.items(), 2):
            with contextlib.suppress(FileNotFoundError):  # the loader reports it
                if os.path.samefile(one, other):
                    raise ValueError(
                        f"{second} must be other data than {first}, got {other}, which "
                        f"is the same as {one}"
                    )
        if split in paths:
            return paths[split], None
        if split != TRAIN and given[split] is None:
            raise ValueError(
                f"{split} must be given, as a path or a share of the classes: "
                "evaluation needs classes or tasks that the model was not trained on"
            )
        return paths["path"], self.class_split

    def records(self, split: str, base: Path | None = None, **more: Any) -> Records:
        """Returns the records of a split; ``more`` goes to the lister."""
        path, parts = self.located(split, base)
        found = self.lister(path, **self.options | more | self.only_for(split, parts))
        if parts is None:
            return found
        return dataclasses.replace(found, numbers=parts.part(found.numbers, split))

    def only_for(self, split: str, parts: ClassSplit | None) -> dict[str, Any]:
        """Returns options of the lister that depend on the split."""
        return {}


class Glyphs(Source):
    """The embedded glyphs; see `load_glyphs`. Splits train, validation, test."""

    loader = staticmethod(load_glyphs)
    size: Count = 14
    small: Flag = False
    owner: GlyphOwner | None = None
    rotations: Flag | None = None


class Schools(Source):
    """Pupils of English schools; see `load_schools`. Splits train, validation, test."""

    loader = staticmethod(load_schools)
    authorities: Flag = False


class Sinusoids(Source):
    """Synthetic tasks; see `make_sinusoids`. Splits train, validation, test."""

    num_tasks: Count = 5_000
    points: Count = 40

    def read(self, split: str, base: Path | None) -> ExampleTable:
        """Returns a split; validation and test have 600 tasks."""
        _validation.choice("split", split, SPLITS)
        tasks = self.num_tasks if split == TRAIN else 600
        return make_sinusoids(tasks, points=self.points, seed=SPLITS.index(split))


class Npz(FileSource):
    """A user's arrays; see `load_npz`."""

    lister = staticmethod(npz_records)
    most = None  # the lister bounds what is in the file
    owner: Text | None = None  # name of the array with the owners
    rotations: Flag | None = None

    def only_for(self, split: str, parts: ClassSplit | None) -> dict[str, Any]:
        """Asks for names of classes to split them by."""
        return {"must_be_named": parts is not None}


class ClassFolders(FileSource):
    """One folder of images per class; see `load_class_folders`."""

    lister = staticmethod(folders.listed_classes)
    size: Count | None = None
    grey: Flag = False
    owner: FileOwner | None = None
    rotations: Flag | None = None

    def records(self, split: str, base: Path | None = None, **more: Any) -> Records:
        """Returns the records of a split; empty classes stay: folders list them."""
        path, parts = self.located(split, base)
        keeps = parts and functools.partial(parts.mask, split=split)
        return self.lister(path, keeps=keeps, **self.options, **more)


class Omniglot(FileSource):
    """Omniglot's folders, such as ``images_background``; see `load_omniglot`."""

    lister = staticmethod(folders.listed_omniglot)
    size: Count = 28
    alphabets: Flag = False
    owner: FileOwner | None = None
    rotations: Flag | None = None


class MiniImageNet(RecordSource):
    """Folders or lists of ``train``, ``val`` and ``test``; see `load_mini_imagenet`."""

    lister = staticmethod(folders.listed_mini_imagenet)
    size: Count = 84
    owner: FileOwner | None = None
    rotations: Flag | None = None


class Table(FileSource):
    """Columns of a CSV or Parquet file; see `load_table`."""

    lister = staticmethod(table_records)
    groups: Names | None = None
    features: Names
    target: Text | None = None
    label: Text | None = None
    public_units: Ids | None = None  # those in ``path``
    owner: Text | None = None

    def only_for(self, split: str, parts: ClassSplit | None) -> dict[str, Any]:
        """Leaves out the public list for another file."""
        is_other = parts is None and split != TRAIN
        return {"public_units": None} if is_other else {}


class ParquetColumns(Table):
    """Columns of a Parquet file for `data import`, which also reads images."""

    features: Names | None = None
    images: Text | None = None
    shape: Any = None  # of images that are lists of numbers
    size: Count | None = None
    grey: Flag = False


class Stored(Source):
    """A folder made by `jaxdp-episodic data import`; see `load_stored`."""

    path: Text
    rotations: Flag | None = None

    def read(self, split: str, base: Path | None) -> ExampleTable:
        """Returns a split, which stays on disk."""
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
LAYOUTS: dict[str, type] = {
    folders.CLASSES: ClassFolders,
    folders.OMNIGLOT: Omniglot,
    folders.MINI_IMAGENET: MiniImageNet,
    folders.NPZ: Npz,
    folders.CSV: Table,
    folders.PARQUET: Table,
    folders.STORED: Stored,
}
"""The source of each data layout that `recognized` returns."""
