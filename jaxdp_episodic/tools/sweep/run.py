"""Runs a sweep: an engine (this machine's devices, Ray) evaluates numbered chunks.

An engine yields results in any order, failures included; closing it stops it. All
arrays of a chunk have one shape everywhere, so its bytes depend on no device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.tools.requests.request import EpsilonRequest
from jaxdp_episodic.tools.sweep.description import Sweep
from jaxdp_episodic.tools.sweep.folder import (
    INFO,
    SweepFolder,
    chunk_range,
    have_info,
    write_table,
)
from jaxdp_episodic.tools.sweep.grid import METHOD, QUANTITY

_CHUNKS_A_DEVICE = 2  # while one's answers are put together it works on the next
# The same words for every chunk, so that they are printed once.
_CERTIFIED = (
    "some answers could not be computed exactly and are certified upper bounds: those "
    "with is_certified_bound in the table"
)


class ChunkResult(NamedTuple):
    """What became of a chunk."""

    number: int  # of the chunk
    answers: np.ndarray | None  # (n, k) as of `evaluate_chunk`, or None
    warnings: list[str]  # of the library
    error: str | None = None  # why there are no answers, or None


Engine = Callable[[Sweep, Sequence[int]], Iterator[ChunkResult]]


def evaluate_chunk(sweep: Sweep, number: int) -> tuple[np.ndarray, list[str]]:
    """Returns the answers of one chunk, and what the library warned of."""
    start, stop = chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values, size = sweep.grid.values(np.arange(start, stop)), stop - start
    quantity = values.get(QUANTITY, np.full(size, sweep.quantities[0]))
    method = values.get(METHOD, np.full(size, sweep.methods[0]))
    has_info = have_info(sweep.quantities, sweep.methods)
    answers = np.full((size, 1 + has_info * len(INFO)), np.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for asked, way in itertools.product(sweep.quantities, sweep.methods):
            chosen = np.flatnonzero((quantity == asked) & (method == way))
            if not chosen.size:
                continue
            some = {name: column[chosen] for name, column in values.items()}
            request = sweep.request(asked, way, some)
            # However the sweep is cut into chunks, and by whichever process.
            with asking_together(sweep.grid.size):
                if has_info and isinstance(request, EpsilonRequest):
                    value, info = request.answer_with_info()
                    answers[chosen] = np.stack([value, *info], axis=-1)
                    if way == "exact" and np.any(info.is_certified_bound):
                        warnings.warn(_CERTIFIED, stacklevel=2)
                else:
                    answers[chosen, 0] = request.answer()
                    answers[chosen, 2:] = 0.0  # whether it is a certified bound
    return answers, list(dict.fromkeys(str(w.message) for w in caught))


def attempt(sweep: Sweep, number: int) -> ChunkResult:
    """Evaluates one chunk; whatever goes wrong is in the result."""
    try:
        return ChunkResult(number, *evaluate_chunk(sweep, number))
    # Anything: the other chunks must go on, and the message is shown in the end.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return ChunkResult(number, None, [], reason)


def _in_work(
    numbers: Sequence[int],
    width: int,
    begin: Callable[[int], Any],
    first_of: Callable[[list[Any]], Any],
) -> Iterator[tuple[int, Any]]:
    """Yields chunks that are done, with ``width`` in work."""
    waiting, begun = iter(numbers), dict[Any, int]()
    while True:
        for number in itertools.islice(waiting, width - len(begun)):
            begun[begin(number)] = number
        if not begun:
            return
        done = first_of(list(begun))
        yield begun.pop(done), done


def on_devices(sweep: Sweep, numbers: Sequence[int]) -> Iterator[ChunkResult]:
    """Evaluates chunks on all local devices, two at a time on each."""
    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    slots = (jax.local_devices() * _CHUNKS_A_DEVICE)[: len(numbers)]
    for device in slots:
        free.put(device)

    def work(number: int) -> ChunkResult:
        device = free.get()
        try:
            with jax.default_device(device):
                return attempt(sweep, number)
        finally:
            free.put(device)

    with ThreadPoolExecutor(max(len(slots), 1)) as pool:
        begin = functools.partial(pool.submit, work)
        first_of = lambda some: next(as_completed(some))  # noqa: E731
        for _, done in _in_work(numbers, len(slots), begin, first_of):
            yield done.result()


@dataclass(frozen=True)
class RayEngine:
    """Evaluates chunks as tasks on Ray; the answers come back here and are saved here.

    The workers need this library, in the same version. Called as an engine. A Ray that
    was not running before is stopped when the last chunk is done.
    """

    # Of a cluster, as `ray.init` takes it: "auto" for the one that this machine belongs
    # to, "local" to start one on this machine.
    address: str = "local"
    num_cpus: float = 1  # that a task asks for
    num_gpus: float = 0  # that a task asks for; parts of one are possible
    max_retries: int = 5  # of a task whose worker was lost

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            value = _validation.nonnegative_array(name, getattr(self, name))
            if not np.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        _validation.integer_array("max_retries", self.max_retries, minimum=0)

    def __call__(self, sweep: Sweep, numbers: Sequence[int]) -> Iterator[ChunkResult]:
        """Yields one result a chunk."""
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            self._start(ray)
        try:
            asked = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
            task = ray.remote(**asked, max_retries=self.max_retries)(attempt)
            begin = functools.partial(task.remote, ray.put(sweep))
            # A few tasks for every slot of the cluster.
            width = 2 * max(2, int(ray.cluster_resources().get("CPU", 1)))
            first_of = lambda some: ray.wait(some, num_returns=1)[0][0]  # noqa: E731
            for number, done in _in_work(numbers, width, begin, first_of):
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError as error:
                    reason = " ".join(str(error).split())
                    yield ChunkResult(number, None, [], reason)
        finally:
            if started:
                ray.shutdown()

    def _start(self, ray: Any) -> None:
        local = {"include_dashboard": False} if self.address == "local" else {}
        quiet = {"log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address=self.address, **quiet, **local)
        except (ConnectionError, ValueError):
            raise
        # Ray has no type of its own for a node that does not come up.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConnectionError(f"Ray did not start: {reason}") from error


@functools.cache
def _ray() -> Any:
    # Ray would otherwise say that it leaves GPUs alone when a task asks for none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return require("ray", purpose="the Ray engine", extra="ray")


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
