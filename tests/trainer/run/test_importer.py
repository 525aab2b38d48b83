"""Folders of version 0.2: read, resumed bit for bit, or refused."""

import shutil
import tracemalloc

import numpy as np
import pytest

from crash_rigs import old_ledger, old_run
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.trainer.run.ledger_file import STORE, LedgerError, read_ledger
from jaxdp_episodic.trainer.run.ledgers import read_ledgers
from jaxdp_episodic.trainer.run.run_files import read_log
from training_runs import BINS, GROUPED, assert_same, flat_step, plain_trainer


def test_an_old_ledger_is_read(tmp_path):
    path = old_ledger(tmp_path / "ledger.jsonl", flat_step(), [("a", 3), ("b", 2)])
    content = read_ledger(path)
    assert content.groups == ((flat_step(), 5),) and content.is_closed
    assert read_ledger(tmp_path) == content
    cut = old_ledger(path, flat_step(), [("a", 3)], tail=b"1\n1")
    assert read_ledger(cut).charged == 5 and not read_ledger(cut).is_closed
    cut = old_ledger(path, flat_step(), [("a", 3)], tail=b'{"charged":3,"ha')
    assert read_ledger(cut).charged == 3
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert not read_ledger(path).is_closed  # cut before a process opened it
    old_ledger(path, flat_step(), [(None, 20_000)])
    tracemalloc.start()
    assert read_ledger(path).charged == 20_000
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.fixture
def old_folder(tmp_path):
    """A run after two steps, and two more charges."""
    run = plain_trainer(seed=None)
    run.step()
    run.step()
    old_run(tmp_path / "run", run, GROUPED, charged=4)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text('{"step": 0}\n{"step": 3}\n{"step": 4, "e')
    return tmp_path / "run", run


@pytest.mark.parametrize("is_made", [False, True], ids=["old", "made"])
def test_an_old_run_resumes(tmp_path, old_folder, is_made):
    """Also if the process was killed before it moved the old files aside."""
    folder, run = old_folder
    copy, other = shutil.copytree(folder, tmp_path / "copy"), plain_trainer(seed=None)
    if is_made:
        again = shutil.copytree(folder, tmp_path / "again")
        with pytest.warns(UserWarning, match="steps 3 to 4 were charged"):
            plain_trainer(seed=None).resume(again)
        shutil.copy(again / STORE, folder)
        (folder / "epoch").touch()
    with pytest.warns(UserWarning, match="steps 3 to 4 were charged and interrupted"):
        assert other.resume(folder) == 4
    assert_same(other, run)
    assert [record["step"] for record in read_log(folder)] == [0, 3]
    other.train(folder)
    content = read_ledger(folder)
    assert content.charged == 6 and content.run == read_ledger(copy).run
    # The old folder is a copy: shared charges are counted once.
    assert read_ledgers([folder, copy]).run_charged() == (GROUPED, 6)
    kept = {"ledger.jsonl", "journal", "checkpoints", "log.jsonl"}
    assert {one.name for one in (folder / "imported").iterdir()} == kept
    assert not {"epoch", *kept} & {one.name for one in folder.iterdir()}


def test_an_old_epoch_goes_on(tmp_path):
    """A new one could draw those again who took part before the kill."""
    run, other = (plain_trainer(step=BINS, seed=None) for _ in range(2))
    run.step()
    old_run(folder := tmp_path / "run", run, BINS, charged=1)
    assert other.resume(folder) == 1
    epochs = [one._main.draws._epochs[0] for one in (run, other)]
    for mine, theirs in zip(*epochs, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    other.train(folder)
    assert read_ledger(folder).charged == 6


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("ledger.jsonl", lambda text: text.replace(b"1\n", b"", 1), LedgerError),
        ("ledger.jsonl", lambda text: text[:-100], LedgerError),
        ("ledger.jsonl", None, FileNotFoundError),
        ("checkpoints", None, FileNotFoundError),
    ],
    ids=["a charge", "cut", "no ledger", "no checkpoint"],
)
def test_damaged_or_missing_old_files_are_refused(old_folder, name, change, error):
    folder, _ = old_folder
    path = folder / name
    if change is not None:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.rename(folder.with_name("lost"))
    with pytest.raises(error):
        plain_trainer(seed=None).resume(folder)
    assert not (folder / STORE).exists()


def test_an_older_ledger_or_another_run_is_refused(old_folder):
    folder, _ = old_folder
    whole = (ledger := folder / "ledger.jsonl").read_bytes()
    old_ledger(ledger, GROUPED, [("a" * 32, 3)])  # lacks a charge of the checkpoint
    with pytest.raises(LedgerError, match="not the checkpoint's, or is an older copy"):
        plain_trainer(seed=None).resume(folder)
    ledger.write_bytes(whole)
    other = plain_trainer(seed=None, l2_clip_norm=0.3)
    with pytest.raises(RunMismatchError, match="l2_clip_norm"):
        other.resume(folder)


def test_no_byte_of_an_old_ledger_can_be_changed(tmp_path):
    path = old_ledger(tmp_path / "ledger.jsonl", flat_step(), [("a", 3)])
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 5):
        one = bytes([whole[place] ^ 1])
        path.write_bytes(whole[:place] + one + whole[place + 1 :])
        with pytest.raises(LedgerError):
            read_ledger(path)
    for record in ({"opened": 3}, {"opened": ["a"]}, {"option": "\ud800"}):
        old_ledger(path, flat_step(), [], tail=record)
        with pytest.raises(LedgerError):
            read_ledger(path)
