"""Data sources, adapters, and the built-in data sets."""

import functools
import hashlib
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.accountant.describe.spec import spec_from_dict
from jaxdp_episodic.trainer.data import built_in
from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.built_in import (
    load_glyphs,
    load_schools,
    make_sinusoids,
)
from jaxdp_episodic.trainer.data.sources import SOURCES, Glyphs, Npz, Sinusoids, Table
from jaxdp_episodic.trainer.data.table import ExampleTable


class Frame(dict):
    """The used part of a pandas frame."""

    def __getitem__(self, name):
        values = super().__getitem__(name)
        return types.SimpleNamespace(to_numpy=lambda: values)


def chem97(monkeypatch, schools):
    """1 to 9 pupils of each school, with the columns of the real data set."""
    rng = np.random.default_rng(0)
    school = np.repeat(schools, 1 + np.asarray(schools) % 9)
    number = len(school)
    columns = {
        "lea": school // 10,
        "school": school,
        "score": rng.choice([0, 2, 4, 6, 8, 10], number),
        "gender": rng.choice(["M", "F"], number),
        "age": rng.integers(-6, 6, number),
        "gcsescore": rng.uniform(0, 8, number),
    }
    fake = types.SimpleNamespace(data=lambda package, name: Frame(columns))
    monkeypatch.setattr(built_in, "require", lambda module, purpose: fake)
    return columns


def test_schools_are_split_by_school_and_scaled_by_public_constants(monkeypatch):
    columns = chem97(monkeypatch, range(200))
    tables = {s: load_schools(s) for s in ("train", "validation", "test")}
    ids = [set(t.unit_column("school").tolist()) for t in tables.values()]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 200
    assert 0.6 < len(ids[0]) / 200 < 0.8
    assert sum(t.num_examples for t in tables.values()) == len(columns["school"])
    train = tables["train"]
    assert train.targets is not None
    assert np.abs(train.targets).max() <= 1
    kept = np.isin(columns["school"], list(ids[0]))
    order = np.argsort(columns["school"][kept], kind="stable")
    score = columns["score"][kept][order]
    np.testing.assert_allclose(train.targets, (score - 5) / 5, rtol=1e-6)
    tree = load_schools("train", authorities=True)
    assert tree.level_names == ("authority", "school", "pupil")
    # The split of a school does not depend on others.
    chem97(monkeypatch, range(0, 200, 2))
    after = set(load_schools("test").unit_column("school").tolist())
    assert after == {school for school in ids[2] if school % 2 == 0}


def test_sinusoids():
    table = make_sinusoids(50, points=20, seed=1)
    assert table.features.shape == (1_000, 1) and table.level_names == ("task", "point")
    assert table.targets is not None
    assert np.abs(table.targets).max() <= 5 and np.abs(table.features).max() <= 5
    # Points of a task lie on one sinusoid: y = a sin x + b cos x fits exactly.
    x = table.features[:20, 0].astype(np.float64)
    waves = np.stack([np.sin(x), np.cos(x)], axis=1)
    residual = np.linalg.lstsq(waves, table.targets[:20].astype(np.float64), rcond=None)
    assert residual[1][0] < 1e-9
    assert make_sinusoids(50, points=20, seed=1).fingerprint == table.fingerprint
    with pytest.raises(ValueError, match="seed=-1: expected non-negative"):
        make_sinusoids(50, points=20, seed=-1)


class Dataset(list):
    """The used part of a datasets.Dataset."""

    features = {"label": types.SimpleNamespace(names=["cat", "dog"])}


ROWS = [{"image": np.full((2, 2), 51 * i, np.uint8), "label": i % 2} for i in range(4)]


def test_hugging_face():
    table = from_huggingface(Dataset(ROWS), features="image", label="label")
    assert table.unit_column("class").tolist() == ["cat", "cat", "dog", "dog"]
    np.testing.assert_allclose(table.features[:, 0, 0, 0], [0, 0.4, 0.2, 0.6])
    with pytest.raises(TypeError, match="must be one split"):
        from_huggingface({"train": ROWS}, features="image", label="label")
    with pytest.raises(ValueError, match="must have 'img'"):
        from_huggingface(Dataset(ROWS), features="img", label="label")
    with pytest.raises(ValueError, match="at least one record"):
        from_huggingface(Dataset(), features="image", label="label")


def test_unknown_labels_are_refused():
    """Hugging Face writes -1 or None, and Python would index the last name by -1."""
    for label in (-1, 2, None):
        rows = Dataset([*ROWS, {"image": ROWS[0]["image"], "label": label}])
        with pytest.raises(ValueError, match=f"got {label} as 'label' in record 4"):
            from_huggingface(rows, features="image", label="label")


def test_an_option_converts_grey_images_among_colour():
    colour = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    for made in (np.asarray, Image.fromarray):
        rows = [
            {"image": made(colour), "label": 0},
            {"image": made(colour[..., 0]), "label": 1},
        ]
        with pytest.raises(ValueError, match=r"one shape, .* record 1 .*grey=False"):
            from_huggingface(Dataset(rows), features="image", label="label")
        read = functools.partial(
            from_huggingface, Dataset(rows), features="image", label="label"
        )
        whole = read(grey=False).features
        np.testing.assert_allclose(whole[0], colour / 255, rtol=1e-6)
        np.testing.assert_array_equal(whole[1], np.stack([whole[0, ..., 0]] * 3, -1))
        grey = np.asarray(Image.fromarray(colour).convert("L")) / np.float32(255)
        found = read(grey=True).features
        np.testing.assert_allclose(found[0, ..., 0], grey, rtol=1e-6)


def test_tfds():
    dataset = types.SimpleNamespace(as_numpy_iterator=lambda: iter(ROWS))
    assert from_tfds(dataset).unit_column("class").tolist() == [0, 0, 1, 1]
    ragged = [*ROWS, {"image": np.zeros((3, 2), np.uint8), "label": 0}]
    with pytest.raises(ValueError, match="have one shape"):
        from_tfds(ragged)
    with pytest.raises(TypeError, match="must be dictionaries"):
        from_tfds([(1, 2)])


def test_every_source_round_trips_through_a_dictionary():
    for source in SOURCES:
        needed = {"path": "x", "groups": ["a"], "features": ["b"]}
        known = {k: v for k, v in needed.items() if k in source.__dataclass_fields__}
        one = source(**known)
        assert spec_from_dict(SOURCES, one.to_dict()) == one


def test_splits_of_files_and_of_made_up_tasks(tmp_path):
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", features=np.ones((2, 3, 4)) * len(name))
    source = Npz(path="a.npz", test="b.npz")
    assert isinstance(source.load("train", tmp_path), ExampleTable)
    assert source.load("test", tmp_path).num_examples == 6
    with pytest.raises(ValueError, match="validation must be given"):
        source.load("validation", tmp_path)
    with pytest.raises(ValueError, match="split must be one of"):
        source.load("dev", tmp_path)
    tasks = Sinusoids(num_tasks=10, points=5)
    assert tasks.load("train").num_examples == 50
    assert tasks.load("test").num_examples == 3_000
    prints = {
        tasks.load(split).fingerprint for split in ("train", "validation", "test")
    }
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Glyphs(small="no"), "small must be true or false"),
        (lambda: Sinusoids(num_tasks="many"), "num_tasks must be a number"),
        (lambda: Npz(path=3), "path must be a non-empty string"),
        (lambda: Npz(path="x", test=True), "test must be a number"),
        (
            lambda: Table(path="x", groups="user", features=["a"]),
            "groups must be a list of names, got 'user'",
        ),
        (
            lambda: Table(path="x", groups=["u"], features=["a"], public_units=[True]),
            "public_units must be a list",
        ),
    ],
)
def test_types_are_checked_before_anything_is_read(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_public_units_are_those_of_the_training_file(tmp_path):
    """Held-out units are different ones, on another list."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"user,x\n{name}1,1\n{name}2,2\n")
    source = Table(
        path="a.csv",
        test="b.csv",
        groups=["user"],
        features=["x"],
        public_units=["a1", "a2", "a3"],
    )
    assert source.load("train", tmp_path).population.num_units(1) == 3
    assert source.load("test", tmp_path).population.num_units(1) == 2


# --- The built-in glyphs: content, origin and split ---

FOLDER = Path(built_in.__file__).parent
SIZES = {"train": 1_800, "validation": 200, "test": 350}
TEST_CLASSES = "cfe10d085c527eb7"


@pytest.mark.slow
def test_the_split_is_fixed_and_disjoint():
    classes = {split: load_glyphs(split).unit_column("class") for split in SIZES}
    for split, size in SIZES.items():
        names, counts = np.unique(classes[split], return_counts=True)
        assert len(names) == size and np.all(counts == 20)
    everything = np.concatenate([np.unique(c) for c in classes.values()])
    assert len(np.unique(everything)) == 2_350
    # A change here would move test classes into training.
    digest = hashlib.sha256("".join(np.unique(classes["test"])).encode()).hexdigest()
    assert digest[:16] == TEST_CLASSES


def test_sizes_of_glyphs():
    table = load_glyphs("validation")
    assert table.features.shape == (4_000, 28, 28, 1)
    assert set(np.unique(table.features)) == {0.0, 1.0}
    assert 0.1 < table.features.mean() < 0.4  # ink
    half = load_glyphs("validation", size=14)
    expected = table.features.reshape(4_000, 14, 2, 14, 2).mean(axis=(2, 4))
    np.testing.assert_array_equal(half.features[..., 0], expected)
    small = [load_glyphs(s, size=14, small=True) for s in SIZES]
    assert small[0].features.shape == (800, 14, 14, 1)
    names = [np.unique(table.unit_column("class")) for table in small]
    assert [len(n) for n in names] == [40, 8, 16]
    assert len(np.unique(np.concatenate(names))) == 64
    for arguments, message in (
        ({"split": "dev"}, "split must be one of"),
        ({"size": 20}, "size must be 14 or 28, got 20"),
        ({"size": 28, "small": True}, "size must be 14 with small=True"),
    ):
        with pytest.raises(ValueError, match=message):
            load_glyphs(**arguments)


def test_provenance_is_beside_the_data():
    record = tomllib.loads((FOLDER / "glyphs.toml").read_text(encoding="utf-8"))
    assert {face["package"] for face in record["typefaces"]} <= {*record["packages"]}
    for name, key in (("glyphs", "sha256"), ("glyphs_small", "sha256_small")):
        digest = hashlib.sha256()
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
            for member in stored.files:
                array = np.ascontiguousarray(stored[member])
                digest.update(member.encode() + array.tobytes())
        assert digest.hexdigest() == record[key]
