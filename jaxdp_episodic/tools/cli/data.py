"""``jaxdp-episodic data``: imports data into folders that training reads from disk."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant.describe.spec import spec_fields
from jaxdp_episodic.files.column_folder import check_sums, stored_splits
from jaxdp_episodic.tools.cli.command import Options, facts
from jaxdp_episodic.trainer.data import folders as layouts
from jaxdp_episodic.trainer.data.sources import LAYOUTS, ParquetColumns
from jaxdp_episodic.trainer.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from jaxdp_episodic.trainer.data.stored import load_stored, store
from jaxdp_episodic.trainer.data.table import ExampleTable

# What can be imported.
_SOURCES = {**LAYOUTS, layouts.PARQUET: ParquetColumns}
del _SOURCES[layouts.CSV], _SOURCES[layouts.STORED]
_ANY = 2**63  # bytes of a file that is imported
_OPTIONS = (
    *(VALIDATION, TEST, "split_salt", "size", "grey", "alphabets"),
    *("groups", "features", "images", "shape", "target", "public_units"),
)
# The layouts that an option is for.
_LAYOUTS_OF = {
    name: tuple(n for n, one in _SOURCES.items() if name in spec_fields(one))
    for name in _OPTIONS
}
_WIDTH = 10  # of the names of facts


def do_import(o: Options) -> list[str]:
    """The command ``data import``."""
    o.left_behind = lambda: "; nothing was written"
    layout = layouts.recognized(o.source) if o.layout == "auto" else o.layout
    if layout not in _SOURCES:
        raise ValueError(
            f"{o.source} must be a folder of images, an .npz or a .parquet file, got "
            f"{layout}"
        )
    o.refuse_others(layout, _LAYOUTS_OF, "--layout ")
    given = o.given("owner", *_OPTIONS)
    held_out = {name: text for name, text in given.items() if name in SPLITS}
    names = {name: Path(text).name for name, text in held_out.items()}
    for name, text in held_out.items():  # a share, or the path of a source
        with contextlib.suppress(ValueError):
            held_out[name] = float(text)
    source = _SOURCES[layout](path=str(o.source), **given | held_out)
    there = {TRAIN, *held_out}
    if layout == layouts.MINI_IMAGENET:
        there = {*layouts.split_folders(o.source)}
    bound = {"max_bytes": _ANY} if layout in (layouts.NPZ, layouts.PARQUET) else {}
    splits = {s: source.records(s, **bound) for s in SPLITS if s in there}
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
        kind = f"{records.first.dtype} {'x'.join(map(str, records.first.shape[1:]))}"
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


def _people_row(table: ExampleTable) -> dict[str, str]:
    """A row on the people who own the examples, if these are known."""
    return {} if table.people is None else {"": str(table.people)}
