"""Crashes: a run ended at any moment, its file truncated or changed at any byte."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import shutil
import sqlite3

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import (
    EVERY,
    MOMENTS,
    ROOT,
    Witness,
    ending,
    gone_on,
    killed_around_a_commit,
    killed_to_the_end,
    run_rig,
    train_until,
)
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.run.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.run.ledgers import read_ledgers
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from jaxdp_episodic.trainer.run.run_files import PRIVATE, STORE, read_log
from jaxdp_episodic.trainer.run.store import EPOCH, RunStore
from jaxdp_episodic.training import ClippingConfig, PrivateGradient
from rows import fast_and_slow
from training_runs import (
    BINS,
    GROUPED,
    adam,
    adaptive,
    assert_same,
    plain_trainer,
    protonet,
)

pytestmark = pytest.mark.filterwarnings("ignore:count_noise")
STEPS = 7
SLOW = pytest.mark.slow


def a_run(step=GROUPED, *, seed=None, **changes):
    return plain_trainer(seed=seed, step=step, num_steps=STEPS, **changes)


FOLLOWS = ClippingConfig(rate=1.0, count_noise=0.7)
SLOTS = dataclasses.replace(GROUPED, neighboring_relation="zero_out")
KINDS = {
    "steps": a_run,
    "epochs": functools.partial(a_run, BINS),
    "Gaussian epochs": functools.partial(a_run, BINS, noise="gaussian"),
    "clip norm": functools.partial(a_run, clipping=FOLLOWS),
    "Gaussian clip norm": functools.partial(a_run, clipping=FOLLOWS, noise="gaussian"),
    "adaptive": functools.partial(adaptive, seed=None),
    "adaptive clip norm": functools.partial(
        adaptive, seed=None, clipping=FOLLOWS, normalizer=5.0
    ),
    "bands": functools.partial(a_run, jde.banded(SLOTS, jde.Bands(2, level="example"))),
}
CHOOSES = 8  # releases of adaptive runs


def steps_of(kind):
    return CHOOSES if "adaptive" in kind else STEPS


# --- Without a seed: released <= charged <= released + one a crash, nothing twice ---


COSINE = dataclasses.replace(protonet()[0], distance="cosine")
CHANGES = {
    "nothing": dict,
    "a function": lambda: {"learner": (COSINE, protonet()[1])},
    "the optimizer's rate": lambda: {"optimizer": adam(0.3)},
}
ATTACKS = [
    *(("steps", moment, change) for moment in MOMENTS for change in CHANGES),
    *(("epochs", moment, "a function") for moment in MOMENTS),
    *(("adaptive", moment, "nothing") for moment in MOMENTS),
    *(("bands", moment, "nothing") for moment in MOMENTS),
]
FAST_ATTACKS = [
    ("steps", "after a charge", "a function"),
    ("steps", "before a state", "the optimizer's rate"),
    ("epochs", "before the release", "a function"),
]


@pytest.mark.parametrize(
    ("kind", "moment", "change"),
    fast_and_slow(ATTACKS, lambda *row: row in FAST_ATTACKS),
)
def test_no_noise_is_reused_and_no_release_uncharged(
    tmp_path, monkeypatch, kind, moment, change
):
    """A run killed at a moment and copied; both folders continue with a change."""
    witness, make = Witness(monkeypatch), KINDS[kind]
    folder, first, second = (tmp_path / name for name in ("run", "first", "second"))
    with ending(*MOMENTS[moment], folder, first):
        make().train(folder, checkpoint_every=EVERY)
    common = read_ledger(first).charged
    assert common - 1 <= witness.released <= common
    shutil.copytree(first, second)
    for copy in (first, second):
        run = make(**CHANGES[change]())
        gone_on(run, copy)
        assert run.num_steps_taken == steps_of(kind)
    if kind == "steps":  # shared epochs: see test_ledgers.py
        together = read_ledgers([copy / STORE for copy in (first, second)])
        assert together.run_charged() == (GROUPED, 2 * STEPS - common)
    assert witness.complaints((first, second), steps_of(kind)) == []


def test_a_step_interrupted_within_a_process_is_dropped(tmp_path):
    run = a_run()
    with ending(PrivateGradient, "__call__", 3):
        run.train(tmp_path)
    assert (run.num_steps_taken, run.num_steps_charged) == (2, 3)
    with pytest.warns(UserWarning, match="step 3 was charged and interrupted before"):
        run.train(tmp_path)
    assert run.num_steps_taken == run.num_steps_charged == STEPS
    log = read_log(tmp_path)
    assert [record["step"] for record in log] == list(range(STEPS + 1))
    private = [PRIVATE in record for record in log]
    assert private == [False, True, True, False, True, True, True, True]


# --- With a seed: equal to an undisturbed run, bit for bit ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs with their folders, by kind."""

    @functools.cache
    def made(kind):
        run, folder = KINDS[kind](seed=1), tmp_path_factory.mktemp("whole")
        run.train(folder, checkpoint_every=EVERY)
        return run, folder

    return made


def public_log(folder):
    return [
        {name: value for name, value in record.items() if name != PRIVATE}
        for record in read_log(folder)
    ]


def assert_equal(run, folder, whole):
    """State, choices, scores and log, also of releases applied on resuming."""
    other, undisturbed = whole
    assert_same(run, other)
    assert (run.ledger.options, run.scores) == (other.ledger.options, other.scores)
    assert run.clip_norm == other.clip_norm
    assert read_ledger(folder).groups == read_ledger(undisturbed).groups
    assert public_log(folder) == public_log(undisturbed)


SEEDED = [kind for kind in KINDS if kind != "bands"]  # resumed, they differ
ENDS = "killed", "interrupted", "continued"  # the last one by the same trainer
ENDED = [
    *(("steps", moment, how) for moment in MOMENTS for how in ENDS),
    *((kind, moment, "killed") for kind in SEEDED[1:] for moment in MOMENTS),
]
FAST_ENDED = [
    ("steps", "before the first charge", "killed"),
    ("steps", "after a charge", "killed"),
    ("steps", "before a state", "killed"),
    ("steps", "before the release", "continued"),
    ("steps", "before it is applied", "continued"),
    ("steps", "after the release", "interrupted"),
    ("clip norm", "after the release", "killed"),
    ("adaptive", "before the release", "killed"),
]


@pytest.mark.parametrize(
    ("kind", "moment", "how"), fast_and_slow(ENDED, lambda *row: row in FAST_ENDED)
)
def test_a_run_ended_anywhere_equals_an_undisturbed_one(
    tmp_path, whole, kind, moment, how
):
    run, folder, left = KINDS[kind](seed=1), tmp_path / "run", tmp_path / "left"
    with ending(*MOMENTS[moment], folder, left if how == "killed" else None):
        run.train(folder, checkpoint_every=EVERY)
    if how == "continued":
        run.train(folder, checkpoint_every=EVERY)
    else:
        run, folder = KINDS[kind](seed=1), left if how == "killed" else folder
        gone_on(run, folder)
    assert_equal(run, folder, whole(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("steps", 1), ("epochs", None), ("adaptive", None), ("bands", None)],
)
def test_a_run_killed_around_any_commit(tmp_path, monkeypatch, whole, kind, seed):
    for number in range(1_000):
        folder, left = tmp_path / f"run {number}", tmp_path / f"left {number}"
        with monkeypatch.context() as patch:
            witness = Witness(patch)
            with killed_around_a_commit(number, folder, left) as ends:
                KINDS[kind](seed=seed).train(folder, checkpoint_every=EVERY)
            if not ends:
                break
            # Choices are charged: at most one choice more than charges.
            content = read_ledger(left)
            assert len(content.options) <= content.charged + 1
            run = KINDS[kind](seed=seed)
            gone_on(run, left)
        if seed is None:
            assert witness.complaints([left], steps_of(kind)) == []
        else:
            assert_equal(run, left, whole(kind))
    assert number > 30


AGAIN = [
    *(("steps", seed, every) for seed in (1, None) for every in (13, 14, 17)),
    *(("epochs", seed, every) for seed in (1, None) for every in (15, 18)),
    *(("adaptive", seed, every) for seed in (1, None) for every in (15, 16)),
    ("bands", None, 16),
]


@pytest.mark.parametrize(
    ("kind", "seed", "every"),
    fast_and_slow(AGAIN, lambda *row: row == ("steps", None, 17)),
)
def test_a_run_killed_again_and_again(tmp_path, monkeypatch, whole, kind, seed, every):
    """The resumed runs are killed too, until one ends."""
    witness, made = Witness(monkeypatch), functools.partial(KINDS[kind], seed=seed)
    run, folder, died = killed_to_the_end(made, tmp_path / "run", every)
    assert died > 1
    if seed is None:
        assert witness.complaints([folder], steps_of(kind), crashes=died) == []
    else:
        assert_equal(run, folder, whole(kind))


# --- Whole processes, killed at any moment ---

RIG = ROOT / "experiments" / "trust" / "kill_training.py"


@pytest.mark.slow
def test_killed_processes_are_charged_and_end_as_others(tmp_path):
    code, summary = run_rig(RIG, tmp_path, "--kills", "25")
    assert (code, summary["violations"]) == (0, [])
    assert len(summary["kills"]) == 25
    for kill in summary["kills"]:
        assert kill["released"] <= kill["charged"] <= kill["released"] + 25
    facts = summary["facts"]
    assert facts["of them with a seed, equal to an undisturbed run bit for bit"] >= 1


def test_violations_that_the_rig_reports(monkeypatch):
    monkeypatch.syspath_prepend(RIG.parent)
    rig = importlib.import_module("kill_training")
    fine = {1: ["a"], 3: ["b"]}
    assert rig.violations(fine, 2, 1) == rig.violations(fine, 3, 1) == []
    assert rig.violations(fine, 1, 1) == ["2 steps released, 1 charged, 1 killed"]
    assert rig.violations(fine, 4, 1) == ["2 steps released, 4 charged, 1 killed"]
    assert rig.violations(fine, 4, 2) == []
    for again in (["a", "b"], ["a", "a"]):
        assert rig.violations({1: again}, 1, 1) == ["step 1 was released again"]


# --- Epochs ---


def members_by_step(monkeypatch):
    """Who takes part in each released step."""
    found, drawn = {}, RunDraws.secret

    def noted(self, step):
        result = drawn(self, step)
        found.setdefault(step, []).append(result.members)
        return result

    monkeypatch.setattr(RunDraws, "secret", noted)
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
    assert gone_on(a_run(BINS), tmp_path) == kill
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
    with contextlib.closing(sqlite3.connect(folder / STORE)) as file:
        found = file.execute(query).fetchall()
        file.commit()
    return found


def is_kept(folder):
    return bool(in_file(folder, "SELECT 1 FROM arrays WHERE kind = 'epoch'"))


def test_an_epoch_without_its_draw_is_not_resumed(tmp_path):
    """With a new draw a unit could be in two steps of the epoch."""
    train_until(2, a_run(BINS), tmp_path)
    in_file(tmp_path, "DELETE FROM arrays WHERE kind = 'epoch'")
    run = a_run(BINS)
    run.resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="has epoch 1, which has begun"):
        run.train(tmp_path)
    assert read_ledger(tmp_path).charged == 2


@pytest.mark.parametrize("size", [1, 24, 3_000, 30_000])
def test_an_epochs_draw_is_erased_from_disk(tmp_path, size):
    """From the file and from its write-ahead log."""
    train_until(2, a_run(BINS), tmp_path)
    rng = np.random.default_rng(size)
    with contextlib.closing(RunStore(tmp_path / STORE)) as store:
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
    with ending(RunStore, "charge", 2):
        run.train(tmp_path)
    with pytest.raises(LedgerError, match="no checkpoint.* They stay charged: begin"):
        a_run(BINS).resume(tmp_path)
    train_until(3, run, tmp_path)
    assert gone_on(a_run(BINS), tmp_path) == 3
    first = np.concatenate([found[step][-1] for step in (1, 2, 3, 4)])
    assert len(np.unique(first, axis=0)) == 10


def test_what_was_prepared_for_another_step_is_refused(tmp_path):
    """Its members have already taken part in this epoch, or would again."""
    run = a_run(BINS)
    with run.ahead() as ahead:
        first = next(ahead)
        run.step()
        with pytest.raises(ValueError, match="prepared must be of step 2, got that of"):
            run.step(first)
    assert run.num_steps_charged == 1
    train_until(2, a_run(BINS), tmp_path)
    run = a_run(BINS)
    with run.ahead() as ahead:
        _, _, third = itertools.islice(ahead, 3)
    with pytest.raises(ValueError, match="resume must come before a draw"):
        run.resume(tmp_path)
    with pytest.raises(ValueError, match="resume did not end"):
        run.step(third)


def test_resuming_needs_no_data(tmp_path, monkeypatch):
    """Resuming draws, reads or computes nothing from records."""
    first, run = train_until(5, a_run(), tmp_path), a_run()

    def touched(*args, **kwargs):
        raise AssertionError("data were touched")

    monkeypatch.setattr(EpisodeSampler, "draw", touched)
    monkeypatch.setattr(PrivateGradient, "__call__", touched)
    assert run.resume(tmp_path) == 5
    assert_same(run, first)


# --- Truncated files and flipped bits ---


def read_anyhow(folder):
    """What a damaged folder holds: charges, state and releases; or a refusal."""
    try:
        charged = read_ledger(folder).charged
        with contextlib.closing(RunStore(folder / STORE)) as store:
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


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """What was read after each commit of a run, and what a kill left of it."""
    folder = tmp_path_factory.mktemp("history")
    now, left, found, commit = folder / "now", folder / "left", [], RunStore._commit

    @contextlib.contextmanager
    def noted(store):
        with commit(store) as db:
            yield db
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(store.path.parent, now)
        found.append(read_anyhow(now))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunStore, "_commit", noted)
        with ending(RunStore, "release", 6, folder / "run", left):
            a_run().train(folder / "run", checkpoint_every=EVERY)
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


def test_a_truncated_file_is_refused(tmp_path, history):
    left = shutil.copytree(history[1], tmp_path / "left")
    RunStore(left / STORE).close()
    content = (left / STORE).read_bytes()
    for size in {0, 100, *range(4096, len(content), 2048)}:
        assert damaged(left, tmp_path, STORE, content[:size]) is None


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize(
    ("flips", "least"), [(25, 2), pytest.param(150, 30, marks=pytest.mark.slow)]
)
def test_no_flipped_bit_is_accepted(tmp_path, history, closed, flips, least):
    """It is refused, or the written content is read.

    In the last commit of the log the result may be as after a kill there.
    """
    found, left = history[0], shutil.copytree(history[1], tmp_path / "left")
    if closed:
        RunStore(left / STORE).close()
    rng = np.random.default_rng(0)
    names = [STORE] if closed else [STORE, "run.sqlite-wal"]
    whole = damaged(left, tmp_path, STORE, (left / STORE).read_bytes())
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
    """SQLite's index has no hashes: it is not read, and made anew or refused."""
    left = shutil.copytree(history[1], tmp_path / "left")
    RunStore(left / STORE).close()
    content = (left / STORE).read_bytes()
    whole = damaged(left, tmp_path, STORE, content)
    # SQLite's pages that are leaves of an index begin with 10; cells end with the page.
    starts = [p for p in range(4096, len(content), 4096) if content[p] == 10]
    places = [at for p in starts for at in range(p + 4095, p + 3840, -8)]
    file, made, query = tmp_path / "damaged" / STORE, 0, "PRAGMA integrity_check"
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 8
        assert damaged(left, tmp_path, STORE, flipped) == whole, place
        with contextlib.closing(RunStore(file)) as store:
            with contextlib.suppress(LedgerError):  # of its structure
                store.begin_session({})
                assert in_file(file.parent, query) == [("ok",)]
                made += 1
        assert read_anyhow(file.parent) == whole, place
    assert 10 < made < len(places)  # else SQLite could have freed wrong pages
