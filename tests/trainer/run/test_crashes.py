"""Crashes: a run killed at any moment, its file truncated or changed at any byte."""

import contextlib
import dataclasses
import shutil
import sqlite3
import stat
import warnings
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import Killed, kill_at
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.accountant.report.ledgers import read_ledgers
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from jaxdp_episodic.trainer.run.store import EPOCH, RunStore
from jaxdp_episodic.trainer.run.trainer import Trainer
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

# --- Attacks on resuming ---


class Witness:
    """Records every release independently of the run."""

    def __init__(self, patch):
        self.noise, self.charges = [], []
        call, charge = PrivateGradient.__call__, RunStore.charge

        def released(gradient, params, blocks, noise, **settings):
            own = [np.array(leaf) for leaf in noise._unused[0]]
            result = call(gradient, params, blocks, noise, **settings)
            self.noise.append(b"".join(leaf.tobytes() for leaf in own))
            return result

        def charged(store, *kind):
            charge(store, *kind)
            self.charges.append(1)

        patch.setattr(PrivateGradient, "__call__", released)
        patch.setattr(RunStore, "charge", charged)

    def complaints(self, folders, crashes):
        """Returns violations: noise used twice, releases without a charge."""
        wrong = []
        if max(Counter(self.noise).values()) > 1:
            wrong.append("noise was used twice")
        charged = sum(self.charges)
        if not len(self.noise) <= charged <= len(self.noise) + crashes:
            wrong.append(f"{len(self.noise)} released, {charged} charged")
        for folder in folders:
            if read_ledger(folder / run_files.STORE).charged != STEPS:
                wrong.append("another number of steps")
        return wrong


# Where a process is killed: before which call of which function.
STAGES = {
    "before a charge": (RunStore, "charge", 5),
    "after a charge": (PrivateGradient, "__call__", 5),
    "before the release": (RunStore, "release", 5),
    "after the release": (RunDraws, "erase_secrets", 6),
    "before the log": (RunStore, "note", 6),
    "before a state": (RunStore, "save", 2),
    "after a state": (RunStore, "charge", 4),
    "at the last step": (RunStore, "release", 7),
    "at the last state": (RunStore, "save", 4),
}


def other_learner():
    """The same model with a changed function."""
    learner, params = protonet()

    def apply(params, inputs):
        return 2.0 * learner.apply(params, inputs) + 0.1

    return {"learner": (ProtoNet(apply, ways=learner.ways), params)}


@contextlib.contextmanager
def edited_package(patch):
    """A version of this package that clips differently."""
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
        "jaxdp_episodic.trainer.run.trainer.described_versions",
        lambda: {"jax": "9.9", "numpy": "3.0"},
    )
    yield


@contextlib.contextmanager
def other_flags(patch):
    """JAX flags that change random numbers and matrix products."""
    config: Any = jax.config  # flags are created at run time
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
    """Trains until a call begins; returns the folder that a kill there leaves."""
    folder, left = tmp_path / "run", tmp_path / "left"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, *moment, folder, left)
        run.train(folder, checkpoint_every=CHECKPOINT_EVERY)
    return left


def attacked(tmp_path, monkeypatch, step, stage, change):
    """A run killed at a stage and copied twice; all three continue with a change."""
    witness = Witness(monkeypatch)
    left = killed_at(STAGES[stage], a_run(step), tmp_path, monkeypatch)
    before, common = len(witness.noise), read_ledger(left / run_files.STORE).charged
    assert common - 1 <= before <= common or stage == "before a charge"
    copies = [tmp_path / "first", tmp_path / "second"]
    for copy in copies:
        shutil.copytree(left, copy)
    settings, patched = CHANGES[change]
    with monkeypatch.context() as patch, warnings.catch_warnings(), patched(patch):
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of the change, and of a lost step
        for copy in copies:
            run = a_run(step, **settings())
            run.resume(copy)
            run.train(copy, checkpoint_every=CHECKPOINT_EVERY)
            assert run.num_steps_taken == STEPS
    together = read_ledgers([copy / run_files.STORE for copy in copies])
    if step is GROUPED:  # shared epochs: see test_ledgers.py
        assert together.run_charged() == (step, 2 * STEPS - common)
    return witness.complaints(copies, crashes=1)


@pytest.mark.parametrize(
    "number",
    fast_and_slow(range(len(STAGES)), lambda n: n in (1, 3, 5)),
)
def test_no_noise_is_reused_and_no_release_uncharged(tmp_path, monkeypatch, number):
    """Some stages with one change each; the slow test covers all pairs."""
    stage = list(STAGES)[number]
    change = list(CHANGES)[number % len(CHANGES)]
    assert attacked(tmp_path, monkeypatch, GROUPED, stage, change) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [GROUPED, BINS], ids=["steps", "epochs"])
@pytest.mark.parametrize(("stage", "change"), PAIRS)
def test_every_attack_at_every_stage(tmp_path, monkeypatch, step, stage, change):
    assert attacked(tmp_path, monkeypatch, step, stage, change) == []


@pytest.mark.slow
def test_the_witness_detects_a_repeated_step(tmp_path, monkeypatch):
    """A planted fault: a given-up step is repeated."""
    monkeypatch.setattr(
        "jaxdp_episodic.trainer.draw.generators.Keys.new",
        lambda self, purpose, number: number.to_bytes(32, "little"),
    )

    monkeypatch.setattr(Trainer, "_give_up_unreleased", lambda run: None)
    wrong = attacked(tmp_path, monkeypatch, GROUPED, "before the release", "a function")
    assert wrong[0] == "noise was used twice" and "released" in wrong[1]


# --- Epochs ---


def members_by_step(monkeypatch):
    """Who takes part in each released step."""
    found, secret = {}, "jaxdp_episodic.trainer.run.mechanisms.RunDraws.secret"
    drawn = RunDraws.secret

    def noted(self, step):
        result = drawn(self, step)
        found.setdefault(step, []).append(result.members)
        return result

    monkeypatch.setattr(secret, noted)
    return found


@pytest.mark.parametrize("kill", [2, 4, *(pytest.param(k, marks=SLOW) for k in (3, 5))])
def test_an_epoch_continues_as_it_was_drawn(tmp_path, monkeypatch, kill):
    """Each unit is in an epoch once, despite a kill; then the draw is erased."""
    found = members_by_step(monkeypatch)

    def stop(progress):
        assert is_kept(tmp_path) == (progress.step in (1, 2, 3, 5, 6))
        if progress.step == kill:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(BINS).train(tmp_path, on_step=stop)
    run = a_run(BINS)
    assert run.resume(tmp_path) == kill
    run.train(tmp_path)
    assert not is_kept(tmp_path)
    for epoch in ((1, 2, 3, 4), (5, 6, 7)):
        # A step that was prefetched and not taken has the same members again.
        for step in epoch if kill in epoch[:-1] else ():
            first, *others = found[step]
            assert all(np.array_equal(first, other) for other in others)
        drawn = [row.tobytes() for step in epoch for row in found[step][-1]]
        assert len(drawn) == len(set(drawn)) <= 10
    assert len(np.concatenate([found[step][-1] for step in (1, 2, 3, 4)])) == 10


def in_file(folder, query):
    with contextlib.closing(sqlite3.connect(folder / run_files.STORE)) as file:
        found = file.execute(query).fetchall()
        file.commit()
    return found


def is_kept(folder):
    return bool(in_file(folder, "SELECT 1 FROM arrays WHERE kind = 'epoch'"))


def half_way(folder, step=BINS):
    """A run killed in the middle of an epoch."""

    def stop(progress):
        if progress.step == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(step).train(folder, on_step=stop)
    return folder


@pytest.mark.parametrize(
    "damage",
    ["DELETE FROM arrays WHERE kind = 'epoch'", "UPDATE arrays SET number = 3"],
)
def test_an_epoch_without_its_draw_is_not_resumed(tmp_path, damage):
    """With a new draw a unit could be in two steps of the epoch."""
    in_file(half_way(tmp_path), damage + " WHERE kind = 'epoch'" * ("SET" in damage))
    run = a_run(BINS)
    try:
        run.resume(tmp_path)
    except LedgerError as error:
        assert "epoch 3 is not what was written" in str(error)
        return
    with pytest.raises(
        FileNotFoundError, match="no longer has epoch 1, which has begun"
    ):
        run.train(tmp_path)
    assert read_ledger(tmp_path).charged == 2


@pytest.mark.parametrize("size", [1, 24, 3_000, 30_000])
def test_an_epochs_draw_is_erased_from_disk(tmp_path, size):
    """From the file and from its write-ahead log."""
    half_way(tmp_path)
    rng = np.random.default_rng(size)
    with contextlib.closing(RunStore(tmp_path / run_files.STORE)) as store:
        store.begin_session({})
        for number in range(20):
            secret = rng.bytes(16 * size)
            store.keep(EPOCH, number, [np.frombuffer(secret, np.uint8)])
            store.note({"step": 0, "noise": "x" * int(rng.integers(3_000))})
            store.drop_log(after=int(rng.integers(-1, 1)))
            assert store.kept(EPOCH)[1][0].tobytes() == secret
            if number % 2:
                store.forget(EPOCH)
                found = [path.read_bytes() for path in tmp_path.glob("run.*")]
                pieces = [secret[i : i + 16] for i in range(0, 16 * size, 16 * 97)]
                assert not any(one in file for one in pieces for file in found)


def test_steps_charged_elsewhere_are_kept_on_opening_a_folder(tmp_path, monkeypatch):
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


# --- Interrupted steps and missing parts ---


def test_an_interrupted_step_is_dropped_within_a_process(tmp_path, monkeypatch):
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
    with pytest.warns(UserWarning, match="step 3 was charged and interrupted before"):
        run.train(tmp_path)
    assert run.num_steps_taken == run.num_steps_charged == STEPS
    log = run_files.read_log(tmp_path / run_files.STORE)
    assert [record["step"] for record in log] == list(range(STEPS + 1))
    private = [run_files.PRIVATE in record for record in log]
    assert private == [False, True, True, False, True, True, True, True]


def test_resuming_needs_no_data(tmp_path, monkeypatch):
    """Resuming draws, reads or computes nothing from records."""

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


def test_what_was_prepared_for_another_step_is_refused():
    """Its members have already taken part in this epoch."""
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


def test_files_of_a_run_are_private_to_their_owner(tmp_path):
    def look(progress):
        seen.update({path.name: path.stat().st_mode for path in tmp_path.iterdir()})

    seen = {}
    a_run(BINS).train(tmp_path, on_step=look)
    assert {name for name in seen if name[0] == "r"} == {
        "run.sqlite",
        "run.sqlite-wal",
        "run.sqlite-shm",
    }
    assert all(stat.S_IMODE(mode) == 0o600 for mode in seen.values())
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "run.sqlite"}


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
def test_resumed_seeded_runs_equal_whole_ones(
    tmp_path, monkeypatch, seeded_whole, stage
):
    owner, name, call = STAGES[stage]
    if stage.startswith("at the last"):
        call -= 1  # it has one step less
    left = killed_at((owner, name, call), plain_trainer(), tmp_path, monkeypatch)
    run = plain_trainer()
    run.resume(left)
    run.train(left)
    assert_same(run, seeded_whole)
    assert read_ledger(left / run_files.STORE).charged == 6


# --- Truncated files and flipped bits ---


def left_by_a_kill(tmp_path, monkeypatch, name, call):
    """The folder of a run killed at a later call of a store's method."""
    moment = RunStore, name, call
    return killed_at(moment, a_run(GROUPED), tmp_path, monkeypatch)


def read_anyhow(folder):
    """What a damaged folder holds: charges, state and releases; or a refusal."""
    try:
        charged = read_ledger(folder).charged
        with contextlib.closing(RunStore(folder / run_files.STORE)) as store:
            saved = store.saved()
            arrays = [] if saved is None else [a.tobytes() for a in saved.arrays]
            releases = [(n, [a.tobytes() for a in r]) for n, r in store.releases(0)]
            return charged, saved and saved.taken, arrays, releases
    except (LedgerError, OSError):
        return None


def damaged(folder, tmp_path, name, content):
    """What is read from a copy in which one file has other content."""
    copy = tmp_path / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(content)
    return read_anyhow(copy)


@pytest.fixture
def history(tmp_path, monkeypatch):
    """What was read after each commit of a run, and what a kill left of it."""
    found, commit = [], RunStore._commit

    @contextlib.contextmanager
    def noted(store):
        with commit(store) as db:
            yield db
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(store.path.parent, tmp_path / "now")
        found.append(read_anyhow(tmp_path / "now"))

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "_commit", noted)
        left = left_by_a_kill(tmp_path, monkeypatch, "release", 6)
    return found, left


def test_a_truncated_log_reads_as_an_earlier_commit(tmp_path, history):
    """After a crash a state that was once on disk is read."""
    found, left = history
    whole = (left / "run.sqlite-wal").read_bytes()
    seen = set()
    # Cuts around frames of the log: its header, then a header and a page each.
    frames = range(32, len(whole) + 1, 24 + 4096)
    for size in {0, *(place + cut for place in frames for cut in (-1, 0, 24, 2000))}:
        read = damaged(left, tmp_path, "run.sqlite-wal", whole[:size])
        if read is None:
            assert size < 4096 * 8  # before the run had a state
            continue
        assert size < 4096 * 8 or read in found
        seen.add(read[0])
    assert seen >= {2, 3, 4, 5}


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize(
    ("flips", "least"), [(40, 4), pytest.param(150, 30, marks=pytest.mark.slow)]
)
def test_no_flipped_bit_is_accepted(tmp_path, history, closed, flips, least):
    """It is refused, or the written content is read.

    In the last commit of the log the result may be as after a kill there.
    """
    found, left = history
    if closed:
        RunStore(left / run_files.STORE).close()
    rng = np.random.default_rng(0)
    names = ["run.sqlite"] if closed else ["run.sqlite", "run.sqlite-wal"]
    content = (left / names[0]).read_bytes()
    whole = damaged(left, tmp_path, names[0], content)
    refused = 0
    for name in names:
        content = (left / name).read_bytes()
        for place in rng.integers(0, len(content), flips):
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(rng.integers(8))
            read = damaged(left, tmp_path, name, flipped)
            if read is None:
                refused += 1
            elif read != whole:
                assert name == "run.sqlite-wal" and place > len(content) - 6 * 4120
                assert read in found[-3:]  # the last commit is the end of the process
    assert refused > least


def test_flipped_bits_in_the_index_hide_no_array(tmp_path, history):
    """Arrays are found by SQLite's index, which has no hashes."""
    _, left = history
    RunStore(left / run_files.STORE).close()
    content = (left / "run.sqlite").read_bytes()
    whole = damaged(left, tmp_path, "run.sqlite", content)
    # SQLite's pages that are leaves of an index begin with 10; cells end with the page.
    starts = [p for p in range(4096, len(content), 4096) if content[p] == 10]
    refused = 0
    for place in [at for p in starts for at in range(p + 4095, p + 3840, -8)]:
        flipped = bytearray(content)
        flipped[place] ^= 8
        read = damaged(left, tmp_path, "run.sqlite", flipped)
        assert read is None or read == whole, place
        refused += read is None
    assert refused > 15
