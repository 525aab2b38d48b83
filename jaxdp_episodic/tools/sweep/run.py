"""A sweep from its description to its table, going on where it was interrupted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.tools.sweep.description import Sweep
from jaxdp_episodic.tools.sweep.engines import ChunkResult, Engine, on_devices
from jaxdp_episodic.tools.sweep.folder import SweepFolder
from jaxdp_episodic.tools.sweep.table import write_table

_MAX_FIRST_FAILURES = 8  # chunks that fail before one succeeds: so will the rest
_MAX_RANGES = 6  # of chunks' numbers in a message


class SweepError(ValueError):
    """Some chunks failed; the others are saved."""


@dataclass(frozen=True)
class Outcome:
    """What a call of `run_sweep` did."""

    size: int  # settings of the sweep
    num_chunks: int  # chunks of the sweep
    num_evaluated: int  # settings evaluated by this call
    seconds: float  # that this took
    table: Path | None  # the finished table; None while a job array is not complete
    warnings: tuple[str, ...]  # of the library, each once


def run_sweep(
    sweep: Sweep,
    path: str | Path,
    *,
    engine: Engine = on_devices,
    part: tuple[int, int] | None = None,
    console: Console | None = None,
) -> Outcome:
    """Evaluates what is still missing of a sweep, and makes the table."""
    number, parts = part or (1, 1)
    if not 1 <= number <= parts:
        raise ValueError(f"shard must be i/n with 1 <= i <= n, got {number}/{parts}")
    folder = SweepFolder.opened(Path(path), sweep)
    size, begun = (folder.size, folder.num_chunks), time.monotonic()
    if folder.table is not None:
        folder.remove_shards()  # a kill may have come just before
        return Outcome(*size, 0, 0.0, folder.table, ())
    numbers = range(number - 1, folder.num_chunks, parts)
    todo = folder.missing(numbers)
    evaluated, warned = 0, ()
    if todo:
        evaluated, warned = _evaluate(sweep, folder, todo, numbers, engine, console)
    seconds, table = time.monotonic() - begun, None
    if part is None:
        table = write_table(folder)
        folder.remove_shards()
    return Outcome(*size, evaluated, seconds, table, warned)


def collect(sweep: Sweep, path: str | Path) -> Outcome:
    """Makes the table of what a job array has evaluated."""
    folder = SweepFolder.opened(Path(path), sweep)
    if folder.table is None:
        missing = folder.missing(range(folder.num_chunks))
        if missing:
            raise ValueError(
                f"{len(missing)} of {folder.num_chunks} chunks are not there yet: "
                f"{_ranges(missing)}; run their shards, or without --collect to "
                "evaluate them here"
            )
        write_table(folder)
    folder.remove_shards()
    return Outcome(folder.size, folder.num_chunks, 0, 0.0, folder.table, ())


def _evaluate(
    sweep: Sweep,
    folder: SweepFolder,
    todo: Sequence[int],
    numbers: range,
    engine: Engine,
    console: Console | None,
) -> tuple[int, tuple[str, ...]]:
    """Evaluates and saves chunks; returns how many settings, and warnings."""
    total, left = (
        sum(stop - start for start, stop in map(folder.range_of, some))
        for some in (numbers, todo)
    )
    failed: list[ChunkResult] = []
    evaluated, warned = 0, dict[str, None]()
    console = console or Console(quiet=True)
    with (
        ProgressBar(console, "settings", total, total - left) as progress,
        contextlib.closing(engine(sweep, todo)) as results,  # pyright: ignore[reportArgumentType]: a generator
    ):
        for result in results:
            if result.answers is None:
                failed.append(result)
                if len(failed) >= _MAX_FIRST_FAILURES and not evaluated:
                    break
                continue
            folder.save(result.number, result.answers)
            evaluated += len(result.answers)
            warned |= dict.fromkeys(result.warnings)
            progress.advance(len(result.answers))
    if failed:
        first = min(failed, key=lambda result: result.number)
        start, stop = folder.range_of(first.number)
        found = _ranges(sorted(result.number for result in failed))
        raise SweepError(
            f"{len(failed)} of {len(todo)} chunks failed ({found}), what others gave "
            f"is saved; chunk {first.number} (settings {start:,} to {stop - 1:,}): "
            f"{first.error}"
        )
    return evaluated, tuple(warned)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers for a person: "0, 4 to 9"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:_MAX_RANGES]]
    return ", ".join(shown) + ", ..." * (len(ranges) > _MAX_RANGES)
