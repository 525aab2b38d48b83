"""A folder of version 0.2 is resumed bit for bit, or refused."""

import contextlib
import hashlib
import io
import json
import shutil
import struct

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdp_episodic.accountant.report.ledger_file import STORE, LedgerError, read_ledger
from jaxdp_episodic.accountant.report.ledgers import read_ledgers
from jaxdp_episodic.trainer.run.run_files import read_log
from jaxdp_episodic.trainer.run.state import RunMismatchError, array_types
from jaxdp_episodic.trainer.run.store import RunStore
from old_ledgers import old_ledger
from training_runs import assert_same, plain_trainer


def journal(run, releases, base):
    """The file of releases since a checkpoint, as version 0.2 wrote it."""
    chain = hashlib.sha256(b"jaxdp-episodic journal 2 " + run.encode()).digest()
    text, of_run = b"", chain[:8]
    for step, arrays in releases:
        file = io.BytesIO()
        for one in arrays:
            np.lib.format.write_array(file, np.asarray(one), allow_pickle=False)
        head = struct.pack("<QQQ8s", step, base, len(file.getvalue()), of_run)
        head += hashlib.sha256(head).digest()[:8]
        chain = hashlib.sha256(chain + head + file.getvalue()).digest()
        text += head + file.getvalue() + chain
    return text


@pytest.fixture
def old_folder(tmp_path):
    """A run of version 0.2 after three steps, with a checkpoint at two."""

    def stop(progress):
        if progress.step == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "left")
            raise RuntimeError("killed")

    run, folder = plain_trainer(), tmp_path / "old"
    with pytest.raises(RuntimeError, match="killed"):
        run.train(tmp_path / "run", on_step=stop, checkpoint_every=2)
    with contextlib.closing(RunStore(tmp_path / "left" / STORE)) as store:
        saved, releases = store.saved(), list(store.releases(after=2))
    folder.mkdir()
    settings = {"epsilon": 1e9, "seeded": True}
    path = folder / "ledger.jsonl"
    old_ledger(path, run.budget.step, [("a", 3)], **settings)
    name, text = read_ledger(path).run, path.read_bytes()
    state = jax.tree.unflatten(jax.tree.structure(run.state), saved.arrays)
    meta = {
        "format": 5,
        "charged_steps": 2,
        "ledger": [name, 3, len(text), hashlib.sha256(text).hexdigest()],
        "run": json.loads(json.dumps(run.run)),
        "state": array_types(state),
    }
    described = json.dumps(meta, sort_keys=True).encode()
    meta["sha256"] = hashlib.sha256(described).hexdigest()
    with contextlib.closing(ocp.CheckpointManager(folder / "checkpoints")) as manager:
        content = ocp.args.Composite(
            # Version 0.2 had no scores in its state.
            state=ocp.args.StandardSave(
                {k: v for k, v in state._asdict().items() if k != "scores"}
            ),
            meta=ocp.args.JsonSave(meta),
        )
        manager.save(2, args=content)
        manager.wait_until_finished()
    (folder / "journal").write_bytes(journal(name, releases, base=2))
    (folder / "log.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    return folder


def test_an_imported_run_equals_an_undisturbed_one(tmp_path, old_folder):
    shutil.copytree(old_folder, tmp_path / "copy")
    whole, run = plain_trainer(), plain_trainer()
    whole.train(tmp_path / "whole")
    assert run.resume(old_folder) == 3
    files = {path.name for path in old_folder.iterdir()}
    assert files == {".lock", "imported", STORE}
    assert [record["step"] for record in read_log(old_folder)] == [0, 3]
    run.train(old_folder)
    assert_same(run, whole)
    content = read_ledger(old_folder)
    assert content.charged == 6 and content.run == read_ledger(tmp_path / "copy").run
    # The old folder is a copy: shared charges are counted once.
    together = read_ledgers([old_folder, tmp_path / "copy"])
    assert together.run_charged() == (run.budget.step, 6)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("ledger.jsonl", lambda text: text.replace(b"1\n", b"", 1), LedgerError),
        ("ledger.jsonl", lambda text: text[:-100], LedgerError),
        ("journal", lambda text: text[:20] + b"\1" + text[21:], LedgerError),
        ("ledger.jsonl", None, FileNotFoundError),
        ("checkpoints", None, FileNotFoundError),
    ],
    ids=["a charge", "cut", "journal", "no ledger", "no checkpoint"],
)
def test_damaged_or_missing_files_are_refused(old_folder, name, change, error):
    path = old_folder / name
    if change is not None:
        path.write_bytes(change(path.read_bytes()))
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(error):
        plain_trainer().resume(old_folder)
    assert not (old_folder / STORE).exists()


def test_without_its_journal_later_steps_are_dropped(old_folder):
    (old_folder / "journal").write_bytes((old_folder / "journal").read_bytes()[:-1])
    run = plain_trainer()
    assert run.resume(old_folder) == 2  # a seeded step is taken again
    other = plain_trainer(l2_clip_norm=0.3)
    with pytest.raises(RunMismatchError, match="l2_clip_norm"):
        other.resume(old_folder)
