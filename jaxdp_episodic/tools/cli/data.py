"""``jaxdp-episodic data``: data that stay on the disk, made and looked at."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.files.column_folder import check_sums
from jaxdp_episodic.tools.cli.messages import Name, Whole, option, reported
from jaxdp_episodic.tools.cli.process import ended_by_sigterm
from jaxdp_episodic.trainer.data.folders import (
    image_records,
    listed_classes,
    listed_omniglot,
    split_folders,
)
from jaxdp_episodic.trainer.data.layouts import (
    CLASSES,
    MINI_IMAGENET,
    NPZ,
    OMNIGLOT,
    PARQUET,
    recognized,
)
from jaxdp_episodic.trainer.data.records import Records
from jaxdp_episodic.trainer.data.sources import FileSource
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    ClassSplit,
)
from jaxdp_episodic.trainer.data.stored import (
    Progress,
    load_stored,
    store,
    stored_splits,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import (
    npz_records,
    refuse_unnamed,
    table_records,
)

_Argument = tyro.conf.Positional[Path]
_Names = tuple[str, ...]
_HeldOut = Annotated[Union[str, None], option("SHARE|SOURCE")]  # noqa: UP007


@dataclass(frozen=True)
class Import:
    """Write images or columns into a folder that is trained on without loading it.

    The folder is there whole or not at all. A config then says `type = "Stored"` and
    `path = "FOLDER"` in its table [data].
    """

    source: Annotated[_Argument, option("SOURCE")]
    """A folder of images, an .npz or a .parquet file."""
    folder: Annotated[_Argument, option("FOLDER")]
    """The folder to make."""
    layout: Literal[
        "auto", "class-folders", "omniglot", "mini-imagenet", "npz", "parquet"
    ] = "auto"
    """Of SOURCE: one folder a class; alphabet/character; train|val|test/class."""
    validation: _HeldOut = None
    """What settings are chosen by: a share of the classes in (0, 1), by a hash of
    their names; or a source of its own, of the same layout."""
    test: _HeldOut = None
    """What is tested on, likewise."""
    split_salt: Annotated[Name, option("TEXT")] = None
    """Key of the hash."""
    size: Annotated[Whole, option("INT")] = None
    """Side of images; default: 28 of Omniglot, 84 of mini-ImageNet, else their own."""
    grey: bool = False
    """One channel in place of three."""
    alphabets: bool = False
    """Of Omniglot: keep the alphabets as the top level."""
    owner: Annotated[Name, option("NAME")] = None
    """Whose an example is: a column (Parquet), an array (npz), or of files' names a
    regular expression with one group, or "drawer" for Omniglot's; default: unknown."""
    groups: Annotated[_Names, option("NAME ...")] = ()
    """Of Parquet: columns of unit ids, top level first."""
    features: Annotated[_Names, option("NAME ...")] = ()
    """Of Parquet: columns of numbers; or, in their place, --images."""
    images: Annotated[Name, option("NAME")] = None
    """Of Parquet: a column of image files, or of lists of numbers."""
    shape: Annotated[tuple[int, ...], option("INT ...")] = ()
    """Of Parquet: of an image that is a list, such as 32 32 3."""
    target: Annotated[Name, option("NAME")] = None
    """Of Parquet: column of numbers to predict; default: none."""
    public_units: Annotated[_Names, option("ID ...")] = ()
    """Of Parquet: public list of the only group's ids, those without records too."""

    def run(self) -> int:
        """Imports what is missing; returns the exit code."""
        left = "; nothing was written"
        return reported(self.source, self._imported, interrupted=left)

    def _imported(self) -> list[str]:
        layout = self._layout()
        splits = self._splits(layout)
        settings = {
            name: Path(value).name if name in (VALIDATION, TEST) else value
            for name in _OF_LAYOUT[layout]
            if (value := getattr(self, name)) not in (None, (), False)
        }
        made_from = {"layout": layout, "source": self.source.name, **settings}
        begun = time.perf_counter()
        with ended_by_sigterm(), _shown() as progress:
            store(self.folder, splits, made_from=made_from, on_progress=progress)
        lines = [f"layout     {layout}"]
        for split, records in splits.items():
            table = records.numbers
            units = [
                f"{name} {table.population.num_units(index):,}"
                for index, name in enumerate(table.level_names, 1)
            ]
            kind = f"{records.dtype} {'x'.join(map(str, records.shape))}"
            lines.append(f"{split:<11}{' / '.join(units)}, {kind} each")
            lines += _of_people(table)
        seconds = time.perf_counter() - begun
        lines += [f"took       {seconds:,.1f} s", f"folder     {self.folder}"]
        return lines

    def _layout(self) -> str:
        """What SOURCE is; options that it does not have are refused."""
        layout = self.layout
        if layout == "auto":
            layout = recognized(self.source)
        if layout not in _OF_LAYOUT:
            raise ValueError(
                f"{self.source} must be a folder of images, an .npz or a .parquet "
                f"file, got one that is {layout}"
            )
        for name in sorted(set().union(*_OF_LAYOUT.values())):
            given = getattr(self, name) not in (None, (), False)
            if given and name not in _OF_LAYOUT[layout]:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for other layouts than {layout}"
                )
        return layout

    def _splits(self, layout: str) -> dict[str, Records]:
        if layout == MINI_IMAGENET:
            return {
                split: self._records(layout, folder)
                for split, folder in split_folders(self.source).items()
            }
        source = FileSource(
            path=str(self.source),
            validation=_share_or_path(self.validation),
            test=_share_or_path(self.test),
            split_salt=self.split_salt,
        )
        found = {}
        for split in SPLITS:
            if split == TRAIN or getattr(source, split) is not None:
                path, parts = source.located(split, None)
                found[split] = self._records(layout, path, split, parts)
        return found

    def _records(
        self,
        layout: str,
        path: Path,
        split: str = TRAIN,
        parts: ClassSplit | None = None,
    ) -> Records:
        """The records of a split: all of a path, or a part of them."""
        keeps = None if parts is None else functools.partial(parts.mask, split=split)
        if layout in (CLASSES, MINI_IMAGENET):
            size = 84 if self.size is None and layout == MINI_IMAGENET else self.size
            return image_records(
                listed_classes(
                    path, size=size, grey=self.grey, owner=self.owner, keeps=keeps
                )
            )
        if layout == OMNIGLOT:
            size = 28 if self.size is None else self.size
            found = image_records(
                listed_omniglot(
                    path, size=size, alphabets=self.alphabets, owner=self.owner
                )
            )
        elif layout == NPZ:
            if parts is not None:
                refuse_unnamed(path)
            found = npz_records(path, owner=self.owner)
        else:
            found = table_records(
                path,
                groups=self.groups,
                features=self.features,
                images=self.images,
                target=self.target,
                public_units=self.public_units if parts or split == TRAIN else (),
                owner=self.owner,
                shape=self.shape,
                size=self.size,
                grey=self.grey,
            )
        return found if parts is None else found.part(parts, split)


_HELD_OUT = (VALIDATION, TEST, "split_salt")
# The options that a layout has.
_OF_LAYOUT: dict[str, tuple[str, ...]] = {
    CLASSES: (*_HELD_OUT, "size", "grey", "owner"),
    OMNIGLOT: (*_HELD_OUT, "size", "alphabets", "owner"),
    MINI_IMAGENET: ("size", "owner"),
    NPZ: (*_HELD_OUT, "owner"),
    PARQUET: (
        *(*_HELD_OUT, "size", "grey", "groups", "features", "images"),
        *("shape", "target", "public_units", "owner"),
    ),
}


@dataclass(frozen=True)
class Check:
    """Compare every byte of a folder with the checksums of its manifest."""

    folder: Annotated[_Argument, option("FOLDER")]
    """Made by `data import`."""

    def run(self) -> int:
        """Checks; returns the exit code."""

        def checked() -> list[str]:
            with _shown() as progress:
                size = check_sums(
                    self.folder, lambda done, of: progress(done, of, "bytes")
                )
            lines = [f"as it was made: {size:,} bytes"]
            for split in stored_splits(self.folder):
                people = _of_people(load_stored(self.folder, split))
                lines += [f"{split:<11}{line.lstrip()}" for line in people]
            return lines

        return reported(self.folder, checked)


@dataclass(frozen=True)
class Data:
    """Keep data on the disk: import it into a folder to train on, or check one."""

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Import, tyro.conf.subcommand("import")]
        | Annotated[Check, tyro.conf.subcommand("check")]
    ]

    def run(self) -> int:
        """Does what was asked for; returns the exit code."""
        return self.action.run()


def _share_or_path(text: str | None) -> float | str | None:
    """An option that is a number or the name of a source."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _of_people(table: ExampleTable) -> list[str]:
    """What is said of the people who own the examples, if these are known."""
    return [] if table.people is None else [f"{'':<11}{table.people}"]


@contextmanager
def _shown() -> Iterator[Progress]:
    """Shows how far the work is, one part after the other."""
    console, bars = Console(stderr=True), dict[str, ProgressBar]()
    with ExitStack() as shown:

        def show(done: int, total: int, what: str) -> None:
            if what not in bars:
                shown.close()
                bars[what] = ProgressBar(console, what, total, done)
                shown.enter_context(bars[what])
            bars[what].show(done)

        yield show
