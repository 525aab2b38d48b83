"""Where a run's examples come from, as plain data that a file can hold.

Every source has ``load(split, base)``, which returns an `ExampleTable`; paths are
relative to ``base``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.data.folders import (
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
)
from jaxdp_episodic.data.glyphs import load_glyphs
from jaxdp_episodic.data.npz import load_npz
from jaxdp_episodic.data.schools import load_schools
from jaxdp_episodic.data.sinusoids import make_sinusoids
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.data.tables import load_table
from jaxdp_episodic.describe.spec import Spec

TRAIN = "train"


@dataclass(frozen=True, eq=False, kw_only=True)
class Glyphs(Spec):
    """The embedded glyphs; see `load_glyphs`. Splits train, validation, test."""

    size: int = 14
    small: bool = False

    def __post_init__(self) -> None:
        _whole(self, "size")
        _flags(self, "small")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        del base
        return load_glyphs(split, size=self.size, small=self.small)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schools(Spec):
    """Pupils of English schools; see `load_schools`. Splits train, validation, test."""

    authorities: bool = False

    def __post_init__(self) -> None:
        _flags(self, "authorities")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        del base
        return load_schools(split, authorities=self.authorities)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sinusoids(Spec):
    """Made-up tasks; see `make_sinusoids`. Splits train, validation, test."""

    num_tasks: int = 5_000
    points: int = 40

    def __post_init__(self) -> None:
        _whole(self, "num_tasks", "points")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split; held-out ones have 600 tasks."""
        del base
        _validation.choice("split", split, ("train", "validation", "test"))
        seed = ("train", "validation", "test").index(split)
        tasks = self.num_tasks if split == TRAIN else 600
        return make_sinusoids(tasks, points=self.points, seed=seed)


@dataclass(frozen=True, eq=False, kw_only=True)
class Npz(Spec):
    """A user's arrays; see `load_npz`.

    Attributes:
      path: file of the training data.
      held_out: file of the held-out data; every other split is this one.
    """

    path: str
    held_out: str | None = None

    def __post_init__(self) -> None:
        _texts(self, "path", "held_out")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""
        return _from_files(self, split, base, load_npz)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassFolders(Spec):
    """One folder of images a class; see `load_class_folders`.

    Attributes:
      path: folder of the training classes.
      held_out: folder of the held-out classes.
      size: side to which images are brought; None: they must all be alike.
      grey: convert to grey.
    """

    path: str
    held_out: str | None = None
    size: int | None = None
    grey: bool = False

    def __post_init__(self) -> None:
        _texts(self, "path", "held_out")
        _whole(self, "size")
        _flags(self, "grey")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""

        def read(path: Path) -> ExampleTable:
            return load_class_folders(path, size=self.size, grey=self.grey)

        return _from_files(self, split, base, read)


@dataclass(frozen=True, eq=False, kw_only=True)
class Omniglot(Spec):
    """Omniglot's folders; see `load_omniglot`.

    Attributes:
      path: folder of the training alphabets, ``images_background``.
      held_out: folder of the held-out ones, ``images_evaluation``.
      size: side to which images are brought.
      alphabets: keep the alphabets as the top level.
    """

    path: str
    held_out: str | None = None
    size: int = 28
    alphabets: bool = False

    def __post_init__(self) -> None:
        _texts(self, "path", "held_out")
        _whole(self, "size")
        _flags(self, "alphabets")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""

        def read(path: Path) -> ExampleTable:
            return load_omniglot(path, size=self.size, alphabets=self.alphabets)

        return _from_files(self, split, base, read)


@dataclass(frozen=True, eq=False, kw_only=True)
class MiniImageNet(Spec):
    """Folders ``train``, ``val`` and ``test``; see `load_mini_imagenet`."""

    path: str
    size: int = 84

    def __post_init__(self) -> None:
        _texts(self, "path")
        _whole(self, "size")

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split; "validation" is the folder ``val``."""
        return load_mini_imagenet((base or Path()) / self.path, split, size=self.size)


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(Spec):
    """Columns of a CSV or Parquet file; see `load_table`.

    Attributes:
      path: file of the training records.
      groups: columns of unit ids, top level first.
      features: columns of numbers.
      target: column of numbers; None: the last group is the class.
      held_out: file of the held-out records.
      public_units: public list of ids of the only group of the training data; those
        without a record are empty units. None: every unit has one.
    """

    path: str
    groups: tuple[str, ...]
    features: tuple[str, ...]
    target: str | None = None
    held_out: str | None = None
    public_units: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        _texts(self, "path", "target", "held_out")
        for field in ("groups", "features"):
            _names(self, field)
        if self.public_units is not None:
            _names(self, "public_units", kinds=(str, int))

    def load(self, split: str, base: Path | None = None) -> ExampleTable:
        """Returns a split."""

        def read(path: Path) -> ExampleTable:
            return load_table(
                path,
                groups=self.groups,
                features=self.features,
                target=self.target,
                public_units=self.public_units if split == TRAIN else None,
            )

        return _from_files(self, split, base, read)


DataSource = (
    Glyphs | Schools | Sinusoids | Npz | ClassFolders | Omniglot | MiniImageNet | Table
)
SOURCES: tuple[type, ...] = (
    Glyphs,
    Schools,
    Sinusoids,
    Npz,
    ClassFolders,
    Omniglot,
    MiniImageNet,
    Table,
)


def _from_files(
    source: Npz | ClassFolders | Omniglot | Table,
    split: str,
    base: Path | None,
    read: Callable[[Path], ExampleTable],
) -> ExampleTable:
    """The training file, or the held-out one for every other split."""
    name = source.path if split == TRAIN else source.held_out
    if name is None:
        raise ValueError(
            f"held_out must be given for the split {split!r}, got None: evaluation "
            "needs classes or tasks that are not trained on"
        )
    return read((base or Path()) / name)


def _flags(source: Any, *names: str) -> None:
    for name in names:
        value = getattr(source, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {value!r}")


def _texts(source: Any, *names: str) -> None:
    """Refuses what is neither a string nor, where that is the default, None."""
    for name in names:
        value = getattr(source, name)
        left_out = value is None and name != "path"
        if not (left_out or (isinstance(value, str) and value)):
            shown = _validation.shown(value)
            raise TypeError(f"{name} must be a non-empty string, got {shown}")
        if value is not None and not _is_a_name(value):
            raise ValueError(f"{name} must be text without NUL, got {value!r}")


def _is_a_name(text: str) -> bool:
    """True for what a file may be called."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold
        return False


def _whole(source: Any, *names: str) -> None:
    for name in names:
        value: Any = getattr(source, name)
        if value is None and name == "size":  # as they are
            continue
        array = _validation.integer_array(name, value, minimum=1)
        if array.ndim:
            raise ValueError(f"{name} must be a number, got {value!r}")
        object.__setattr__(source, name, int(array))


def _names(source: Any, name: str, kinds: tuple[type, ...] = (str,)) -> None:
    value = getattr(source, name)
    fits = isinstance(value, list | tuple) and all(
        isinstance(one, kinds) and not isinstance(one, bool) for one in value
    )
    if not fits or not value:
        raise TypeError(
            f"{name} must be a list of names, got {_validation.shown(value)}"
        )
    object.__setattr__(source, name, tuple(value))
