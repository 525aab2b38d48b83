"""Data on disk: the same numbers and the same run as in memory, or a refusal."""

import dataclasses
import json
import os
import shutil
import sys
import types

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files import column_folder
from jaxdp_episodic.files.atomic import locked
from jaxdp_episodic.files.column_folder import StoredColumn
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.folders import load_class_folders, load_omniglot
from jaxdp_episodic.trainer.data.splits import rows_held_out
from jaxdp_episodic.trainer.data.stored import load_stored, store
from jaxdp_episodic.trainer.data.table import StoredFeatures, decoded
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, npz_records
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from training_runs import assert_same, plain_trainer

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
    command = ["data", "import", str(source), str(folder), *map(str, options)]
    assert cli.run(command) == 0
    return load_stored(folder)


# --- The same numbers ---


def test_class_folders(tmp_path, capsys):
    drawings(tmp_path / "in", {"b": 3, "a": 2, "empty": 0, "a b": 4})
    table = imported(tmp_path / "in", tmp_path / "out", "--size", "5")
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


NPZ = {
    "codes": {"images": RNG.integers(0, 256, (3, 4, 5, 5), dtype=np.uint8)},
    "named": {
        "images": RNG.integers(0, 256, (6, 5, 8, 2), dtype=np.uint8),
        "labels": np.array(["b", "a", "b", "c", "a", "b"]),
        "classes": np.array(["c", "a", "b", "d"]),
    },
    "half": {"features": RNG.random((2, 3, 7)).astype(np.float16)},
    "whole": {
        "features": RNG.integers(0, 99, (4, 7)),
        "labels": np.array([3, 1, 3, 2]),
    },
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
    kinds = {"codes": "u1", "named": "u1", "whole": "i8"}
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
        (["--groups", "u", "--features", "gone"], "no column 'gone'"),
        (["--groups", "u", "--features", "nan"], "got nan in record 2"),
        (["--groups", "u"], "needs either features"),
        (["--features", "nan"], "groups must name columns"),
        (["--alphabets"], "--alphabets is for --layout omniglot, got --layout parquet"),
    ],
)
def test_unsuitable_parquet_is_refused(options, message, tmp_path, capsys):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"u": ["a", "b"], "x": [[1, 2], [3, 4]], "nan": [1.0, float("nan")]}
    parquet.write_table(arrow.table(columns), tmp_path / "in.parquet")
    command = ["data", "import", str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    assert cli.run([*command, *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
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
    flat, wanted = features.reshape(6, 80), array.reshape(6, 80)
    np.testing.assert_array_equal(flat[1:3], wanted[1:3], strict=True)
    np.testing.assert_array_equal(flat[[4, 1]], wanted[[4, 1]])
    np.testing.assert_array_equal(np.asarray(features), array, strict=True)
    for wrong in (6, -7, [0, 6], mask[:3], [0.5]):
        with pytest.raises(IndexError):
            features[wrong]


def test_blocks_hold_what_is_read_where_the_mask_is_true(folder):
    mask = np.array([[True, False], [False, True]])
    rows = np.array([[5, 10**9], [-3, 0]])  # masked places hold no valid index
    inputs = episode.block_of(folder.table, rows, mask, mask[:, 0]).inputs
    np.testing.assert_array_equal(inputs[~mask], 0)
    np.testing.assert_array_equal(inputs[mask], folder.memory.features[[5, 0]])
    codes = np.arange(256, dtype=np.uint8)
    scaled = codes.astype(np.float32) / np.float32(255)  # as the loaders do
    np.testing.assert_array_equal(decoded(codes, "unit"), scaled, strict=True)
    np.testing.assert_array_equal(decoded(codes, "inverted"), 1 - scaled, strict=True)


def test_selections_and_fingerprints_equal_those_in_memory(folder, tmp_path):
    kept = folder.table.select("class", ["a", "b"])
    np.testing.assert_array_equal(
        kept.features, folder.memory.select("class", ["a", "b"]).features, strict=True
    )
    again = imported(folder.source, tmp_path / "again")
    assert again.fingerprint == folder.table.fingerprint
    changed = NPZ["named"] | {"images": NPZ["named"]["images"] ^ 1}
    np.savez(tmp_path / "other.npz", **changed)
    other = imported(tmp_path / "other.npz", tmp_path / "other")
    assert other.fingerprint != folder.table.fingerprint
    assert other.population == folder.table.population
    held_out = other, folder.memory.take(np.array([1, 4]))
    assert rows_held_out(folder.table, held_out).tolist() == [1, 4]


# --- Damaged folders ---


def saved_again(file, change):
    np.save(file, change(np.load(file)))


def grow(file):
    file.write_bytes(file.read_bytes() + b"x")


FEATURES, COUNTS = "train/features.npy", "train/level2.counts.npy"


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        (FEATURES, lambda file: file.unlink(), "features.npy"),
        ("manifest.json", lambda file: file.unlink(), "has no manifest.json"),
        (FEATURES, lambda file: os.truncate(file, 200), "has 200: it is truncated"),
        (FEATURES, grow, "features.npy must have .* bytes .* it has grown"),
        (
            COUNTS,
            lambda file: saved_again(file, np.flip),
            "counts.npy has changed: its",
        ),
        (
            FEATURES,
            lambda file: saved_again(file, lambda v: v.view(np.int8)),
            r"must have \|u1 of shape .* has \|i1",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_name(name, harm, message, folder):
    harm(folder.path / name)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_stored(folder.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, _: m.update(version=2), "damaged: version must be 1"),
        (
            lambda m, split: m["splits"].update({"..": split}),
            "'[.][.]' must be a plain",
        ),
        (lambda m, split: split["columns"].update({"a/b": 0}), "'a/b' must be a plain"),
        (lambda m, split: split["columns"].update(owners={}), "damaged: 'bytes'"),
        (lambda m, split: split.update(encoding="octal"), "must hold uint8 in one of"),
    ],
)
def test_an_invalid_manifest_is_refused(change, message, folder):
    path = folder.path / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest, manifest["splits"]["train"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        load_stored(folder.path)


def test_a_changed_byte_is_found_on_request(folder, capsys):
    with open(folder.path / "train/features.npy", "r+b") as file:
        file.seek(140)
        file.write(bytes([file.read(1)[0] ^ 1]))
    load_stored(folder.path)  # its size and type are unchanged
    assert cli.run(["data", "check", str(folder.path)]) == 2
    assert "features.npy has changed: its SHA-256" in capsys.readouterr().err


# --- Imports are atomic ---


def records(folder, read=None):
    np.savez(folder / "in.npz", **NPZ["targets"])
    found = npz_records(folder / "in.npz")
    return found if read is None else dataclasses.replace(found, read=read)


def fails(wanted):
    yield np.zeros((2, 2), np.float32)
    raise OSError("the disk fails")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (fails, "the disk fails"),
        (lambda wanted: [np.ones((2, 2), np.float32)], "4 .*got 2"),
        (lambda wanted: [np.eye(2, dtype="f"), np.eye(2)], "must be float32 of shape"),
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
        with pytest.raises(BlockingIOError, match=r"in use by this process \(\d+\)"):
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


# --- Training from the disk ---

IMAGES = np.random.default_rng(3).integers(0, 256, (30, 6, 1, 2), np.uint8)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same 30 classes of 6 tiny images, on disk and in memory."""
    folder = tmp_path_factory.mktemp("stored")
    np.savez(folder / "in.npz", images=IMAGES)
    command = ["data", "import", str(folder / "in.npz"), str(folder / "out")]
    assert cli.run(command) == 0
    return folder / "out", load_npz(folder / "in.npz")


def two_columns(table):
    """The images as (R, 2), which these tests' models take."""
    flat = table.features.reshape(table.num_examples, 2)
    return dataclasses.replace(table, features=flat)


def both(tables):
    folder, memory = tables
    return two_columns(load_stored(folder)), two_columns(memory)


def test_masked_slots_hold_zeros_for_inverted_codes_too(tables):
    stored, _ = both(tables)
    inverted = type(stored.features)(stored.features._column, "inverted", (180, 2))
    table = dataclasses.replace(stored, features=inverted)
    mask = np.array([[True, False]])
    inputs = episode.block_of(table, np.array([[7, 3]]), mask, np.ones(1)).inputs
    np.testing.assert_array_equal(inputs[0, 0], inverted[7], strict=True)
    np.testing.assert_array_equal(inputs[0, 1], np.zeros(2, np.float32), strict=True)


def test_a_run_is_resumed_on_the_same_data_only(tables, tmp_path, monkeypatch):
    """It reads the drawn rows alone, so data may be larger than memory."""
    stored, memory = both(tables)
    of_column, read = StoredColumn.read, []

    def counted(column, rows):
        read.append(len(rows))
        return of_column(column, rows)

    again = plain_trainer(data=both(tables)[0], num_steps=4)
    run = plain_trainer(data=stored, num_steps=4)
    monkeypatch.setattr(StoredColumn, "read", counted)

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path, on_step=stop)
    with pytest.raises(ValueError, match="the checkpoint is of another run: data"):
        plain_trainer(data=memory, num_steps=4).resume(tmp_path)
    assert again.resume(tmp_path) == 2
    again.train(tmp_path)
    assert read and max(read) < len(stored.features)
    whole = plain_trainer(data=memory, num_steps=4)
    for _ in range(4):
        whole.step()
    assert_same(again, whole)


def test_a_read_error_names_the_file_and_charges_nothing(tables, tmp_path):
    """The draw prefetched by the failing thread is neither charged nor used."""
    _, memory = tables
    path = tmp_path / "in.npz"
    np.savez(path, images=IMAGES)
    assert cli.run(["data", "import", str(path), str(tmp_path / "out")]) == 0
    table = two_columns(load_stored(tmp_path / "out"))
    run = plain_trainer(data=table, num_steps=40)

    def cut(progress):
        if progress.step == 2:
            os.truncate(tmp_path / "out/train/features.npy", 130)

    with pytest.raises(ValueError, match=r"features\.npy ends within row \d+: it was"):
        run.train(tmp_path / "run", on_step=cut)
    taken = run.num_steps_taken
    assert 2 <= taken <= 5  # the existing features were used
    assert run.num_steps_charged == taken
    path = tmp_path / "again"
    assert cli.run(["data", "import", str(tmp_path / "in.npz"), str(path)]) == 0
    again = plain_trainer(data=two_columns(load_stored(path)), num_steps=40)
    again.resume(tmp_path / "run")
    assert again.num_steps_charged == taken


def _numbers(rows):
    return np.concatenate([rows, rows**2, rows[:, :1] * 3], axis=1)


@pytest.mark.parametrize("is_stored", [True, False])
def test_fixed_features_are_kept_for_the_same_data_and_settings(
    tables, tmp_path, is_stored
):
    stored, memory = both(tables)
    data = stored if is_stored else memory
    made = FixedFeatures(_numbers, name="squares")
    cache = tmp_path / "cache" / "train"
    wanted = made.table(memory).features
    first = made.table(data, cache=cache)
    np.testing.assert_array_equal(first.features[:], wanted, strict=True)
    np.testing.assert_array_equal(made.table(data).features, wanted, strict=True)
    assert os.stat(cache).st_mode & 0o777 == 0o700
    failing = dataclasses.replace(made, function=lambda rows: 1 / 0)
    again = failing.table(data, cache=cache)  # nothing is computed
    assert again.fingerprint == first.fingerprint
    half = data.take(np.arange(90))
    for change, other in (
        ({"name": "others"}, data),
        *(({"settings": {"version": 2}}, data), ({"unit_norm": False}, data)),
        ({}, half),
    ):
        others = dataclasses.replace(made, **change)
        with pytest.warns(UserWarning, match="is made again: it was made from other"):
            found = others.table(other, cache=cache)
        alone = others.table(other).features
        np.testing.assert_array_equal(found.features[:], alone, strict=True)
    os.truncate(cache / "train/features.npy", 300)
    with pytest.warns(UserWarning, match="made again: .* it is truncated"):
        made.table(half, cache=cache)
    (cache / "manifest.json").unlink()  # as after a kill
    third = made.table(data, cache=cache)
    np.testing.assert_array_equal(third.features[:], wanted, strict=True)
    (cache / "letter.txt").touch()
    (cache / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="but has 'letter.txt'"):
        made.table(data, cache=cache)  # foreign files are never removed
