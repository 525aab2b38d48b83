"""``jaxdp-episodic data``: imports data into folders that training reads from disk."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.files.column_folder import check_sums, stored_splits
from jaxdp_episodic.tools.cli.command import Options, facts
from jaxdp_episodic.trainer.data import folders as layouts, user_files
from jaxdp_episodic.trainer.data.sources import FileSource
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    ClassSplit,
)
from jaxdp_episodic.trainer.data.stored import Progress, Records, load_stored, store
from jaxdp_episodic.trainer.data.table import ExampleTable

_SPLITTING = (VALIDATION, TEST, "split_salt")
_PICTURES = ("size", "grey")
# The options of each layout besides "owner", which all have.
_OPTIONS_OF: dict[str, tuple[str, ...]] = {
    layouts.CLASSES: (*_SPLITTING, *_PICTURES),
    layouts.OMNIGLOT: (*_SPLITTING, "size", "alphabets"),
    layouts.MINI_IMAGENET: ("size",),
    layouts.NPZ: _SPLITTING,
    layouts.PARQUET: (
        *(*_SPLITTING, *_PICTURES, "groups", "features", "images", "shape", "target"),
        "public_units",
    ),
}
_WIDTH = 10  # of the names of facts


def do_import(o: Options) -> list[str]:
    """The command ``data import``."""
    o.left_behind = lambda: "; nothing was written"
    layout = layouts.recognized(o.source) if o.layout == "auto" else o.layout
    if layout not in _OPTIONS_OF:
        raise ValueError(
            f"{o.source} must be a folder of images, an .npz or a .parquet file, got "
            f"{layout}"
        )
    for name in sorted(set().union(*_OPTIONS_OF.values()) - {*_OPTIONS_OF[layout]}):
        if _given(o, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for other layouts than {layout}")
    splits = _splits(o, layout)
    made_from: dict[str, Any] = {"layout": layout, "source": o.source.name}
    for name in (*_OPTIONS_OF[layout], "owner"):
        if (value := _given(o, name)) is not None:
            is_source = name in (VALIDATION, TEST)
            made_from[name] = Path(value).name if is_source else value
    begun = time.perf_counter()
    with _shown() as progress:
        store(o.folder, splits, made_from=made_from, on_progress=progress)
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
    last = {"took": f"{time.perf_counter() - begun:,.1f} s", "folder": str(o.folder)}
    return [*lines, *facts(last, _WIDTH)]


def do_check(o: Options) -> list[str]:
    """The command ``data check``."""
    with _shown() as progress:
        size = check_sums(o.folder, lambda done, of: progress(done, of, "bytes"))
    lines = [f"as it was made: {size:,} bytes"]
    for split in stored_splits(o.folder):
        for text in _people_row(load_stored(o.folder, split)).values():
            lines += facts({split: text}, _WIDTH)
    return lines


def _given(o: Options, name: str) -> Any:
    """The value of an option; None if it was not given."""
    value = getattr(o, name)
    return None if value is False or value == () else value


def _splits(o: Options, layout: str) -> dict[str, Records]:
    if layout == layouts.MINI_IMAGENET:
        folders = layouts.split_folders(o.source).items()
        return {split: _records(o, layout, path) for split, path in folders}
    source = FileSource(
        path=str(o.source),
        validation=_share_or_path(o.validation),
        test=_share_or_path(o.test),
        split_salt=o.split_salt,
    )
    found = {}
    for split in SPLITS:
        if split == TRAIN or getattr(source, split) is not None:
            path, parts = source.located(split, None)
            found[split] = _records(o, layout, path, split, parts)
    return found


def _records(
    o: Options,
    layout: str,
    path: Path,
    split: str = TRAIN,
    parts: ClassSplit | None = None,
) -> Records:
    """The records of a path, or only those that ``parts`` puts into a split."""
    names = {*_OPTIONS_OF[layout], "owner"} - set(_SPLITTING)
    given: dict[str, Any] = {name: getattr(o, name) for name in names}
    if "size" in given and o.size is None:
        given["size"] = {layouts.OMNIGLOT: 28, layouts.MINI_IMAGENET: 84}.get(layout)
    if layout in (layouts.CLASSES, layouts.MINI_IMAGENET):
        keeps = functools.partial(parts.mask, split=split) if parts else None
        return layouts.listed_classes(path, keeps=keeps, **given).records()
    if layout == layouts.OMNIGLOT:
        found = layouts.listed_omniglot(path, **given).records()
    elif layout == layouts.NPZ:
        if parts is not None:
            user_files.refuse_unnamed(path)
        found = user_files.npz_records(path, **given)
    else:
        if parts is None and split != TRAIN:
            given["public_units"] = ()
        found = user_files.table_records(path, **given)
    return found if parts is None else found.part(parts, split)


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
    console, bars = standard_error(), dict[str, ProgressBar]()
    with ExitStack() as shown:

        def show(done: int, total: int, what: str) -> None:
            if what not in bars:
                shown.close()
                bars[what] = ProgressBar(console, what, total, done)
                shown.enter_context(bars[what])
            bars[what].show(done)

        yield show
