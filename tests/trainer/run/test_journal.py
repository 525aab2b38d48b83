"""Killed runs go on by what they released; attacks on resuming, before a witness."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import stat
import warnings
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.accountant.report.ledgers import read_ledgers
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run import journal as journals
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.checkpoint import Checkpoints
from jaxdp_episodic.trainer.run.draws import RunDraws
from jaxdp_episodic.trainer.run.journal import (
    Journal,
    JournalError,
    Release,
    as_bytes,
    from_bytes,
)
from jaxdp_episodic.trainer.run.ledger import LedgerFile
from jaxdp_episodic.trainer.run.run_files import RunLog
from jaxdp_episodic.trainer.run.run_state import RunState
from rows import fast_and_slow
from training_runs import GROUPED, assert_same, plain_trainer, protonet, sgd

BINS = dataclasses.replace(
    GROUPED,
    sampling=dataclasses.replace(
        GROUPED.design, episodes=jde.RandomAllocation("episode", steps_per_epoch=4)
    ),
)
STEPS, CHECKPOINT_EVERY = 7, 3
SLOW = pytest.mark.slow

# --- The file ---


def records(path, run="ab", after=0):
    with Journal(path, run) as journal:
        return list(journal.releases(after=after))


def written(path, number=3):
    with Journal(path, "ab") as journal:
        for step in range(1, number + 1):
            journal.append(step, bytes([step]) * 10 * step)
    return path.read_bytes()


def test_what_was_appended_comes_back(tmp_path):
    path = tmp_path / "journal"
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = [Release(2, 0, b"\2" * 20), Release(3, 0, b"\3" * 30)]
    assert records(path, after=1) == found
    with Journal(path, "ab") as journal:
        journal.cut(2)  # a checkpoint that lacks step 3
        journal.append(9, b"x")
        assert [r.step for r in journal.releases(after=0)] == [1, 2, 3, 9]
        journal.cut(9)
        journal.append(10, b"y")
    assert records(path) == [Release(10, 9, b"y")]


def test_wherever_it_is_cut_whole_releases_stay_and_nothing_else(tmp_path):
    path = tmp_path / "journal"
    text = written(path)
    ends = [72 + 10, 2 * 72 + 30, 3 * 72 + 60]  # heads and hashes of 72 bytes
    for length in range(len(text)):
        path.write_bytes(text[:length])
        assert [r.step for r in records(path)] == [
            step for step, end in enumerate(ends, 1) if end <= length
        ]
        assert path.stat().st_size in (0, *ends)  # what was cut off is gone
        with Journal(path, "ab") as journal:
            journal.append(8, b"z")
        assert records(path)[-1] == Release(8, 0, b"z")


def test_one_changed_byte_is_noticed(tmp_path):
    """In the last record it may be a write that was cut off, elsewhere it is damage."""
    path = tmp_path / "journal"
    whole = written(path)
    for place in range(len(whole)):
        text = bytearray(whole)
        text[place] ^= 1
        path.write_bytes(bytes(text))
        if place < 2 * 72 + 30 + 40:  # of the last one the head, too
            with pytest.raises(JournalError, match="the record at byte .* is damaged"):
                records(path)
        else:
            assert [r.step for r in records(path)] == [1, 2]
    path.write_bytes(whole + bytes(100))  # a file that had grown, and no more
    assert [r.step for r in records(path)] == [1, 2, 3]


@pytest.mark.parametrize("number", [1, 3])
def test_another_runs_journal_is_refused(tmp_path, number):
    """One of a single record, too, which is no write that was cut off; it stays."""
    whole = written(tmp_path / "journal", number)
    with pytest.raises(JournalError, match="byte 0, of step 1, is of another run"):
        records(tmp_path / "journal", run="cd")
    assert (tmp_path / "journal").read_bytes() == whole


def test_another_runs_record_behind_this_runs_is_refused(tmp_path):
    whole = written(tmp_path / "journal", 1)
    with Journal(tmp_path / "other", "cd") as other:
        other.append(2, b"x")
    (tmp_path / "journal").write_bytes(whole + (tmp_path / "other").read_bytes())
    with pytest.raises(JournalError, match="byte 82, of step 2, is of another run"):
        records(tmp_path / "journal")


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_no_half_release(tmp_path, monkeypatch, call):
    path = tmp_path / "journal"
    with Journal(path, "ab") as journal:
        journal.append(1, b"a" * 100)

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            if call == "fsync":
                patch.setattr(os, "fsync", full)
            else:
                patch.setattr(
                    journal, "_file", type("F", (), {"fileno": journal._file.fileno})
                )
                journal._file.write = full
            journal.append(2, b"b" * 100)
        journal.append(3, b"c" * 100)
        assert [r.step for r in journal.releases(after=0)] == [1, 3]


def test_arrays_come_back_bit_for_bit():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(2, 3)).astype(np.float32), "b": [rng.normal(size=4)]}
    back = from_bytes(Release(1, 0, as_bytes(tree)), tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(back)] == [np.float32, np.float64]
    with pytest.raises(JournalError, match="step 1 released arrays of another model"):
        from_bytes(Release(1, 0, as_bytes(tree)), {"a": tree["a"]})


def test_a_large_journal_makes_checkpoints_come_more_often(tmp_path, monkeypatch):
    saved, save = [], Checkpoints.save

    def noted(self, snapshot):
        saved.append(snapshot.charged_steps)
        save(self, snapshot)

    monkeypatch.setattr(Checkpoints, "save", noted)
    size = len(as_bytes(plain_trainer().params)) + 64
    monkeypatch.setattr(journals, "MOST_BYTES", 2 * size)
    plain_trainer().train(tmp_path, checkpoint_every=100)
    assert saved == [0, 2, 4, 6]
    assert (tmp_path / run_files.JOURNAL).stat().st_size == 0


# --- Attacks on resuming ---


class Killed(BaseException):
    """Ends a run; nothing catches it."""


class Witness:
    """Sees every release from outside, whichever process makes it."""

    def __init__(self, patch):
        self.noise, self.charges = [], []
        call, charge = PrivateGradient.__call__, LedgerFile.charge

        def released(gradient, params, blocks, noise, **settings):
            own = [np.array(leaf) for leaf in noise._unused[0]]
            result = call(gradient, params, blocks, noise, **settings)
            self.noise.append(b"".join(leaf.tobytes() for leaf in own))
            return result

        def charged(file, number=1):
            charge(file, number)
            self.charges.append(number)

        patch.setattr(PrivateGradient, "__call__", released)
        patch.setattr(LedgerFile, "charge", charged)

    def complaints(self, folders, crashes):
        """What is wrong: noise that was used twice, releases that nobody charged."""
        wrong = []
        if max(Counter(self.noise).values()) > 1:
            wrong.append("noise was used twice")
        charged = sum(self.charges)
        if not len(self.noise) <= charged <= len(self.noise) + crashes:
            wrong.append(f"{len(self.noise)} released, {charged} charged")
        for folder in folders:
            if read_ledger(folder / run_files.LEDGER).charged != STEPS:
                wrong.append("another number of steps")
        return wrong


# Where a process is killed: what is called next, and the how manieth call of it.
STAGES = {
    "before a charge": (LedgerFile, "charge", 5),
    "after a charge": (PrivateGradient, "__call__", 5),
    "before the journal": (Journal, "append", 5),
    "after the journal": (RunState, "_end_epoch", 6),
    "before the log": (RunLog, "write", 6),
    "before a checkpoint": (Checkpoints, "save", 2),
    "after a checkpoint": (Journal, "cut", 2),
    "at the last step": (Journal, "append", 7),
    "at the last checkpoint": (Checkpoints, "save", 4),
}


def other_learner():
    """The same model with a function that somebody mended."""
    learner, params = protonet()

    def apply(params, inputs):
        return 2.0 * learner.apply(params, inputs) + 0.1

    return {"learner": (ProtoNet(apply, ways=learner.ways), params)}


@contextlib.contextmanager
def edited_package(patch):
    """Another version of this package clips otherwise."""
    clip = private_gradient.clip_by_norm

    def other(contribution, norm):
        clipped, *rest = clip(contribution, 0.5 * norm)
        return clipped, *rest

    private_gradient._compiled_sum.cache_clear()
    patch.setattr(private_gradient, "clip_by_norm", other)
    yield
    private_gradient._compiled_sum.cache_clear()


@contextlib.contextmanager
def other_versions(patch):
    patch.setattr(
        "jaxdp_episodic.trainer.run.run_state.described_versions",
        lambda: {"jax": "9.9", "numpy": "3.0"},
    )
    yield


@contextlib.contextmanager
def other_flags(patch):
    """With which JAX's own random numbers, and all products, come out differently."""
    config: Any = jax.config  # its flags are made at run time
    before = config.jax_threefry_partitionable
    with (
        jax.threefry_partitionable(not before),
        jax.default_matmul_precision("bfloat16"),
    ):
        yield


@contextlib.contextmanager
def unchanged(patch):
    yield


CHANGES = {
    "nothing": (dict, unchanged),
    "a function": (other_learner, unchanged),
    "the package": (dict, edited_package),
    "versions": (dict, other_versions),
    "flags": (dict, other_flags),
    "the optimizer's rate": (lambda: {"optimizer": sgd(0.3)}, unchanged),
}
PAIRS = [(stage, change) for stage in STAGES for change in CHANGES]


def a_run(step, **changes):
    changes.setdefault("optimizer", sgd(0.1))
    return plain_trainer(seed=None, step=step, num_steps=STEPS, **changes)


def killed_at(moment, run, tmp_path, monkeypatch):
    """Trains until a call begins; returns the folder that a kill there would leave."""
    owner, name, call = moment
    folder, left = tmp_path / "run", tmp_path / "left"
    function, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            shutil.copytree(folder, left)
            raise Killed
        return function(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, counted)
        run.train(folder, checkpoint_every=CHECKPOINT_EVERY)
    return left


def attacked(tmp_path, monkeypatch, step, stage, change):
    """A run killed at a stage, twice copied, and all three gone on with, changed."""
    witness = Witness(monkeypatch)
    left = killed_at(STAGES[stage], a_run(step), tmp_path, monkeypatch)
    before, common = len(witness.noise), read_ledger(left / run_files.LEDGER).charged
    assert common - 1 <= before <= common or stage == "before a charge"
    copies = [tmp_path / "first", tmp_path / "second"]
    for copy in copies:
        shutil.copytree(left, copy)
    settings, patched = CHANGES[change]
    with monkeypatch.context() as patch, warnings.catch_warnings(), patched(patch):
        warnings.simplefilter("ignore", UserWarning)  # of what changed, and is given up
        for copy in copies:
            run = a_run(step, **settings())
            run.resume(copy)
            run.train(copy, checkpoint_every=CHECKPOINT_EVERY)
            assert run.num_steps_taken == STEPS
    together = read_ledgers([copy / run_files.LEDGER for copy in copies])
    if step is GROUPED:  # steps in epochs that both share cost less: see its own tests
        assert together.run_charged() == (step, 2 * STEPS - common)
    return witness.complaints(copies, crashes=1)


@pytest.mark.parametrize(
    "number",
    fast_and_slow(range(len(STAGES)), lambda n: n in (1, 3, 5)),
)
def test_nothing_is_released_twice_or_for_nothing(tmp_path, monkeypatch, number):
    """Some stages, with one change each; the slow test has all pairs."""
    stage = list(STAGES)[number]
    change = list(CHANGES)[number % len(CHANGES)]
    assert attacked(tmp_path, monkeypatch, GROUPED, stage, change) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [GROUPED, BINS], ids=["steps", "epochs"])
@pytest.mark.parametrize(("stage", "change"), PAIRS)
def test_every_attack_at_every_stage(tmp_path, monkeypatch, step, stage, change):
    assert attacked(tmp_path, monkeypatch, step, stage, change) == []


@pytest.mark.slow
def test_the_witness_notices_a_step_that_is_taken_again(tmp_path, monkeypatch):
    """The fault that this all replaces, planted."""
    monkeypatch.setattr(
        "jaxdp_episodic.trainer.draw.generators.Keys.new",
        lambda self, purpose, number: number.to_bytes(32, "little"),
    )

    monkeypatch.setattr(RunState, "_give_up_unreleased", lambda run: None)
    wrong = attacked(tmp_path, monkeypatch, GROUPED, "before the journal", "a function")
    assert wrong[0] == "noise was used twice" and "released" in wrong[1]


# --- Epochs ---


def members_by_step(monkeypatch):
    """Who takes part in which step, as the steps that were released have it."""
    found, secret = {}, "jaxdp_episodic.trainer.run.draws.RunDraws.secret"
    drawn = RunDraws.secret

    def noted(self, step):
        result = drawn(self, step)
        found.setdefault(step, []).append(result.members)
        return result

    monkeypatch.setattr(secret, noted)
    return found


@pytest.mark.parametrize("kill", [2, 4, *(pytest.param(k, marks=SLOW) for k in (3, 5))])
def test_an_epoch_goes_on_as_it_was_drawn(tmp_path, monkeypatch, kill):
    """Each unit once in an epoch, also one with a kill in it; then it is forgotten."""
    found, kept = members_by_step(monkeypatch), tmp_path / run_files.EPOCH

    def stop(progress):
        if progress.step in (1, 2, 3):
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        if progress.step == 4:
            assert not kept.exists()
        if progress.step == kill:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(BINS).train(tmp_path, on_step=stop)
    run = a_run(BINS)
    assert run.resume(tmp_path) == kill
    run.train(tmp_path)
    assert not kept.exists()
    for epoch in ((1, 2, 3, 4), (5, 6, 7)):
        # A step that was drawn ahead and never taken has the same members again.
        for step in epoch if kill in epoch[:-1] else ():
            first, *others = found[step]
            assert all(np.array_equal(first, other) for other in others)
        drawn = [row.tobytes() for step in epoch for row in found[step][-1]]
        assert len(drawn) == len(set(drawn)) <= 10
    assert len(np.concatenate([found[step][-1] for step in (1, 2, 3, 4)])) == 10


def half_way(folder, step=BINS):
    """A run that was killed in the middle of an epoch."""

    def stop(progress):
        if progress.step == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(step).train(folder, on_step=stop)
    return folder / run_files.EPOCH


def test_an_epoch_whose_draw_is_gone_does_not_go_on(tmp_path):
    """Drawn afresh, somebody would be in two of its steps."""
    half_way(tmp_path).unlink()
    run = a_run(BINS)
    run.resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="epoch 1, which has begun, is not kno"):
        run.train(tmp_path)
    assert read_ledger(tmp_path / run_files.LEDGER).charged == 2


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path, other: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda path, other: path.write_bytes(b""), "is damaged"),
        (lambda path, other: shutil.copy(half_way(other), path), "put together"),
    ],
    ids=["cut", "empty", "another run's"],
)
def test_a_wrong_draw_of_an_epoch_is_refused(tmp_path, damage, reason):
    damage(half_way(tmp_path / "run"), tmp_path / "other")
    with pytest.raises(ValueError, match=reason):
        a_run(BINS).resume(tmp_path / "run")


def test_steps_taken_elsewhere_are_kept_when_a_folder_is_opened(tmp_path, monkeypatch):
    found = members_by_step(monkeypatch)
    run = a_run(BINS)
    for _ in range(2):
        run.step()

    def stop(progress):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run.train(tmp_path, on_step=stop)
    again = a_run(BINS)
    assert again.resume(tmp_path) == 3
    again.train(tmp_path)
    first = np.concatenate([found[step][-1] for step in (1, 2, 3, 4)])
    assert len(np.unique(first, axis=0)) == 10


# --- What else ends, and what is missing ---


def test_an_interrupted_step_is_given_up_within_a_process(tmp_path, monkeypatch):
    run, call, left = a_run(GROUPED), PrivateGradient.__call__, [3]

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    monkeypatch.setattr(PrivateGradient, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path)
    assert (run.num_steps_taken, run.num_steps_charged) == (2, 3)
    with pytest.warns(UserWarning, match="step 3 was charged and broken off before"):
        run.train(tmp_path)
    assert run.num_steps_taken == run.num_steps_charged == STEPS
    log = run_files.read_log(tmp_path / run_files.LOG)
    assert [record["step"] for record in log] == list(range(STEPS + 1))
    private = [run_files.PRIVATE in record for record in log]
    assert private == [False, True, True, False, True, True, True, True]


def test_a_journal_ahead_of_its_ledger_is_refused(tmp_path):
    """The ledger of a copy that was made earlier, beside a later journal."""

    def stop(progress):
        if progress.step == 2:
            shutil.copy(tmp_path / run_files.LEDGER, tmp_path / "older")
        if progress.step == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(GROUPED).train(tmp_path, on_step=stop)
    (tmp_path / "older").replace(tmp_path / run_files.LEDGER)
    with pytest.raises(LedgerError, match="release of step 3, and the ledger 2 steps"):
        a_run(GROUPED).resume(tmp_path)


def test_another_run_does_not_begin_beside_a_journal(tmp_path):
    written(tmp_path / run_files.JOURNAL)
    with pytest.raises(FileExistsError, match="holds a run; .*journal would be mixed"):
        a_run(GROUPED).train(tmp_path)


def test_without_its_journal_a_run_gives_up_what_followed_the_checkpoint(tmp_path):
    def stop(progress):
        if progress.step == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(GROUPED).train(tmp_path, on_step=stop, checkpoint_every=3)
    (tmp_path / run_files.JOURNAL).unlink()
    run = a_run(GROUPED)
    with pytest.warns(UserWarning, match="steps 4 to 5 were charged and broken off"):
        assert run.resume(tmp_path) == 5
    run.train(tmp_path)
    assert read_ledger(tmp_path / run_files.LEDGER).charged == STEPS


def test_resuming_needs_nobodys_data(tmp_path, monkeypatch):
    """Up to where the run stood nothing is drawn, read or computed from records."""

    def stop(progress):
        if progress.step == 5:
            raise RuntimeError("killed")

    first = a_run(GROUPED)
    with pytest.raises(RuntimeError, match="killed"):
        first.train(tmp_path, on_step=stop, checkpoint_every=100)
    run = a_run(GROUPED)

    def touched(*args, **kwargs):
        raise AssertionError("data were touched")

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeSampler, "draw", touched)
        patch.setattr(PrivateGradient, "__call__", touched)
        assert run.resume(tmp_path) == 5
    assert_same(run, first)


def test_a_checkpoint_that_the_journal_stands_on_is_missed(tmp_path):
    def stop(progress):
        if progress.step == 7:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(GROUPED).train(tmp_path, on_step=stop, checkpoint_every=3)
    shutil.rmtree(tmp_path / run_files.CHECKPOINTS / "6")
    with pytest.raises(JournalError, match="of step 6, the latest is of step 3: put"):
        a_run(GROUPED).resume(tmp_path)


def test_what_was_prepared_for_another_step_is_refused():
    """Its members of the epoch took part already."""
    run = a_run(BINS)
    with run.ahead() as ahead:
        first = next(ahead)
        run.step()
        with pytest.raises(ValueError, match="prepared must be of step 2, got that of"):
            run.step(first)
    assert run.num_steps_charged == 1


def test_a_run_has_one_folder(tmp_path):
    run = a_run(GROUPED)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path / "own", on_step=stop)
    with pytest.raises(ValueError, match="folder must be the run's own, .*own, got"):
        run.train(tmp_path / "other")
    run.train(tmp_path / "own")
    assert run.num_steps_taken == STEPS


def test_an_edited_meta_is_refused(tmp_path):
    a_run(GROUPED).train(tmp_path)
    (path,) = (tmp_path / run_files.CHECKPOINTS / str(STEPS) / "meta").glob("*meta*")
    meta = json.loads(path.read_text())
    for key in ("charged_steps", "ledger", "run", "state", "format"):
        path.write_text(json.dumps({**meta, key: meta["sha256"]}))
        with pytest.raises(ValueError, match="checksum|format must be"):
            a_run(GROUPED).resume(tmp_path)


def test_no_file_of_a_run_can_be_read_by_others(tmp_path):
    half_way(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"journal", "epoch", "log.jsonl"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


@pytest.fixture(scope="module")
def seeded_whole(tmp_path_factory):
    run = plain_trainer()
    run.train(tmp_path_factory.mktemp("whole"))
    return run


@pytest.mark.parametrize(
    "stage",
    [
        stage if number % 4 == 1 else pytest.param(stage, marks=pytest.mark.slow)
        for number, stage in enumerate(STAGES)
    ],
)
def test_seeded_runs_are_bit_for_bit_the_same_resumed(
    tmp_path, monkeypatch, seeded_whole, stage
):
    owner, name, call = STAGES[stage]
    if stage.startswith("at the last"):
        call -= 1  # it has a step less
    left = killed_at((owner, name, call), plain_trainer(), tmp_path, monkeypatch)
    run = plain_trainer()
    run.resume(left)
    run.train(left)
    assert_same(run, seeded_whole)
    assert read_ledger(left / run_files.LEDGER).charged == 6
