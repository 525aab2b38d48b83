"""Folders of sweeps: those of others are refused, full disks leave what was done."""

import errno
import os
import subprocess
import sys
from importlib import metadata

import pytest

from jaxdp_episodic.files import atomic
from jaxdp_episodic.tools.sweep.engines import evaluate_chunk
from jaxdp_episodic.tools.sweep.folder import MANIFEST, SweepFolder, saved_chunks
from jaxdp_episodic.tools.sweep.run import run_sweep
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
    """Space ends at the third shard, then at the table; all that was done stays."""
    sweep, expected = undisturbed
    out = tmp_path / "out"
    SweepFolder.opened(out, sweep)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2 * 2:  # a file and its folder for each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_sweep(sweep, out)
    assert saved_chunks(out) == (2, 6)
    assert not list(out.rglob(f"*{atomic.TEMPORARY}*"))
    calls[:] = [0] * -8  # room for the four others, and not for the table
    calls.clear()
    monkeypatch.setattr(
        atomic.os, "fsync", lambda d: full(d) if len(calls) > 99 else real(d)
    )
    monkeypatch.setattr(atomic.Path, "replace", refusing_tables(atomic.Path.replace))
    with pytest.raises(OSError, match="No space left"):
        run_sweep(sweep, out)
    assert saved_chunks(out) == (6, 6)
    monkeypatch.undo()
    run_sweep(sweep, out, engine=no_work)
    assert contents(out) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk(undisturbed, tmp_path):
    """A real one, of 16 KiB, where it may be made; chunks there are of 4 KiB."""
    sweep, expected = undisturbed
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(disk)]
    try:
        made = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("a tmpfs may not be mounted here")
    try:
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, disk / "out")
        done, _ = saved_chunks(disk / "out")
        assert 1 <= done < 6
        assert not list(disk.rglob(f"*{atomic.TEMPORARY}*"))
        subprocess.run([*mount[:4], "remount,size=1m", *mount[5:]], check=True)
        assert run_sweep(sweep, disk / "out").num_evaluated == 2880 - 512 * done
        assert contents(disk / "out") == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def refusing_tables(replace):
    def refuse(path, target):
        if target.name.startswith("table"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    return refuse
