"""Data on disk: the same numbers as in memory; incomplete folders are refused."""

import dataclasses
import json
import os
import shutil
import sys
import threading
import types

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files import column_folder
from jaxdp_episodic.files.atomic import locked
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.folders import load_class_folders, load_omniglot
from jaxdp_episodic.trainer.data.stored import load_stored, store
from jaxdp_episodic.trainer.data.stored_features import CODE_VALUES, StoredFeatures
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, npz_records

RNG = np.random.default_rng(5)


def drawings(folder, counts, side=6):
    """Image folders whose paths and ids sort differently."""
    for place, (name, number) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for example in range(number):
            pixels = RNG.integers(0, 256, (side, side + place % 2, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{example}.png")


def same_tables(stored, table):
    """Every number, bit for bit, and the tree."""
    assert isinstance(stored.features, StoredFeatures)
    assert stored.features.dtype == table.features.dtype
    assert stored.features.shape == table.features.shape
    np.testing.assert_array_equal(stored.features[:], table.features, strict=True)
    assert stored.population == table.population
    for mine, other in zip(
        stored.population.unit_ids, table.population.unit_ids, strict=True
    ):
        np.testing.assert_array_equal(mine, other, strict=True)
    if table.targets is None:
        assert stored.targets is None
    else:
        np.testing.assert_array_equal(stored.targets, table.targets, strict=True)


def imported(source, folder, *options):
    assert cli.run(["data", "import", str(source), str(folder), *options]) == 0
    return load_stored(folder)


# --- The same numbers ---


def test_class_folders(tmp_path, capsys):
    drawings(tmp_path / "in", {"b": 3, "a": 2, "empty": 0, "a b": 4})
    options = ["--size", "5"]
    table = imported(tmp_path / "in", tmp_path / "out", *options)
    same_tables(table, load_class_folders(tmp_path / "in", size=5))
    assert os.stat(tmp_path / "out/train/features.npy").st_size == 128 + 9 * 5 * 5 * 3
    assert "example 9, uint8 5x5x3 each" in capsys.readouterr().out
    assert np.load(tmp_path / "out/train/features.npy", mmap_mode="r").dtype == np.uint8
    assert cli.run(["data", "check", str(tmp_path / "out")]) == 0


def test_omniglot_is_inverted_and_put_into_the_order_of_its_ids(tmp_path):
    """The id "A b/x" sorts before "A/x", but the folder "A" before "A b"."""
    for alphabet in ("A", "A b"):
        drawings(tmp_path / "in" / alphabet, {"x": 2, "y": 1})
    drawings(tmp_path / "held" / "C", {"z": 2})
    held = ["--test", str(tmp_path / "held"), "--size", "4"]
    for name, options in (("flat", []), ("deep", ["--alphabets"])):
        table = imported(tmp_path / "in", tmp_path / name, *held, *options)
        same_tables(
            table, load_omniglot(tmp_path / "in", size=4, alphabets=bool(options))
        )
        other = load_omniglot(tmp_path / "held", size=4, alphabets=bool(options))
        same_tables(load_stored(tmp_path / name, "test"), other)
    flat = load_omniglot(tmp_path / "in", size=4)
    assert flat.unit_column("class").tolist()[0] == "A b/x"


def test_mini_imagenet_has_three_splits(tmp_path):
    for part, name in (("train", "n1"), ("val", "n2"), ("test", "n3")):
        drawings(tmp_path / "in" / part, {name: 2})
    imported(tmp_path / "in", tmp_path / "out", "--size", "4")
    for split, part in (("train", "train"), ("validation", "val"), ("test", "test")):
        table = load_stored(tmp_path / "out", split)
        same_tables(table, load_class_folders(tmp_path / "in" / part, size=4))
    with pytest.raises(ValueError, match="split must be one of those in .* got 'dev'"):
        load_stored(tmp_path / "out", "dev")


NPZ = {
    "codes": {"images": RNG.integers(0, 256, (3, 4, 5, 5), dtype=np.uint8)},
    "named": {
        "images": RNG.integers(0, 256, (6, 5, 4, 2), dtype=np.uint8),
        "labels": np.array(["b", "a", "b", "c", "a", "b"]),
        "classes": np.array(["c", "a", "b", "d"]),
    },
    "truth": {"images": RNG.random((2, 3, 4, 4)) < 0.5},
    "floats": {"images": RNG.random((2, 3, 4, 4))},
    "half": {"features": RNG.random((2, 3, 7)).astype(np.float16)},
    "whole": {
        "features": RNG.integers(0, 99, (4, 7)),
        "labels": np.array([3, 1, 3, 2]),
    },
    "bytes": {"features": RNG.integers(0, 256, (2, 3, 7), dtype=np.uint8)},
    "logical": {"features": RNG.random((2, 3, 7)) < 0.5},
    "targets": {
        "features": RNG.random((4, 2)),
        "labels": np.array([1, 0, 1, 0]),
        "targets": np.arange(4) / 3,
    },
}


@pytest.mark.parametrize("name", NPZ)
def test_npz(name, tmp_path):
    path = tmp_path / "in.npz"
    (np.savez if name != "named" else np.savez_compressed)(path, **NPZ[name])
    table = imported(path, tmp_path / "out")
    same_tables(table, load_npz(path))
    kinds = {"codes": "u1", "named": "u1", "truth": "u1", "bytes": "u1", "whole": "i8"}
    column = np.load(tmp_path / "out/train/features.npy")
    assert column.dtype == np.dtype(kinds.get(name, "f4"))


def test_parquet_columns_lists_and_files(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pixels = RNG.integers(0, 256, (7, 2, 3, 3), dtype=np.uint8)
    names = ["u2", "u1", "u2", "u10", "u1", "u2", "u10"]
    flat = arrow.array(pixels.reshape(7, -1).tolist(), arrow.list_(arrow.uint8()))
    nested = arrow.array(pixels.tolist())  # int64, of three axes
    files = []
    for image in pixels:
        Image.fromarray(image).save(tmp_path / "one.png")
        files.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": "x"})
    table = {
        "user": names,
        "a": RNG.random(7),
        "b": np.arange(7),
        "y": RNG.random(7).astype(np.float32),
        "flat": flat,
        "nested": nested,
        "file": files,
    }
    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table(table), path, row_group_size=3)
    columns = ["--features", "a", "b", "--target", "y", "--groups", "user"]
    found = imported(path, tmp_path / "columns", *columns)
    wanted = load_table(path, groups=["user"], features=["a", "b"], target="y")
    same_tables(found, wanted)
    np.savez(tmp_path / "in.npz", images=pixels, labels=np.array(names))
    wanted = load_npz(tmp_path / "in.npz")
    groups = ["--groups", "user", "--images"]
    for name, options in (("flat", ["--shape", "2", "3", "3"]), ("file", [])):
        found = imported(path, tmp_path / name, *groups, name, *options)
        np.testing.assert_array_equal(found.features[:], wanted.features, strict=True)
    listed = ["--public-units", "u1", "u2", "u3", "u10"]
    found = imported(path, tmp_path / "public", *groups, "file", *listed)
    assert found.population.children_counts[1].tolist() == [2, 2, 3, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--groups", "u", "--images", "x", "--shape", "5"],
            "must have 5 numbers per row",
        ),
        (["--groups", "u", "--images", "x"], "shape must be given"),
        (["--groups", "u", "--images", "u"], "must contain image files, or lists"),
        (
            ["--groups", "u", "--images", "ragged", "--shape", "2"],
            "2 numbers per row|one",
        ),
        (["--groups", "u", "--features", "gone"], "no column 'gone'"),
        (["--groups", "u", "--features", "nan"], "got nan in record 2"),
        (["--groups", "u", "--features", "null"], "has a missing number"),
        (["--groups", "u"], "needs either features"),
        (["--features", "nan"], "groups must name columns"),
        (["--alphabets"], "--alphabets is for other layouts than parquet"),
    ],
)
def test_unsuitable_parquet_is_refused(options, message, tmp_path, capsys):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "u": ["a", "b"],
        "x": [[1, 2], [3, 4]],
        "ragged": [[1], [2, 3, 4]],
        "nan": [1.0, float("nan")],
        "null": [1.0, None],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "in.parquet")
    command = ["data", "import", str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    assert cli.run([*command, *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert any(part in err for part in message.split("|")), err
    assert not column_folder.is_complete(tmp_path / "out")


def test_parquet_without_pyarrow_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").touch()
    command = ["data", "import", str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    assert cli.run([*command, "--groups", "u", "--features", "x"]) == 2
    assert "pip install '.[sweep]'" in capsys.readouterr().err


# --- Reading by rows ---


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, **NPZ["named"])
    return types.SimpleNamespace(
        path=tmp_path / "out",
        table=imported(path, tmp_path / "out"),
        memory=load_npz(path),
        source=path,
    )


def test_indexing_equals_numpys(folder):
    features, array = folder.table.features, folder.memory.features
    assert len(features) == len(array) and features.ndim == array.ndim
    assert features.size == array.size
    mask = np.array([True, False, True, True, False, False])
    for index in (
        *(0, -1, slice(2, 4), slice(None, None, -2), slice(5, 2), mask, [], [3, 3, 0]),
        *(np.array([[5, 0], [2, -6]]), np.array(4), np.uint8([1, 2])),
    ):
        np.testing.assert_array_equal(features[index], array[index], strict=True)
    flat = features.reshape(6, 40)
    np.testing.assert_array_equal(flat[1:3], array.reshape(6, 40)[1:3], strict=True)
    np.testing.assert_array_equal(flat[[4, 1]], array.reshape(6, 40)[[4, 1]])
    np.testing.assert_array_equal(np.asarray(features), array, strict=True)
    for wrong in (6, -7, [0, 6], mask[:3], [0.5]):
        with pytest.raises(IndexError):
            features[wrong]


def test_codes_are_read_where_the_mask_is_true(folder):
    mask = np.array([[True, False], [False, True]])
    rows = np.array([[5, 10**9], [-3, 0]])  # masked places hold no valid index
    codes = folder.table.features.codes(rows, mask)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes[~mask], 0)
    there = CODE_VALUES["unit"][codes[mask]]
    np.testing.assert_array_equal(there, folder.memory.features[[5, 0]], strict=True)
    assert folder.table.features.codes(rows[:0], mask[:0]).shape == (0, 2, 5, 4, 2)


def test_threads_read_concurrently(folder):
    wrong = []

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            rows = rng.integers(0, 6, 20)
            if not np.array_equal(
                folder.table.features[rows], folder.memory.features[rows]
            ):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_selections_and_fingerprints_equal_those_in_memory(folder, tmp_path):
    kept = folder.table.select("class", ["a", "b"])
    np.testing.assert_array_equal(
        kept.features, folder.memory.select("class", ["a", "b"]).features, strict=True
    )
    again = imported(folder.source, tmp_path / "again")
    assert again.fingerprint == folder.table.fingerprint
    arrays = {**NPZ["named"], "images": NPZ["named"]["images"] ^ 1}
    np.savez(tmp_path / "other.npz", **arrays)
    other = imported(tmp_path / "other.npz", tmp_path / "other")
    assert other.fingerprint != folder.table.fingerprint
    assert other.population == folder.table.population


def test_scaled_codes_equal_the_loaders_bit_for_bit():
    images = np.arange(256, dtype=np.uint8).reshape(1, 256, 1, 1)
    scaled = np.array(images, np.float32)
    scaled /= 255
    assert CODE_VALUES["unit"].dtype == np.float32
    np.testing.assert_array_equal(CODE_VALUES["unit"], scaled.reshape(-1))
    np.testing.assert_array_equal(CODE_VALUES["inverted"], 1 - scaled.reshape(-1))


# --- Damaged folders ---


def _cut(folder):
    os.truncate(folder / "train/features.npy", 200)


def _grown(folder):
    with open(folder / "train/features.npy", "ab") as file:
        file.write(b"x")


def _swapped(folder):
    values = np.load(folder / "train/level2.counts.npy")
    np.save(folder / "train/level2.counts.npy", values[::-1].copy())


def _retyped(folder):
    values = np.load(folder / "train/features.npy")
    np.save(folder / "train/features.npy", values.view(np.int8))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "train/features.npy").unlink(), "features.npy"),
        (lambda f: (f / "train/level1.ids.npy").unlink(), "level1.ids.npy"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (_cut, "features.npy must have .* bytes .* has 200: it is truncated"),
        (_grown, "features.npy must have .* bytes .* it has grown"),
        (_swapped, "level2.counts.npy has changed: its SHA-256"),
        (_retyped, r"must have \|u1 of shape .* has \|i1"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(harm, message, folder):
    harm(folder.path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_stored(folder.path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"splits": {}},
        {"splits": {"../x": {}}},
        {"splits": {"train": {"levels": ["a"], "columns": {"../features": {}}}}},
        {"splits": {"train": {"levels": ["a"], "columns": {"features": {}}}}},
        {"splits": {"train": {"levels": [], "columns": {"features": {}}}}},
    ],
)
def test_an_invalid_manifest_is_refused(change, folder):
    path = folder.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        load_stored(folder.path)


def test_owners_of_another_shape_are_refused(folder):
    path = folder.path / "manifest.json"
    manifest = json.loads(path.read_text())
    columns = manifest["splits"]["train"]["columns"]
    for name, other in (("owners", "features"), ("people", "level1.ids")):
        columns[name] = columns[other]
        files = (folder.path / f"train/{one}.npy" for one in (other, name))
        shutil.copy(*files)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="codes of owners must be integers, one per"):
        load_stored(folder.path)


def test_an_unknown_encoding_is_refused(folder):
    path = folder.path / "manifest.json"
    path.write_text(path.read_text().replace('"unit"', '"octal"'))
    with pytest.raises(ValueError, match="must hold uint8 in one of the encodings"):
        load_stored(folder.path)


def test_a_changed_byte_is_found_on_request(folder, capsys):
    with open(folder.path / "train/features.npy", "r+b") as file:
        file.seek(140)
        file.write(bytes([file.read(1)[0] ^ 1]))
    load_stored(folder.path)  # its size and type are unchanged
    assert cli.run(["data", "check", str(folder.path)]) == 2
    assert "features.npy has changed: its SHA-256" in capsys.readouterr().err


def test_a_file_truncated_after_opening_is_an_error(folder):
    os.truncate(folder.path / "train/features.npy", 200)
    with pytest.raises(
        ValueError, match=r"features\.npy ends within row 5: it was truncated"
    ):
        folder.table.features[[0, 5]]


# --- Imports are atomic ---


def records(folder, read=None):
    np.savez(folder / "in.npz", **NPZ["targets"])
    found = npz_records(folder / "in.npz")
    return found if read is None else dataclasses.replace(found, read=read)


def fails(wanted):
    yield wanted[:2], np.zeros((2, 2), np.float32)
    raise OSError("the disk fails")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (fails, "the disk fails"),
        (lambda wanted: [(wanted[:2], np.ones((2, 2), np.float32))], "4 .*got 2"),
        (lambda wanted: [(wanted, np.ones((4, 2)))], "must be float32 of shape"),
    ],
)
def test_an_import_that_fails_leaves_nothing(read, message, tmp_path):
    with pytest.raises((OSError, ValueError), match=message):
        store(tmp_path / "out", {"train": records(tmp_path, read)}, made_from={})
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_leftovers_of_a_killed_import_are_overwritten(tmp_path):
    (tmp_path / "out.part" / "train").mkdir(parents=True)
    (tmp_path / "out.part" / "train" / "features.npy").write_bytes(b"half")
    (tmp_path / "out").mkdir()
    store(tmp_path / "out", {"train": records(tmp_path)}, made_from={})
    same_tables(load_stored(tmp_path / "out"), load_npz(tmp_path / "in.npz"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out"]


def test_an_import_refuses_existing_folders(tmp_path, monkeypatch):
    made, out = records(tmp_path), tmp_path / "out"
    store(out, {"train": made}, made_from={})
    with pytest.raises(FileExistsError, match="already complete; name another"):
        store(out, {"train": made}, made_from={})
    with locked(tmp_path / "used.part"):
        with pytest.raises(BlockingIOError, match=r"in use by another process \(\d+\)"):
            store(tmp_path / "used", {"train": made}, made_from={})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(FileExistsError, match="must be empty, but has 'letter.txt'"):
        store(tmp_path / "mine", {"train": made}, made_from={})
    usage = types.SimpleNamespace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="bytes are needed, 10 are free"):
        store(tmp_path / "full", {"train": made}, made_from={})
    assert not (tmp_path / "full").exists()
