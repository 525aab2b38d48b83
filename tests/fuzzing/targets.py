"""The readers of untrusted input, and the errors each may raise."""

import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

from fuzzing import seeds
from fuzzing.mutations import broken_bytes, broken_documents, leaves
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.serialization import spec_from_dict
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.interop.dp_event import FIELDS, from_dp_event
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.tools.requests.batch import read_rows
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    read_population,
    read_request,
)
from jaxdp_episodic.tools.sweep.description import Sweep, read_sweep
from jaxdp_episodic.tools.sweep.run import (
    MANIFEST,
    SHARDS,
    SweepFolder,
    read_columns,
    read_manifest,
)
from jaxdp_episodic.tools.train.search_space import read_search
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import ModelConfig
from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.folders import load_class_folders
from jaxdp_episodic.trainer.data.sources import SOURCES, Glyphs, Schools
from jaxdp_episodic.trainer.data.stored import load_stored, store
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, npz_records
from jaxdp_episodic.trainer.run.loading import load_release
from jaxdp_episodic.trainer.run.release import (
    DESCRIPTION,
    FACTS,
    FORMAT,
    PARAMETERS,
    STATEMENT,
    VERSION,
)

# Errors that docstrings announce; any other is a defect.
CLEAR = (TypeError, ValueError, NotImplementedError, OSError)
_SPECS = (
    Poisson,
    WithoutReplacement,
    MultistageSampling,
    GroupedClasses,
    IndependentEpisodes,
    Population,
    GaussianStep,
    ComposedSteps,
)


class Target(NamedTuple):
    """One reader.

    Attributes:
      name: for reports.
      cases: what it is given.
      read: reads a case; the folder is there to write it to.
      weight: share of all cases; readers that take long get few.
    """

    name: str
    cases: st.SearchStrategy[Any]
    read: Callable[[Any, Path], Any]
    weight: float = 1.0


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
        path = folder / name
        path.write_bytes(case)
        return read(path)

    return from_bytes


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


def _spec(case: Any, folder: Path) -> Any:
    del folder
    return spec_from_dict(_SPECS, case, where="spec")


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


def _image(case: tuple[str, bytes], folder: Path) -> ExampleTable:
    kind, content = case
    inside = folder / "images" / "a"
    inside.mkdir(parents=True, exist_ok=True)
    for old in inside.iterdir():
        old.unlink()
    (inside / f"x.{kind}").write_bytes(content)
    return load_class_folders(folder / "images", size=4)


def _adapter(case: Any, folder: Path) -> ExampleTable:
    del folder
    which, rows = case
    read = from_tfds if which else from_huggingface
    return read(rows, features="image", label="label", target="target")


_EVENT_NAMES = (
    "GaussianDpEvent",
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
    "ComposedDpEvent",
    "SelfComposedDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "LaplaceDpEvent",
    "Event",
    b"GaussianDpEvent",
    b"\xff",
    7,
)


def _events() -> st.SearchStrategy[Any]:
    values = st.just(1) | leaves()

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.fixed_dictionaries(
            {"class_name": st.sampled_from(_EVENT_NAMES)},
            optional={
                "noise_multiplier": values,
                "sampling_probability": values,
                "sample_size": values,
                "source_dataset_size": values,
                "count": values,
                "event": inner,
                "events": st.lists(inner, max_size=3) | values,
            },
        )
        return st.builds(_event_of, fields, st.booleans())

    return st.recursive(leaves() | larger(st.none()), larger, max_leaves=6)


def _event_of(given: dict[str, Any], known_alone: bool) -> SimpleNamespace:
    """An event, mostly complete and without unknown fields."""
    usual = {
        "noise_multiplier": 1.0,
        "sampling_probability": 0.1,
        "sample_size": 3,
        "source_dataset_size": 9,
        "count": 2,
        "events": (),
    }
    known = FIELDS.get(given["class_name"])
    if known is None or not known_alone:
        return SimpleNamespace(**given)
    names = ["class_name", *known.split()]
    return SimpleNamespace(**{n: given.get(n, usual.get(n)) for n in names})


def _event(case: Any, folder: Path) -> Any:
    del folder
    return from_dp_event(case)


def _sweep_files() -> tuple[Sweep, dict[str, Any], bytes]:
    """A sweep, its manifest, and a shard."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "s.toml").write_bytes(seeds.SWEEP)
        sweep = read_sweep(folder / "s.toml")
        opened = SweepFolder.opened(folder / "out", sweep)
        opened.save(0, np.arange(float(min(opened.size, opened.chunk_size))))
        manifest = json.loads((folder / "out" / MANIFEST).read_text())
        return sweep, manifest, opened.shard(0).read_bytes()


def _manifest(case: Any, folder: Path) -> Any:
    text = case if isinstance(case, bytes) else json.dumps(case, default=str).encode()
    (folder / MANIFEST).write_bytes(text)
    return read_manifest(folder)


def _shard(manifest: dict[str, Any], whole: bytes) -> Callable[[bytes, Path], Any]:
    def load(case: bytes, folder: Path) -> None:
        (folder / SHARDS).mkdir(exist_ok=True)
        opened = SweepFolder(folder, manifest)
        opened.shard(0).write_bytes(case)
        # No error: damaged shards are evaluated again.
        assert (opened.load(0) is not None) == (case == whole)

    return load


def _table_columns(names: list[str], rows: int) -> Callable[[Path], Any]:
    def columns(path: Path) -> None:
        for block in read_columns(path, names, num_rows=rows):
            assert {column.size for column in block.values()} == {rows}

    return columns


# The description of a release of a small model; its parameters are valid.
_RELEASE = {
    "format": FORMAT,
    "version": VERSION,
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


def _release(case: Any, folder: Path) -> None:
    """A release whose description is broken."""
    shapes = _RELEASE["parameters"]
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    np.savez(folder / PARAMETERS, allow_pickle=False, **arrays)
    (folder / STATEMENT).write_text("# Privacy")
    (folder / FACTS).write_text("{}")
    text = case if isinstance(case, bytes) else json.dumps(case, default=str).encode()
    (folder / DESCRIPTION).write_bytes(text)
    load_release(folder)


def _json_safe(document: Any) -> bool:
    """Whether a JSON file can hold the value."""
    try:
        json.dumps(document, default=str)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def targets() -> list[Target]:
    """Returns all readers; those of Parquet where pyarrow is installed."""
    import tomllib

    sweep, manifest, shard = _sweep_files()
    del sweep
    packed = (seeds.npz(), seeds.npz(compressed=True))
    stored = _stored_files()
    request = {"type": "EpsilonRequest", "version": 1, "num_steps": 9, "delta": 1e-5}
    documents = tuple(
        {**request, "step": step, "population": seeds.ROW["population"]}
        for step in seeds.SPECS[-3:]
    )
    training = tomllib.loads(seeds.TRAINING.decode()) | {"type": "TrainingConfig"}
    sweep_table = tomllib.loads(seeds.SWEEP.decode()) | {"type": "Sweep"}
    sources = tuple(
        {"version": 1, "type": kind.__name__, "path": "x", "size": 14}
        for kind in SOURCES
    ) + (
        {"version": 1, "type": "Glyphs", "size": 14, "small": True},
        {"version": 1, "type": "Sinusoids", "num_tasks": 5, "points": 4},
        {
            "version": 1,
            "type": "Table",
            "path": "x.csv",
            "groups": ["a"],
            "features": ["b"],
            "public_units": ["u", "v"],
            "owner": "c",
        },
        {"version": 1, "type": "ClassFolders", "path": "x", "owner": r"^(\d+?)[_-]"},
    )
    records = {"image": [[1.0, 2.0]], "label": 0, "target": 0.5}

    def population_file(path: Path) -> Any:
        table = {"file": path.name, "levels": ["school", "pupil"]}
        return read_population(table, path.parent)

    def table_file(path: Path) -> Any:
        return load_table(path, groups=["school"], features=["pupil"], target="score")

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
        Target("specs", broken_documents(seeds.SPECS), _spec, 2.0),
        Target("request documents", broken_documents(documents), _request_document),
        Target(
            "sweep documents",
            broken_documents((sweep_table,)),
            lambda case, _: Sweep.from_dict(case),
            0.3,
        ),
        Target(
            "training documents",
            broken_documents((training,)),
            lambda case, _: TrainingConfig.from_dict(case),
        ),
        Target(
            "data sources",
            broken_documents(sources),
            _source,
            0.3,
        ),
        Target(
            "sizes",
            broken_documents(([12, 30], [[1, 2], [3]], {"sizes": 3})),
            lambda case, _: Population.from_sizes(case),
        ),
        Target("batch jsonl", broken_bytes((seeds.JSONL,)), _file("x.jsonl", _rows)),
        Target("batch csv", broken_bytes((seeds.CSV_ROWS,)), _file("x.csv", _rows)),
        Target("npz", broken_bytes(packed), _file("x.npz", load_npz), 2.0),
        *(_stored(stored, name) for name in ("manifest.json", "train/features.npy")),
        Target("npz ids", broken_bytes(packed), _file("x.npz", population_file)),
        Target(
            "csv ids", broken_bytes((seeds.CSV_TABLE,)), _file("x.csv", population_file)
        ),
        Target(
            "csv table", broken_bytes((seeds.CSV_TABLE,)), _file("x.csv", table_file)
        ),
        Target(
            "images",
            st.sampled_from(("png", "jpeg", "gif", "bmp", "webp")).flatmap(
                lambda kind: st.tuples(
                    st.just(kind), broken_bytes((seeds.image(kind),))
                )
            ),
            _image,
        ),
        Target(
            "adapters",
            st.tuples(st.booleans(), broken_documents(([records, records],))),
            _adapter,
        ),
        Target("DpEvents", _events(), _event),
        Target(
            "manifests",
            broken_bytes((json.dumps(manifest).encode(),))
            | broken_documents((manifest,)).filter(_json_safe),
            _manifest,
        ),
        Target(
            "releases",
            broken_bytes((json.dumps(_RELEASE).encode(),))
            | broken_documents((_RELEASE,)).filter(_json_safe),
            _release,
            0.3,
        ),
        Target("shards", broken_bytes((shard,)), _shard(manifest, shard)),
        Target(
            "sweep npz",
            broken_bytes(packed),
            _file("x.npz", _table_columns(["pupil", "targets"], 6)),
        ),
    ]
    if importlib.util.find_spec("pyarrow") is not None:
        table = broken_bytes((seeds.parquet(seeds.PARQUET_TABLE),))
        rows = broken_bytes((seeds.parquet(seeds.PARQUET_ROWS),))
        found += [
            Target("parquet table", table, _file("x.parquet", table_file)),
            Target("batch parquet", rows, _file("x.parquet", _rows)),
            Target(
                "sweep parquet",
                table,
                _file("x.parquet", _table_columns(["pupil", "score"], 3)),
            ),
        ]
    return found
