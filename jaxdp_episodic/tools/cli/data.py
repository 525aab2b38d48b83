"""``jaxdp-episodic data``: imports data into folders that training reads from disk."""

from __future__ import annotations

import functools
import time
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
from jaxdp_episodic.trainer.data.stored import Records, load_stored, store
from jaxdp_episodic.trainer.data.table import ExampleTable

_SPLITTING = (VALIDATION, TEST, "split_salt")
_SPLIT = (layouts.CLASSES, layouts.OMNIGLOT, layouts.NPZ, layouts.PARQUET)
_IMAGES = (layouts.CLASSES, layouts.OMNIGLOT, layouts.MINI_IMAGENET)
_LAYOUTS_OF = {  # the layouts that an option is for; "owner" is for all
    **dict.fromkeys(_SPLITTING, _SPLIT),
    "size": (*_IMAGES, layouts.PARQUET),
    "grey": (layouts.CLASSES, layouts.PARQUET),
    "alphabets": (layouts.OMNIGLOT,),
    **dict.fromkeys(
        ("groups", "features", "images", "shape", "target", "public_units"),
        (layouts.PARQUET,),
    ),
}
_WIDTH = 10  # of the names of facts


def do_import(o: Options) -> list[str]:
    """The command ``data import``."""
    o.left_behind = lambda: "; nothing was written"
    layout = layouts.recognized(o.source) if o.layout == "auto" else o.layout
    if layout not in (*_SPLIT, layouts.MINI_IMAGENET):
        raise ValueError(
            f"{o.source} must be a folder of images, an .npz or a .parquet file, got "
            f"{layout}"
        )
    o.refuse_others(layout, _LAYOUTS_OF, "--layout ")
    given = o.given("owner", *_LAYOUTS_OF)
    splits = _splits(o, layout, given)
    names = {k: Path(v).name for k, v in given.items() if k in (VALIDATION, TEST)}
    made_from = {"layout": layout, "source": o.source.name, **given, **names}
    begun = time.perf_counter()
    with ProgressBar(standard_error(), "records", 0) as bar:
        store(o.folder, splits, made_from=made_from, on_progress=bar.show)
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
    with ProgressBar(standard_error(), "bytes", 0) as bar:
        size = check_sums(o.folder, bar.show)
    lines = [f"as it was made: {size:,} bytes"]
    for split in stored_splits(o.folder):
        for text in _people_row(load_stored(o.folder, split)).values():
            lines += facts({split: text}, _WIDTH)
    return lines


def _splits(o: Options, layout: str, given: dict[str, Any]) -> dict[str, Records]:
    """The records of each split."""
    how = {k: v for k, v in given.items() if k not in _SPLITTING}
    if layout == layouts.MINI_IMAGENET:
        folders = layouts.split_folders(o.source).items()
        how = {"size": 84} | how
        return {split: _records(layout, path, how) for split, path in folders}
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
            found[split] = _records(layout, path, how, split, parts)
    return found


def _records(
    layout: str,
    path: Path,
    how: dict[str, Any],
    split: str = TRAIN,
    parts: ClassSplit | None = None,
) -> Records:
    """The records of a path, or only those that ``parts`` puts into a split."""
    if layout in (layouts.CLASSES, layouts.MINI_IMAGENET):
        keeps = functools.partial(parts.mask, split=split) if parts else None
        return layouts.listed_classes(path, keeps=keeps, **how).records()
    if layout == layouts.OMNIGLOT:
        found = layouts.listed_omniglot(path, **how).records()
    elif layout == layouts.NPZ:
        if parts is not None:
            user_files.refuse_unnamed(path)
        found = user_files.npz_records(path, **how)
    else:
        how = {"groups": ()} | how
        if parts is None and split != TRAIN:
            how["public_units"] = ()
        found = user_files.table_records(path, **how)
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
