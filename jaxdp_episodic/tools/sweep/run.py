"""Runs a sweep: an engine evaluates numbered chunks, and a folder keeps the answers.

An engine (this machine's devices, or Ray) yields results in any order, failures
included; closing it stops it. A chunk's arrays have the same shape on every device, so
its bytes do not depend on the device.

DIR/manifest.json       the sweep; another one is refused
DIR/shards/00000012     the answers of chunk 12
DIR/table.parquet       the whole table, once all shards are there (or table.npz)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.accountant.describe.spec import refuse_hostile
from jaxdp_episodic.files.archive import read_arrays, read_bounded
from jaxdp_episodic.files.atomic import TEMPORARY, atomic_file, write_atomically
from jaxdp_episodic.files.json_file import differences, read_json
from jaxdp_episodic.files.optional import require, require_pyarrow
from jaxdp_episodic.files.parquet_file import record_batches
from jaxdp_episodic.tools.requests.request import EpsilonRequest
from jaxdp_episodic.tools.sweep.description import (
    METHOD,
    QUANTITY,
    WORD_FIELDS,
    Grid,
    Sweep,
    answer_columns,
    described_grid,
    description_hash,
)

MANIFEST = "manifest.json"
SHARDS = "shards"
PARQUET = "table.parquet"
NPZ = "table.npz"
_VERSION = 1  # of the manifest
_IDENTITY = ("sweep", "chunk_size", "versions")  # its keys that the hash covers
_LIBRARIES = ("jaxdp-episodic", "jax", "jaxlib", "numpy")  # the manifest has versions
_DIGEST_BYTES = 32  # of SHA-256
_MAX_MANIFEST_BYTES = 2**30  # each axis may list ten million values
_MAX_CHUNK = 2**30  # settings; far more than in any sweep


def chunk_range(number: int, size: int, chunk_size: int) -> tuple[int, int]:
    """Returns the first setting of a chunk, and the one after its last."""
    start = number * chunk_size
    return start, min(start + chunk_size, size)


class SweepFolder:
    """The folder of a sweep."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.size: int = manifest["num_settings"]
        self.chunk_size: int = manifest["chunk_size"]
        self.num_chunks = -(-self.size // self.chunk_size)

    @classmethod
    def opened(cls, path: Path, sweep: Sweep) -> SweepFolder:
        """Returns the folder for a sweep, made if missing; refuses another sweep's."""
        identity = {
            "sweep": sweep.description(),
            "chunk_size": sweep.chunk_size,
            "versions": {name: _version_of(name) for name in _LIBRARIES},
        }
        wanted = {
            "version": _VERSION,
            "kind": "sweep",
            **json.loads(json.dumps(identity)),  # turns tuples into lists
            "num_settings": sweep.grid.size,
            "hash": description_hash(identity),
        }
        if (path / MANIFEST).exists():
            known = read_manifest(path)
            if known["hash"] != wanted["hash"]:
                found = differences(known, wanted, "there", "now")
                for name in ("hash", "num_settings"):
                    found.pop(name, None)
                shown = [f"{k.removeprefix('sweep.')}: {v}" for k, v in found.items()]
                raise ValueError(
                    f"{path} holds another sweep; name another folder, or change back "
                    + "; ".join(shown[:5])
                    + "; ..." * (len(shown) > 5)
                )
        else:
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(f"{path} is not a folder")
            # A killed start leaves only temporary files.
            there = path.iterdir() if path.exists() else ()
            if others := [f.name for f in there if TEMPORARY not in f.name]:
                raise FileExistsError(
                    f"{path} is not empty and holds no sweep; name another folder "
                    f"(there is {others[0]!r})"
                )
            path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(wanted, indent=1, sort_keys=True) + "\n"
            write_atomically(path / MANIFEST, text)
        (path / SHARDS).mkdir(exist_ok=True)
        if (path / SHARDS).is_symlink():
            raise ValueError(f"{path / SHARDS} must not be a link")
        return cls(path, wanted)

    @functools.cached_property
    def grid(self) -> Grid:
        """The settings."""
        return described_grid(self.manifest["sweep"])

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the computed columns."""
        return answer_columns(self.grid, self.manifest["sweep"])

    @property
    def table(self) -> Path | None:
        """The path of the finished table, or None."""
        tables = (self.path / name for name in (PARQUET, NPZ))
        return next((path for path in tables if path.exists()), None)

    def shard(self, number: int) -> Path:
        """Returns the path of one chunk's shard."""
        return self.path / SHARDS / f"{number:08d}"

    def range_of(self, number: int) -> tuple[int, int]:
        """Returns the first setting of a chunk, and the one after its last."""
        return chunk_range(number, self.size, self.chunk_size)

    def save(self, number: int, answers: np.ndarray) -> None:
        """Saves the answers (n, k) of one chunk, atomically."""
        payload = np.ascontiguousarray(answers, "<f8").tobytes()
        content = self._digest(number, payload) + payload
        try:
            write_atomically(self.shard(number), content)
        except FileNotFoundError:
            # Another process may have made the table and removed the shards.
            if self.table is None:
                raise

    def load(self, number: int) -> np.ndarray | None:
        """Returns the answers (n, k) of a chunk; None if missing or damaged."""
        (start, stop), width = self.range_of(number), len(self.columns)
        size = _DIGEST_BYTES + 8 * width * (stop - start)
        try:
            data = read_bounded(self.shard(number), size)
        except (FileNotFoundError, ValueError):
            return None
        payload = data[_DIGEST_BYTES:]
        if len(data) < size or data[:_DIGEST_BYTES] != self._digest(number, payload):
            return None
        return np.frombuffer(payload, "<f8").reshape(-1, width)

    def remove_shards(self) -> None:
        """Removes the shards and the temporary files of killed processes."""
        shards = self.path / SHARDS
        if shards.is_symlink():
            raise ValueError(f"{shards} must not be a link")
        for folder in (shards, self.path):
            for file in folder.iterdir() if folder.is_dir() else ():
                is_shard = folder == shards and file.name.isdecimal()
                if is_shard or TEMPORARY in file.name:
                    file.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not any(shards.iterdir()):
                shards.rmdir()

    def _digest(self, number: int, payload: bytes) -> bytes:
        """The head of a shard; its payload is the answers, row after row."""
        head = f"{self.manifest['hash']} {number}\n".encode()
        return hashlib.sha256(head + payload).digest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a sweep's folder; refuses one that was edited."""
    file = path / MANIFEST
    try:
        manifest = read_json(file, max_bytes=_MAX_MANIFEST_BYTES)
        refuse_hostile("manifest", manifest)
        _validation.instance("it", manifest, dict, "an object")
        version, kind = manifest.get("version"), manifest.get("kind")
        if type(version) is not int or version != _VERSION or kind != "sweep":
            raise ValueError(f"version {_validation.shown(version)} is not known")
        identity = {key: manifest.get(key) for key in _IDENTITY}
        if manifest.get("hash") != description_hash(identity):
            raise ValueError("its hash is wrong: it was edited")
        chunk = manifest.get("chunk_size")
        _validation.instance("chunk_size", chunk, int, "a whole number")
        _validation.whole_number("chunk_size", chunk, maximum=_MAX_CHUNK)
        sweep = _validation.instance("sweep", manifest.get("sweep"), dict, "a table")
        size = described_grid(sweep).size
        if manifest.get("num_settings") != size:
            raise ValueError(f"num_settings must be {size}, the product of its axes")
    except FileNotFoundError:
        said = f"{path} holds no sweep: it has no {MANIFEST}"
        raise FileNotFoundError(said) from None
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{file} is not the manifest of a sweep: {error}") from None
    return manifest


def saved_chunks(path: Path) -> tuple[int, int] | None:
    """Returns the numbers of saved and of all chunks; None if it holds no sweep."""
    try:
        folder = SweepFolder(path, read_manifest(path))
        names = [file.name for file in (path / SHARDS).iterdir()]
    except (OSError, ValueError):
        return None
    return sum(name.isdigit() for name in names), folder.num_chunks


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # it runs from its sources


# NumPy's kinds of columns of numbers and of words (Arrow gives words as objects).
_KINDS_OF = ("iufb", "UO")
_BLOCK = 1 << 20  # settings in memory, and in a row group of the Parquet file
_CELL_BYTES = 512  # most of a cell (100 letters take 400); 8 hold all columns' headers


def write_table(folder: SweepFolder) -> Path:
    """Writes the table from the shards, which must all be there; returns its path."""
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    path = folder.path / (PARQUET if has_pyarrow else NPZ)
    try:
        with atomic_file(path) as file:
            blocks = _columns(folder)
            if has_pyarrow:
                pyarrow, parquet = require_pyarrow(purpose="a Parquet table")
                tables = map(pyarrow.table, blocks)
                first = next(tables)
                how = {"schema": first.schema, "compression": "zstd"}
                with parquet.ParquetWriter(file, **how) as writer:
                    for table in itertools.chain([first], tables):
                        writer.write_table(table)
            else:
                every = list(blocks)
                columns: Any = {
                    name: np.concatenate([block[name] for block in every])
                    for name in every[0]
                }
                np.savez(file, **columns)
    except ValueError:
        # Another process may have made it; see `SweepFolder.save`.
        if folder.table is None:
            raise
        return folder.table
    return path


def read_columns(
    path: Path, names: Sequence[str], *, num_rows: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields some columns of a table in blocks, in the order of the rows."""
    rows = 0
    try:
        for block in _blocks(path, names, num_rows):
            size = next(iter(block.values())).size
            for name, column in block.items():
                is_odd = column.dtype.kind not in _KINDS_OF[name in WORD_FIELDS]
                if is_odd or column.shape != (size,):
                    raise ValueError(f"column {name!r}")
            rows += size
            if num_rows is not None and rows > num_rows:
                break
            yield block
        if num_rows not in (None, rows):
            raise ValueError(f"it must have {num_rows:,} rows")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _blocks(
    path: Path, names: Sequence[str], num_rows: int | None
) -> Iterator[dict[str, np.ndarray]]:
    if path.suffix == ".npz":
        most = 2**63 if num_rows is None else _CELL_BYTES * (num_rows + 8) * len(names)
        yield read_arrays(path, max_bytes=most, names=list(names))
        return
    for batch in record_batches(path, names, _BLOCK):
        columns = ((name, batch.column(name)) for name in names)
        yield {n: np.asarray(c.to_numpy(zero_copy_only=False)) for n, c in columns}


def _columns(folder: SweepFolder) -> Iterator[dict[str, np.ndarray]]:
    """The table's columns, some chunks at a time."""
    kinds = {"num_steps": np.int64, "is_certified_bound": np.bool_}
    at_a_time = max(1, _BLOCK // folder.chunk_size)
    for first in range(0, folder.num_chunks, at_a_time):
        parts = []
        for number in range(first, min(first + at_a_time, folder.num_chunks)):
            part = folder.load(number)
            if part is None:
                raise ValueError(f"{folder.shard(number)} is missing or damaged")
            parts.append(part)
        answers, (start, _) = np.concatenate(parts), folder.range_of(first)
        yield folder.grid.values(np.arange(start, start + len(answers))) | {
            name: column.astype(kinds.get(name, np.float64))
            for name, column in zip(folder.columns, answers.T, strict=True)
        }


_CHUNKS_A_DEVICE = 2  # so that a device works while answers are put together
# The same text for every chunk, so that it is printed once.
_CERTIFIED = (
    "some answers could not be computed exactly and are certified upper bounds: those "
    "with is_certified_bound in the table"
)


class ChunkResult(NamedTuple):
    """The outcome of a chunk."""

    number: int  # of the chunk
    answers: np.ndarray | None  # (n, k), see `evaluate_chunk`; None after an error
    warnings: list[str]  # of the library
    error: str | None = None


Engine = Callable[[Sweep, Sequence[int]], Iterator[ChunkResult]]


def evaluate_chunk(sweep: Sweep, number: int) -> tuple[np.ndarray, list[str]]:
    """Returns the answers (n, k) of one chunk, and the library's warnings."""
    start, stop = chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values, size = sweep.grid.values(np.arange(start, stop)), stop - start
    quantity = values.get(QUANTITY, np.full(size, sweep.quantities[0]))
    method = values.get(METHOD, np.full(size, sweep.methods[0]))
    width = len(answer_columns(sweep.grid, vars(sweep)))
    answers = np.full((size, width), np.nan)
    with _validation.recorded_warnings() as texts:
        for wanted, way in itertools.product(sweep.quantities, sweep.methods):
            chosen = np.flatnonzero((quantity == wanted) & (method == way))
            if not chosen.size:
                continue
            some = {name: column[chosen] for name, column in values.items()}
            request = sweep.request(wanted, way, some)
            # The engine is chosen for the whole sweep, not for this chunk.
            with asking_together(sweep.grid.size, once=True):
                if width > 1 and isinstance(request, EpsilonRequest):
                    value, info = request.answer_with_info()
                    answers[chosen] = np.stack([value, *info], axis=-1)
                    if way == "exact" and np.any(info.is_certified_bound):
                        warnings.warn(_CERTIFIED, stacklevel=2)
                else:
                    answers[chosen, 0] = request.answer()
                    answers[chosen, 2:] = 0.0  # whether it is a certified bound
    return answers, texts


def attempt(sweep: Sweep, number: int) -> ChunkResult:
    """Evaluates one chunk; any error is in the result."""
    try:
        return ChunkResult(number, *evaluate_chunk(sweep, number))
    # Any error, as the other chunks must continue; it is shown at the end.
    except Exception as error:
        reason = f"{type(error).__name__}: {_validation.one_line(error)}"
        return ChunkResult(number, None, [], reason)


def _in_work(
    numbers: Sequence[int], width: int, begin: Callable[[int], Future[Any]]
) -> Iterator[tuple[int, Future[Any]]]:
    """Yields the numbers and futures of finished chunks, ``width`` at work at a time.

    No chunk is begun before the consumer has taken an earlier one.
    """
    waiting, begun = iter(numbers), dict[Future[Any], int]()
    while True:
        for number in itertools.islice(waiting, width - len(begun)):
            begun[begin(number)] = number
        if not begun:
            return
        done = next(as_completed(begun))
        yield begun.pop(done), done


def on_devices(sweep: Sweep, numbers: Sequence[int]) -> Iterator[ChunkResult]:
    """Evaluates chunks on all local devices in turn, two at a time on each."""
    devices = jax.local_devices()
    width, turns = _CHUNKS_A_DEVICE * len(devices), itertools.cycle(devices)

    def work(number: int, device: Any) -> ChunkResult:
        with jax.default_device(device):
            return attempt(sweep, number)

    with ThreadPoolExecutor(width) as pool:
        for _, done in _in_work(
            numbers, width, lambda number: pool.submit(work, number, next(turns))
        ):
            yield done.result()


@dataclass(frozen=True)
class RayEngine:
    """An engine that evaluates chunks as tasks on Ray; this process saves them."""

    # The workers need this library in the same version.
    # Address of a cluster for `ray.init`: "auto" is the one that this machine belongs
    # to, "local" starts one on this machine.
    address: str = "local"
    num_cpus: float = 1  # per task
    num_gpus: float = 0  # per task; may be a fraction
    max_retries: int = 5  # of a task whose worker was lost

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            value = getattr(self, f"num_{name}")
            if not np.isfinite(_validation.nonnegative_array(f"--ray-{name}", value)):
                raise ValueError(f"--ray-{name} must be finite, got {value}")
        _validation.integer_array("--ray-retries", self.max_retries, minimum=0)

    def __call__(self, sweep: Sweep, numbers: Sequence[int]) -> Iterator[ChunkResult]:
        """Yields one result per chunk."""
        # Without this, Ray warns about GPUs that a task does not use.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray = require("ray", purpose="the Ray engine", extra="ray")
        started = not ray.is_initialized()
        if started:
            local = {"include_dashboard": False} if self.address == "local" else {}
            quiet = {"log_to_driver": False, "logging_level": "error"}
            try:
                ray.init(address=self.address, **quiet, **local)
            except (ConnectionError, ValueError):
                raise
            # Ray has no exception type for a node that does not start.
            except Exception as error:
                reason = _validation.one_line(error)
                raise ConnectionError(f"Ray did not start: {reason}") from error
        try:
            needs = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
            task = ray.remote(**needs, max_retries=self.max_retries)(attempt)
            there = ray.put(sweep)
            # A few tasks for every slot of the cluster.
            width = 2 * max(2, int(ray.cluster_resources().get("CPU", 1)))
            work = _in_work(
                numbers, width, lambda number: task.remote(there, number).future()
            )
            for number, done in work:
                try:
                    yield done.result()
                except ray.exceptions.RayError as error:
                    yield ChunkResult(number, None, [], _validation.one_line(error))
        finally:
            if started:
                ray.shutdown()


_MAX_FIRST_FAILURES = 8  # failed chunks after which a sweep without success stops
_MAX_RANGES = 6  # ranges of chunks in a message


class SweepError(ValueError):
    """Some chunks failed; the others are saved."""


class Outcome(NamedTuple):
    """The outcome of a call of `run_sweep`."""

    size: int  # settings of the sweep
    num_chunks: int  # chunks of the sweep
    num_evaluated: int  # settings evaluated by this call
    seconds: float  # time of the evaluation
    table: Path | None  # the finished table; None after a part of a job array
    warnings: tuple[str, ...]  # of the library, each once


def run_sweep(
    sweep: Sweep,
    path: str | Path,
    *,
    engine: Engine | None = on_devices,  # None: all chunks must be there
    part: tuple[int, int] | None = None,  # (i, n): every n-th chunk, from the i-th
    console: Console | None = None,
) -> Outcome:
    """Evaluates the missing chunks of a sweep, and makes the table."""
    number, parts = part or (1, 1)
    if not 1 <= number <= parts:
        raise ValueError(f"shard must be i/n with 1 <= i <= n, got {number}/{parts}")
    folder = SweepFolder.opened(Path(path), sweep)
    evaluated, warned, begun = 0, (), time.monotonic()
    if folder.table is None:
        numbers = range(number - 1, folder.num_chunks, parts)
        todo = [number for number in numbers if folder.load(number) is None]
        if todo and engine is None:
            raise ValueError(
                f"{len(todo)} of {folder.num_chunks} chunks are missing: "
                f"{_ranges(todo)}; run their shards, or leave out --collect to "
                "evaluate them here"
            )
        if todo and engine is not None:
            total, left = (
                sum(stop - start for start, stop in map(folder.range_of, some))
                for some in (numbers, todo)
            )
            bar = ProgressBar(console, "settings", total, total - left)
            evaluated, warned = _save_all(folder, todo, engine(sweep, todo), bar)
    seconds = time.monotonic() - begun
    if part is None and folder.table is None:
        write_table(folder)
    if folder.table is not None:
        folder.remove_shards()  # also those of a call that was killed before this
    size = folder.size, folder.num_chunks
    return Outcome(*size, evaluated, seconds, folder.table, warned)


def _save_all(
    folder: SweepFolder, todo: Sequence[int], results: Any, bar: ProgressBar
) -> tuple[int, tuple[str, ...]]:
    """Saves the results of an engine; returns the number of settings, and warnings."""
    failed: list[ChunkResult] = []
    evaluated, warned = 0, dict[str, None]()
    with bar, contextlib.closing(results):
        for result in results:
            if result.answers is None:
                failed.append(result)
                if len(failed) >= _MAX_FIRST_FAILURES and not evaluated:
                    break
                continue
            folder.save(result.number, result.answers)
            evaluated += len(result.answers)
            warned |= dict.fromkeys(result.warnings)
            bar.advance(len(result.answers))
    if failed:
        first = min(failed, key=lambda result: result.number)
        start, stop = folder.range_of(first.number)
        found = _ranges(sorted(result.number for result in failed))
        raise SweepError(
            f"{len(failed)} of {len(todo)} chunks failed ({found}), the others are "
            f"saved; chunk {first.number} (settings {start:,} to {stop - 1:,}): "
            f"{first.error}"
        )
    return evaluated, tuple(warned)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "0, 4 to 9"."""
    places = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = np.split(np.array(numbers), places)
    shown = [f"{r[0]}" + f" to {r[-1]}" * (len(r) > 1) for r in runs[:_MAX_RANGES]]
    return ", ".join(shown) + ", ..." * (len(runs) > _MAX_RANGES)
