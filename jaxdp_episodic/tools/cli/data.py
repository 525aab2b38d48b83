"""``jaxdp-episodic data``: imports data into folders that training reads from disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.files.column_folder import check_sums, stored_splits
from jaxdp_episodic.tools.cli.command import (
    Command,
    Name,
    Names,
    Whole,
    facts,
    option,
)
from jaxdp_episodic.trainer.data.folders import (
    CLASSES,
    MINI_IMAGENET,
    NPZ,
    OMNIGLOT,
    PARQUET,
    image_records,
    listed_classes,
    listed_omniglot,
    recognized,
    split_folders,
)
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
    Records,
    load_stored,
    store,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import (
    npz_records,
    refuse_unnamed,
    table_records,
)

_Argument = tyro.conf.Positional[Path]
_HeldOut = Annotated[Union[str, None], option("SHARE|SOURCE", is_optional=True)]  # noqa: UP007
_SPLITTING = (VALIDATION, TEST, "split_salt")
_PICTURES = ("size", "grey")
# The options of each layout besides "owner", which all have.
_OPTIONS_OF: dict[str, tuple[str, ...]] = {
    CLASSES: (*_SPLITTING, *_PICTURES),
    OMNIGLOT: (*_SPLITTING, "size", "alphabets"),
    MINI_IMAGENET: ("size",),
    NPZ: _SPLITTING,
    PARQUET: (
        *(*_SPLITTING, *_PICTURES, "groups", "features", "images", "shape", "target"),
        "public_units",
    ),
}
_WIDTH = 9  # of the names of facts


@dataclass
class Import(Command):
    """Write images or columns into a folder that training reads from disk.

    An import that fails leaves no folder. In the config, give `type = "Stored"` and
    `path = "FOLDER"` in the table [data].
    """

    #: A folder of images, an .npz or a .parquet file.
    source: Annotated[_Argument, option("SOURCE")]
    #: The folder to make.
    folder: Annotated[_Argument, option("FOLDER")]
    #: Layout of SOURCE: one folder per class; alphabet/character; train|val|test/class;
    #: a file.
    layout: Literal[
        "auto", "class-folders", "omniglot", "mini-imagenet", "npz", "parquet"
    ] = "auto"
    #: Validation data: a share of the classes in (0, 1), chosen by a hash of their
    #: names; or another source of the same layout.
    validation: _HeldOut = None
    #: Test data, in the same way.
    test: _HeldOut = None
    #: Key of the hash.
    split_salt: Annotated[Name, option("TEXT")] = None
    #: Side of images; default: 28 for Omniglot, 84 for mini-ImageNet, else their own.
    size: Whole = None
    #: Store one channel instead of three.
    grey: bool = False
    #: Omniglot: keep the alphabets as the top level.
    alphabets: bool = False
    #: Who owns an example: a column (Parquet), an array (npz), a regular expression
    #: with one group for file names, or "drawer" for Omniglot; default: unknown.
    owner: Name = None
    #: Parquet: columns of unit ids, top level first.
    groups: Names = ()
    #: Parquet: columns of numbers. Or give --images.
    features: Names = ()
    #: Parquet: a column of image files, or of lists of numbers.
    images: Name = None
    #: Parquet: shape of an image that is a list, such as 32 32 3.
    shape: Annotated[tuple[int, ...], option("INT ...", is_optional=True)] = ()
    #: Parquet: column of numbers to predict; default: none.
    target: Name = None
    #: Parquet: public list of the ids of the only group, with those without records.
    public_units: Annotated[tuple[str, ...], option("ID ...", is_optional=True)] = ()

    def _after_interruption(self) -> str:
        return "; nothing was written"

    def _given(self, name: str) -> Any:
        """The value of an option; None if it was not given."""
        value = getattr(self, name)
        return None if value is False or value == () else value

    def _lines(self) -> list[str]:
        layout = self._layout()
        splits = self._splits(layout)
        made_from: dict[str, Any] = {"layout": layout, "source": self.source.name}
        for name in (*_OPTIONS_OF[layout], "owner"):
            if (value := self._given(name)) is not None:
                is_source = name in (VALIDATION, TEST)
                made_from[name] = Path(value).name if is_source else value
        begun = time.perf_counter()
        with _shown() as progress:
            store(self.folder, splits, made_from=made_from, on_progress=progress)
        lines = facts({"layout": layout}, _WIDTH)
        for split, records in splits.items():
            table = records.numbers
            units = [
                f"{name} {table.population.num_units(index):,}"
                for index, name in enumerate(table.level_names, 1)
            ]
            kind = f"{records.dtype} {'x'.join(map(str, records.shape))}"
            rows = {split: f"{' / '.join(units)}, {kind} each"} | _people_row(table)
            lines += facts(rows, _WIDTH)
        seconds = f"{time.perf_counter() - begun:,.1f} s"
        last = {"took": seconds, "folder": str(self.folder)}
        return [*lines, *facts(last, _WIDTH)]

    def _layout(self) -> str:
        """The layout of SOURCE; options that it does not have are refused."""
        layout = recognized(self.source) if self.layout == "auto" else self.layout
        if layout not in _OPTIONS_OF:
            raise ValueError(
                f"{self.source} must be a folder of images, an .npz or a .parquet "
                f"file, got {layout}"
            )
        for name in sorted(set().union(*_OPTIONS_OF.values())):
            if self._given(name) is not None and name not in _OPTIONS_OF[layout]:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for other layouts than {layout}"
                )
        return layout

    def _splits(self, layout: str) -> dict[str, Records]:
        if layout == MINI_IMAGENET:
            folders = split_folders(self.source).items()
            return {split: self._records(layout, path) for split, path in folders}
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
        """The records of a path, or only those that ``parts`` puts into a split."""
        names = set(_OPTIONS_OF[layout]) - set(_SPLITTING)
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given["owner"] = self.owner
        if "size" in given and self.size is None:
            given["size"] = {OMNIGLOT: 28, MINI_IMAGENET: 84}.get(layout)
        if layout in (CLASSES, MINI_IMAGENET):
            keeps = functools.partial(parts.mask, split=split) if parts else None
            return image_records(listed_classes(path, keeps=keeps, **given))
        if layout == OMNIGLOT:
            found = image_records(listed_omniglot(path, **given))
        elif layout == NPZ:
            if parts is not None:
                refuse_unnamed(path)
            found = npz_records(path, **given)
        else:
            if parts is None and split != TRAIN:
                given["public_units"] = ()
            found = table_records(path, **given)
        return found if parts is None else found.part(parts, split)


@dataclass
class Check(Command):
    """Compare every byte of a folder with the checksums of its manifest."""

    #: The folder made by `data import`.
    folder: Annotated[_Argument, option("FOLDER")]

    def _lines(self) -> list[str]:
        with _shown() as progress:
            size = check_sums(self.folder, lambda done, of: progress(done, of, "bytes"))
        lines = [f"as it was made: {size:,} bytes"]
        for split in stored_splits(self.folder):
            for text in _people_row(load_stored(self.folder, split)).values():
                lines += facts({split: text}, _WIDTH)
        return lines


def _share_or_path(text: str | None) -> float | str | None:
    """The value of an option that is a number or the path of a source."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _people_row(table: ExampleTable) -> dict[str, str]:
    """A row on the people who own the examples, if these are known."""
    return {} if table.people is None else {"": str(table.people)}


@contextmanager
def _shown() -> Iterator[Progress]:
    """Yields a function that shows a progress bar for each part of the work in turn."""
    console, bars = Console(stderr=True), dict[str, ProgressBar]()
    with ExitStack() as shown:

        def show(done: int, total: int, what: str) -> None:
            if what not in bars:
                shown.close()
                bars[what] = ProgressBar(console, what, total, done)
                shown.enter_context(bars[what])
            bars[what].show(done)

        yield show
