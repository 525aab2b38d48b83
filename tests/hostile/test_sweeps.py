"""Untrusted folders of sweeps: edited, truncated, with links."""

import json

import numpy as np
import pytest

from fuzzing import seeds
from jaxdp_episodic.tools.sweep.description import Axis, Sweep, read_sweep
from jaxdp_episodic.tools.sweep.run import (
    MANIFEST,
    SHARDS,
    SweepFolder,
    read_columns,
    read_manifest,
    saved_chunks,
    write_table,
)


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "s.toml").write_bytes(seeds.SWEEP)
    return read_sweep(tmp_path / "s.toml")


@pytest.fixture
def folder(tmp_path, sweep):
    opened = SweepFolder.opened(tmp_path / "out", sweep)
    assert opened.num_chunks == 1
    opened.save(0, np.arange(float(opened.size)))
    return opened


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_settings", 10**15), ("chunk_size", 0), ("chunk_size", 2**60)),
        *(("hash", "0" * 64), ("version", True), ("kind", "run")),
        *(("sweep", []), ("sweep", {}), ("versions", None)),
    ],
)
def test_an_edited_manifest_is_refused(folder, key, value):
    file = folder.path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match="is not the manifest of a sweep"):
        read_manifest(folder.path)
    assert saved_chunks(folder.path) is None


def test_a_damaged_shard_is_not_used(folder):
    file = folder.shard(0)
    whole = file.read_bytes()
    other = SweepFolder(folder.path, folder.manifest | {"hash": "0" * 64})
    other.save(0, np.arange(float(other.size)))  # a whole shard of another sweep
    damaged = (b"", whole[:-1], whole + b"\0", whole[:-1] + b"\1", bytes(999))
    for content in (file.read_bytes(), *damaged):
        file.write_bytes(content)
        assert folder.load(0) is None
        with pytest.raises(ValueError, match="is missing or damaged"):
            write_table(folder)
    file.write_bytes(whole)
    assert folder.load(0) is not None


def test_foreign_files_are_not_removed(tmp_path, sweep, folder):
    (folder.path / SHARDS / "thesis").write_text("years of work")
    folder.remove_shards()
    assert [f.name for f in (folder.path / SHARDS).iterdir()] == ["thesis"]
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "00000000").write_text("somebody's")
    other = SweepFolder.opened(tmp_path / "other", sweep)
    (other.path / SHARDS).rmdir()
    (other.path / SHARDS).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="must not be a link"):
        other.remove_shards()
    with pytest.raises(ValueError, match="must not be a link"):
        SweepFolder.opened(tmp_path / "other", sweep)
    assert (elsewhere / "00000000").exists()


def test_a_table_of_other_columns_or_rows_is_refused(tmp_path):
    path = tmp_path / "table.npz"
    others = dict.fromkeys("abcdefghijkl", np.zeros(3))  # the most axes of a sweep
    np.savez(path, x=np.arange(3.0), y=[*"xyz"], z=np.arange(4), **others)
    assert [len(b["x"]) for b in read_columns(path, ["x"], num_rows=3)] == [3]
    for names, rows in ((["x"], 4), (["x"], 2), (["y"], 3), (["x", "z"], 3)):
        with pytest.raises(ValueError, match=r"table.npz is damaged"):
            list(read_columns(path, names, num_rows=rows))
    with pytest.raises(ValueError, match=r"table.npz is damaged.*no array 'missing'"):
        list(read_columns(path, ["missing"]))


@pytest.mark.parametrize(
    ("field", "points", "message"),
    [
        ("size", {"values": [1e300]}, "up to 2\\*\\*53"),
        ("noise_multiplier", {"linspace": [-1e308, 1e308, 5]}, "too far apart"),
        ("method", {"values": ["a" * 10**6]}, "at most 100 letters"),
        ("size", {"values": [10**400]}, "64 bits"),
    ],
)
def test_axes_beyond_floats_are_refused(field, points, message):
    with pytest.raises(ValueError, match=message):
        Axis(field=field, **points).points()


def test_steps_that_are_no_tables():
    """Nesting deeper than the stack is refused before any recursion."""
    axis = {"field": "noise_multiplier", "values": [1.0]}
    rest = {"type": "Sweep", "version": 1, "axes": [axis]}
    for place in ("type", "sampling"):
        deep = {}
        for _ in range(5000):
            deep = {place: deep}
        with pytest.raises(ValueError, match="nested deeper than 32 levels"):
            Sweep.from_dict({**rest, "step": deep})
    for step in ([], [{"type": "GaussianStep"}]):
        with pytest.raises(TypeError, match="step must be a table of keys"):
            Sweep.from_dict({**rest, "step": step})
