"""Folders of sweeps: foreign ones are refused; a full disk keeps finished chunks."""

import errno
import os
from importlib import metadata

import pytest

from jaxdp_episodic.files import atomic
from jaxdp_episodic.tools.sweep.run import (
    MANIFEST,
    SweepFolder,
    evaluate_chunk,
    run_sweep,
    saved_chunks,
)
from sweep_runs import SWEEP, contents, no_work


def test_the_folder_of_another_sweep_is_refused(undisturbed, read, tmp_path):
    sweep, _ = undisturbed
    SweepFolder.opened(tmp_path / "out", sweep).save(0, evaluate_chunk(sweep, 0)[0])
    before = contents(tmp_path / "out")
    other = read(SWEEP.replace("60]", "61]").replace("delta = 1e-5", "delta = 1e-6"))
    with pytest.raises(ValueError) as caught:
        run_sweep(other, tmp_path / "out", engine=no_work)
    message = str(caught.value)
    assert "holds another sweep" in message
    assert "axes[1].geomspace[2]: 60 there, 61 now" in message
    assert "delta: 1e-05 there, 1e-06 now" in message
    assert contents(tmp_path / "out") == before


def test_the_folder_of_another_version_is_refused(undisturbed, tmp_path, monkeypatch):
    sweep, _ = undisturbed
    SweepFolder.opened(tmp_path / "out", sweep)
    real = metadata.version
    newer = {"numpy": "99.0"}
    monkeypatch.setattr(metadata, "version", lambda name: newer.get(name) or real(name))
    with pytest.raises(ValueError, match=r"versions.numpy: .* there, 99.0 now"):
        SweepFolder.opened(tmp_path / "out", sweep)


def test_other_folders_are_refused(undisturbed, tmp_path):
    sweep, _ = undisturbed
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="thesis.tex"):
        run_sweep(sweep, tmp_path, engine=no_work)
    with pytest.raises(NotADirectoryError, match="not a folder"):
        run_sweep(sweep, tmp_path / "thesis.tex", engine=no_work)
    broken = tmp_path / "broken"
    broken.mkdir()
    for text in ("{", "[]", '{"version": 1}', '{"version": 9, "kind": "sweep"}'):
        (broken / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match="not the manifest of a sweep"):
            run_sweep(sweep, broken, engine=no_work)


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_folder_that_cannot_be_written(undisturbed, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            run_sweep(undisturbed[0], tmp_path / "out", engine=no_work)
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_fills_up(undisturbed, tmp_path, monkeypatch):
    """The disk is full at the third shard, then at the table; finished shards stay."""
    sweep, expected = undisturbed
    out, real, calls = tmp_path / "out", os.fsync, []
    SweepFolder.opened(out, sweep)

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2 * 2:  # a file and its folder for each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, out)
    assert saved_chunks(out) == (2, 6)
    assert not list(out.rglob(f"*{atomic.TEMPORARY}*"))
    with monkeypatch.context() as patch:
        refuse = refusing_tables(atomic.Path.replace)
        patch.setattr(atomic.Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, out)
    assert saved_chunks(out) == (6, 6)
    run_sweep(sweep, out, engine=no_work)
    assert contents(out) == expected


def refusing_tables(replace):
    def refuse(path, target):
        if target.name.startswith("table"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    return refuse
