"""Classes split by their names into train, validation and test."""

import dataclasses
import itertools
import tomllib
import unicodedata

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files.column_folder import stored_splits
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.folders import load_class_folders
from jaxdp_episodic.trainer.data.sources import ClassFolders, Npz, Omniglot, Table
from jaxdp_episodic.trainer.data.splits import SPLITS, ClassSplit
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from training_runs import TINY

SPLIT = ClassSplit(validation=0.25, test=0.25)
NAMES = [f"class {number}" for number in range(400)]


def test_parts_are_disjoint_and_of_the_requested_size():
    masks = np.array([SPLIT.mask(NAMES, split) for split in SPLITS])
    assert (masks.sum(axis=0) == 1).all()
    # Of 400 classes 200, 100, 100, with standard deviations of 10, 8.7, 8.7.
    assert np.abs(masks.sum(axis=1) - [200, 100, 100]).max() < 30
    other = dataclasses.replace(SPLIT, salt="2")
    assert (other.mask(NAMES, "test") != masks[2]).any()
    larger = dataclasses.replace(SPLIT, validation=0.5)
    assert (larger.mask(NAMES, "test") == masks[2]).all()
    assert larger.mask(NAMES, "validation")[masks[1]].all()


def test_a_part_depends_on_the_name_alone():
    split = ClassSplit(test=0.5)
    for part in SPLITS:
        rest = np.delete(SPLIT.mask(NAMES[:12], part), 3)
        others = SPLIT.mask([*NAMES[:3], *NAMES[4:12]], part)
        np.testing.assert_array_equal(others, rest)
    # Another hash would move classes between runs of two versions.
    parts = " ".join(SPLIT.split_of(name)[:2] for name in NAMES[:10])
    assert parts == "te tr tr tr va te tr va va tr"
    assert SPLIT.split_of(7) == SPLIT.split_of("7")  # as a CSV and a Parquet file say
    # Some file systems decompose accents; a copy would then train on held-out data.
    names = [f"café {number}" for number in range(20)]
    apart = [unicodedata.normalize("NFD", name) for name in names]
    assert [*map(split.split_of, apart)] == [*map(split.split_of, names)]
    assert names != apart and len({*map(split.split_of, names)}) == 2


def tree():
    """Two levels of units above 24 examples; unit "v" has the single class "c"."""
    classes = ["a", "b", "c", "d", "e", "f"]
    parents = ["u", "u", "v", "w", "w", "w"]
    return ExampleTable.from_records(
        np.arange(24.0).reshape(24, 1),
        units={"unit": np.repeat(parents, 4), "class": np.repeat(classes, 4)},
        owners=np.tile(["ann", "bob"], 12),
    )


def test_units_above_stay_in_training_and_leave_other_parts():
    table = tree()
    kept = np.array([True, False, False, True, False, True])
    found = table.of_classes(kept)
    counts = [level.tolist() for level in found.population.children_counts]
    assert counts == [[3], [1, 0, 2], [4, 4, 4]]
    ids = [level.tolist() for level in found.population.unit_ids]
    assert ids == [["u", "v", "w"], ["a", "d", "f"]]
    rows = np.flatnonzero(np.repeat(kept, 4))
    np.testing.assert_array_equal(found.features[:, 0], rows)
    np.testing.assert_array_equal(found.owners.codes, table.owners.codes[rows])
    split = next(
        one
        for one in (ClassSplit(test=0.5, salt=str(salt)) for salt in range(99))
        if one.split_of("c") == "test" and one.split_of("a") == "train"
    )
    assert split.part(table, "train").num_units["unit"] == 3
    held_out = split.part(table, "test")
    assert min(map(min, held_out.population.children_counts)) > 0
    assert "c" in held_out.unit_column("class")


def test_empty_classes_stay_in_their_part():
    table = ExampleTable.from_records(
        np.ones((40, 1)), units={"class": NAMES[:40]}, public_units=NAMES[:80]
    )
    trained, held_out = (SPLIT.part(table, split) for split in ("train", "test"))
    mask = SPLIT.mask(NAMES[:80], "train")
    assert trained.num_units["class"] == mask.sum()
    assert trained.num_examples == mask[:40].sum()
    assert held_out.num_units["class"] == SPLIT.mask(NAMES[:40], "test").sum()
    with pytest.raises(ValueError, match=r"'test' must .* \d+ are empty; take other"):
        SPLIT.part(table.take(np.zeros(0, int)), "test")


def test_a_part_without_classes_is_refused():
    with pytest.raises(ValueError, match=r"test=0.25 assign none of 1 .* other shares"):
        other = "test" if SPLIT.split_of("class 0") == "train" else "train"
        SPLIT.mask(["class 0"], other)
    with pytest.raises(ValueError, match="split must be one of"):
        SPLIT.mask(NAMES, "dev")
    numbered = dataclasses.replace(tree().population, unit_ids=None)
    with pytest.raises(ValueError, match="classes with names"):
        SPLIT.part(dataclasses.replace(tree(), population=numbered), "train")


# --- Sources and imports ---


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """30 classes of three examples, in every form that can be split."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    names = [f"c{number}" for number in range(30)]
    for name, example in itertools.product(names, range(3)):
        pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
        for place in (folder / "folders" / name, folder / "omniglot" / name[:2] / name):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{example}.png")
    (folder / "folders" / "e3").mkdir()  # empty, of the test classes
    labels = rng.permutation(np.repeat(names, 3))
    images = rng.integers(0, 256, (90, 4, 4), dtype=np.uint8)
    np.savez(folder / "in.npz", images=images, labels=labels)
    np.savez(folder / "numbered.npz", images=images.reshape(30, 3, 4, 4))
    lines = [f"{label},{row}\n" for row, label in enumerate(labels)]
    (folder / "in.csv").write_text("task,x\n" + "".join(lines))
    return folder


SHARES = {"validation": 0.2, "test": 0.3}
SPLIT_SOURCES = [
    ClassFolders(path="folders", **SHARES),
    Omniglot(path="omniglot", size=4, alphabets=True, **SHARES),
    Npz(path="in.npz", split_salt="x", **SHARES),
    Table(path="in.csv", groups=("task",), features=("x",), **SHARES),
]


@pytest.mark.parametrize("source", SPLIT_SOURCES, ids=lambda s: type(s).__name__)
def test_every_source_splits_its_classes(source, files):
    level = "task" if isinstance(source, Table) else "class"
    whole = dataclasses.replace(source, validation=None, test=None, split_salt=None)
    every = whole.load("train", files)
    parts = [source.load(split, files) for split in SPLITS]
    assert sum(part.num_examples for part in parts) == every.num_examples == 90
    assert sum(p.num_units[level] for p in parts) == every.num_units[level]
    split = ClassSplit(**SHARES, salt=source.split_salt or "")
    for name, part in zip(SPLITS, parts, strict=True):
        wanted = [i for i in every.unit_column(level) if split.split_of(i) == name]
        assert part.unit_column(level).tolist() == wanted
        rows = np.isin(every.unit_column(level), wanted)
        np.testing.assert_array_equal(part.features, every.features[rows], strict=True)


@pytest.mark.parametrize("name", ["omniglot", "in.npz"])
def test_an_import_gives_the_same_parts(name, files, tmp_path):
    options = ["--validation", "0.2", "--test", "0.3", "--split-salt", "s"]
    command = ["data", "import", str(files / name), str(tmp_path / "out"), *options]
    assert cli.run(command) == 0
    assert stored_splits(tmp_path / "out") == SPLITS
    kind = Omniglot if name == "omniglot" else Npz
    source = kind(path=name, split_salt="s", **SHARES)
    for split in SPLITS:
        wanted, found = source.load(split, files), load_stored(tmp_path / "out", split)
        np.testing.assert_array_equal(found.features[:], wanted.features, strict=True)
        assert found.population == wanted.population


def test_a_share_and_a_path_can_be_mixed(files):
    source = ClassFolders(path="folders", validation=0.2, test="omniglot/c1")
    assert source.load("test", files).num_units["class"] == 11  # c1, c10 .. c19
    trained = source.load("train", files).num_units["class"]
    assert trained + source.load("validation", files).num_units["class"] == 31


def test_images_of_other_classes_are_not_opened(files, tmp_path):
    split = ClassSplit(test=0.5)
    for name in ("one", "two", "three", "four"):
        (tmp_path / name).mkdir()
        image = (files / "folders" / "c0" / "0.png").read_bytes()
        is_kept = split.split_of(name) == "train"
        (tmp_path / name / "0.png").write_bytes(image if is_kept else b"broken")
    assert ClassFolders(path=".", test=0.5).load("train", tmp_path).num_examples
    with pytest.raises(ValueError, match="must be a readable image"):
        load_class_folders(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassSplit(test=-0.1), r"test must lie in \[0, 1\)"),
        (lambda: ClassSplit(validation=float("nan")), "validation must not be NaN"),
        (lambda: Npz(path="a", split_salt="x", test="b"), "split_salt requires valid"),
        (lambda: Npz(path="a", validation=0.0), r"validation must lie in \(0, 1\)"),
        (
            lambda: Npz(path="a", validation=0.6, test=0.4),
            r"validation \+ test must be less than 1",
        ),
    ],
)
def test_invalid_splits_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_classes_without_names_are_not_split(files):
    with pytest.raises(ValueError, match="must have an array classes"):
        Npz(path="numbered.npz", test=0.2).load("train", files)


def test_protected_classes_under_replace_one_cannot_be_split_by_name(files):
    config = {**tomllib.loads(TINY), "type": "TrainingConfig"}
    config["data"] = {"type": "Npz", "path": "in.npz", "validation": 0.2}
    config["step"] |= {"privacy_unit": "class", "neighboring_relation": "add_remove"}
    data, _ = TrainingConfig.from_dict(config).training_data(files)
    assert 0 < data.num_units["class"] < 30
    config["step"]["neighboring_relation"] = "replace_one"
    with pytest.raises(NotImplementedError, match="may have a name that is held out"):
        TrainingConfig.from_dict(config).training_data(files)
    config["step"]["privacy_unit"] = "example"
    TrainingConfig.from_dict(config).training_data(files)
