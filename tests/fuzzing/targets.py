"""The readers of untrusted input, and the errors each may raise."""

import importlib.util
import json
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

import jaxdp_episodic as jde
from fuzzing import seeds
from fuzzing.mutations import broken_bytes, broken_documents
from jaxdp_episodic.accountant.describe.spec import spec_from_dict
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event
from jaxdp_episodic.data import from_huggingface, from_tfds, load_class_folders
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.tools.requests.batch import read_rows
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    read_population,
    read_request,
)
from jaxdp_episodic.tools.sweep import run as sweep_run
from jaxdp_episodic.tools.sweep.description import Sweep, read_sweep
from jaxdp_episodic.tools.train.search import read_search
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import ModelConfig
from jaxdp_episodic.trainer.data.sources import SOURCES, Glyphs, Schools
from jaxdp_episodic.trainer.data.stored import load_stored, store
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, npz_records
from jaxdp_episodic.trainer.run import release
from jaxdp_episodic.trainer.run.loading import load_release

# Errors that docstrings announce; any other is a defect.
CLEAR = (TypeError, ValueError, NotImplementedError, OSError)
_SPECS = (
    *(jde.Poisson, jde.WithoutReplacement, jde.MultistageSampling, jde.Population),
    *(jde.GroupedClasses, jde.IndependentEpisodes, jde.GaussianStep, jde.ComposedSteps),
)


class Target(NamedTuple):
    """One reader: what it is given, and how it reads a case in a folder."""

    name: str
    cases: st.SearchStrategy[Any]
    read: Callable[[Any, Path], Any]
    weight: float = 1.0  # share of all cases; readers that take long get few


def outcome(target: Target, case: Any, folder: Path) -> str:
    """Returns "accepted" or the class of the clear error that refused a case.

    Raises:
      AssertionError: an unexpected error, or one without a message.
    """
    try:
        # A warning is no clear error: NumPy's are signs of wrong arithmetic.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            target.read(case, folder)
    except CLEAR as error:
        assert str(error), f"{type(error).__name__} without a message"
        # Its message has bytes and offsets, but no file.
        assert not isinstance(error, UnicodeError), str(error)
        return type(error).__name__
    return "accepted"


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """Writes a case to a file of that name and reads it."""

    def from_bytes(case: bytes, folder: Path) -> Any:
        (folder / name).write_bytes(case)
        return read(folder / name)

    return from_bytes


def _json(name: str, read: Callable[[Path], Any]) -> Callable[[Any, Path], Any]:
    """Writes bytes, or a document as JSON, to a file and reads its folder."""

    def from_case(case: Any, folder: Path) -> Any:
        if not isinstance(case, bytes):
            case = json.dumps(case, default=str).encode()
        (folder / name).write_bytes(case)
        return read(folder)

    return from_case


def _toml(
    name: str, seed: bytes, read: Callable[[Path], Any], weight: float = 1.0
) -> Target:
    return Target(name, broken_bytes((seed,)), _file("x.toml", read), weight)


def _stored_files() -> dict[str, bytes]:
    """A small folder of `data import`, by the paths in it."""
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place, "x.npz"), Path(place, "out")
        source.write_bytes(seeds.npz())
        store(folder, {"train": npz_records(source)}, made_from={})
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def _stored(files: dict[str, bytes], name: str) -> Target:
    """One file of a folder of columns broken, the others whole."""

    def read(case: bytes, folder: Path) -> Any:
        (folder / "train").mkdir(exist_ok=True)
        for path, content in {**files, name: case}.items():
            (folder / path).write_bytes(content)
        return load_stored(folder).features[:]

    return Target(f"stored {name}", broken_bytes((files[name],)), read, 0.5)


def _source(case: Any, folder: Path) -> None:
    """A source, and its data unless they are the library's own."""
    source = spec_from_dict(SOURCES, case)
    if not isinstance(source, Glyphs | Schools):
        source.load("train", folder)


def _request_document(case: Any, folder: Path) -> Any:
    """A request, and its population, as a row of a batch has them."""
    if isinstance(case, dict) and "population" in case:
        read_population(case["population"], folder)
        case = {key: value for key, value in case.items() if key != "population"}
    return EpsilonRequest.from_dict(case)


def _rows(path: Path) -> None:
    """Every row is a mapping or a clear error."""
    for number, row, _ in read_rows(path):
        assert number >= 1
        assert isinstance(row, dict | TypeError | ValueError), type(row)


def _image(case: tuple[str, bytes], folder: Path) -> Any:
    kind, content = case
    inside = folder / "images" / "a"
    inside.mkdir(parents=True, exist_ok=True)
    for old in inside.iterdir():
        old.unlink()
    (inside / f"x.{kind}").write_bytes(content)
    return load_class_folders(folder / "images", size=4)


def _event(case: Any) -> Any:
    """Tables of a document as events."""
    if isinstance(case, dict):
        return SimpleNamespace(**{str(k): _event(v) for k, v in case.items()})
    # Other lists may be nested deeper than the stack.
    holds_events = isinstance(case, list) and any(isinstance(x, dict) for x in case)
    return [*map(_event, case)] if holds_events else case


def _sweep_files() -> tuple[dict[str, Any], bytes]:
    """The manifest of a sweep, and a shard."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "s.toml").write_bytes(seeds.SWEEP)
        opened = sweep_run.SweepFolder.opened(
            folder / "out", read_sweep(folder / "s.toml")
        )
        opened.save(0, np.arange(float(min(opened.size, opened.chunk_size))))
        manifest = json.loads((folder / "out" / sweep_run.MANIFEST).read_text())
        return manifest, opened.shard(0).read_bytes()


def _shard(manifest: dict[str, Any], whole: bytes) -> Callable[[bytes, Path], Any]:
    def load(case: bytes, folder: Path) -> None:
        (folder / sweep_run.SHARDS).mkdir(exist_ok=True)
        opened = sweep_run.SweepFolder(folder, manifest)
        opened.shard(0).write_bytes(case)
        # No error: damaged shards are evaluated again.
        assert (opened.load(0) is not None) == (case == whole)

    return load


def _table_columns(names: list[str], rows: int) -> Callable[[Path], Any]:
    def columns(path: Path) -> None:
        for block in sweep_run.read_columns(path, names, num_rows=rows):
            assert {column.size for column in block.values()} == {rows}

    return columns


# The description of a release of a small model; its parameters are valid.
_RELEASE = {
    "format": release.FORMAT,
    "version": release.VERSION,
    "stage": "steps",
    "learner": {
        "type": "Started",
        "learner": {"type": "ProtoNet", "apply": "model", "ways": 2},
    },
    "has_own_learner": False,
    "model": {
        **ModelConfig(kind="linear", embedding=2).to_dict(),
        "outputs": 2,
        "embeds": True,
        "input_shape": [3],
    },
    "features": None,
    "feature_shape": [4],
    "example_shape": [4],
    "dtype": "float32",
    "source": {"type": "Table", "groups": ["a"], "features": ["b"]},
    "parameters": {
        "start/mean": [4],
        "start/projection": [4, 3],
        "model/kernel": [3, 2],
    },
}


def _release(folder: Path) -> None:
    """A release whose description is broken."""
    shapes = _RELEASE["parameters"]
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    np.savez(folder / release.PARAMETERS, allow_pickle=False, **arrays)
    (folder / release.STATEMENT).write_text("# Privacy")
    (folder / release.FACTS).write_text("{}")
    load_release(folder)


def _jsons(document: Any) -> st.SearchStrategy[Any]:
    """Broken files and documents of JSON."""
    text = json.dumps(document).encode()
    return broken_bytes((text,)) | broken_documents((document,)).filter(_json_safe)


def _json_safe(document: Any) -> bool:
    """Whether a JSON file can hold the value."""
    try:
        json.dumps(document, default=str)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _population_file(path: Path) -> Any:
    table = {"file": path.name, "levels": ["school", "pupil"]}
    return read_population(table, path.parent)


def _table_file(path: Path) -> Any:
    return load_table(path, groups=["school"], features=["pupil"], target="score")


def _documents(
    name: str, documents: tuple[Any, ...], read: Callable[[Any], Any], weight: float = 1
) -> Target:
    return Target(name, broken_documents(documents), lambda c, _: read(c), weight)


def _bytes(name: str, seed: bytes, file: str, read: Callable[[Path], Any]) -> Target:
    return Target(name, broken_bytes((seed,)), _file(file, read))


def targets() -> list[Target]:
    """Returns all readers; those of Parquet where pyarrow is installed."""
    manifest, shard = _sweep_files()
    packed = (seeds.npz(), seeds.npz(compressed=True))
    stored = _stored_files()
    request = {"type": "EpsilonRequest", "version": 1, "num_steps": 9, "delta": 1e-5}
    requests = tuple(
        {**request, "step": step, "population": seeds.ROW["population"]}
        for step in seeds.SPECS[-3:]
    )
    training = tomllib.loads(seeds.TRAINING.decode()) | {"type": "TrainingConfig"}
    sweep = tomllib.loads(seeds.SWEEP.decode()) | {"type": "Sweep"}
    table = {"path": "x.csv", "groups": ["a"], "features": ["b"], "owner": "c"}
    sources = tuple(
        {"version": 1, "type": kind.__name__, "path": "x", "size": 14}
        for kind in SOURCES
    ) + (
        {"version": 1, "type": "Glyphs", "size": 14, "small": True},
        {"version": 1, "type": "Sinusoids", "num_tasks": 5, "points": 4},
        {"version": 1, "type": "Table", **table, "public_units": ["u", "v"]},
        {"version": 1, "type": "ClassFolders", "path": "x", "owner": r"^(\d+?)[_-]"},
    )
    sizes = ([12, 30], [[1, 2], [3]], {"sizes": 3})
    records = [{"image": [[1.0, 2.0]], "label": 0, "target": 0.5}] * 2
    named = {"features": "image", "label": "label", "target": "target"}
    pictures = st.sampled_from(("png", "jpeg", "gif", "bmp", "webp")).flatmap(
        lambda kind: st.tuples(st.just(kind), broken_bytes((seeds.image(kind),)))
    )
    columns = _table_columns(["pupil", "targets"], 6)
    found = [
        _toml("request", seeds.REQUEST, lambda p: read_request(p, EpsilonRequest)),
        _toml(
            "calibration",
            seeds.CALIBRATION,
            lambda p: read_request(p, CalibrationRequest),
        ),
        _toml("sweep", seeds.SWEEP, read_sweep, 0.3),
        _toml("plan", seeds.PLAN, read_plan),
        _toml("training config", seeds.TRAINING, read_config),
        _toml("search", seeds.SEARCH, read_search),
        _documents(
            "specs", seeds.SPECS, lambda c: spec_from_dict(_SPECS, c, where="spec"), 2
        ),
        Target("request documents", broken_documents(requests), _request_document),
        _documents("sweep documents", (sweep,), Sweep.from_dict, 0.3),
        _documents("training documents", (training,), TrainingConfig.from_dict),
        Target("data sources", broken_documents(sources), _source, 0.3),
        _documents("sizes", sizes, jde.Population.from_sizes),
        _bytes("batch jsonl", seeds.JSONL, "x.jsonl", _rows),
        _bytes("batch csv", seeds.CSV_ROWS, "x.csv", _rows),
        Target("npz", broken_bytes(packed), _file("x.npz", load_npz), 2.0),
        *(_stored(stored, name) for name in ("manifest.json", "train/features.npy")),
        Target("npz ids", broken_bytes(packed), _file("x.npz", _population_file)),
        _bytes("csv ids", seeds.CSV_TABLE, "x.csv", _population_file),
        _bytes("csv table", seeds.CSV_TABLE, "x.csv", _table_file),
        Target("images", pictures, _image),
        _documents("huggingface", (records,), lambda c: from_huggingface(c, **named)),
        _documents("tfds", (records,), lambda c: from_tfds(c, **named)),
        _documents("DpEvents", seeds.EVENTS, lambda c: from_dp_event(_event(c))),
        Target(
            "manifests",
            _jsons(manifest),
            _json(sweep_run.MANIFEST, sweep_run.read_manifest),
        ),
        Target("releases", _jsons(_RELEASE), _json(release.DESCRIPTION, _release), 0.3),
        Target("shards", broken_bytes((shard,)), _shard(manifest, shard)),
        Target("sweep npz", broken_bytes(packed), _file("x.npz", columns)),
    ]
    if importlib.util.find_spec("pyarrow") is not None:
        table, rows = map(seeds.parquet, (seeds.PARQUET_TABLE, seeds.PARQUET_ROWS))
        columns = _table_columns(["pupil", "score"], 3)
        found += [
            _bytes("parquet table", table, "x.parquet", _table_file),
            _bytes("batch parquet", rows, "x.parquet", _rows),
            _bytes("sweep parquet", table, "x.parquet", columns),
        ]
    return found
