"""The run's file: round trips, refusals of changed files, and its statements."""

import contextlib
import json
import shutil
import sqlite3
import stat
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.run import store as store_module
from jaxdp_episodic.trainer.run.ledger import Ledger
from jaxdp_episodic.trainer.run.ledger_file import (
    STORE,
    LedgerError,
    RunFile,
    content_of,
    described,
    facts_text,
    read_ledger,
    run_file,
    text_hash,
)
from jaxdp_episodic.trainer.run.run_files import (
    HELD_OUT,
    PRIVATE,
    read_log,
    releasable_records,
)
from jaxdp_episodic.trainer.run.store import (
    BEST,
    EPOCH,
    RunStore,
    create_store,
    is_on_network,
)
from jaxdp_episodic.training import BudgetExhaustedError, PrivacyBudget
from training_runs import (
    Interrupted,
    charged_run,
    classes,
    flat_step,
    grouped_step,
    plain_trainer,
)

DELTA = 1e-5


def budget(step=None, *, steps=50, permitted=100):
    return PrivacyBudget(step or flat_step(), 8.0, DELTA, steps, permitted)


@pytest.fixture
def path(tmp_path):
    return charged_run(tmp_path / STORE, budget(), 3)


def opened(path):
    return contextlib.closing(RunStore(path))


def edited(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as file:
        for statement in statements:
            file.execute(statement)
        file.commit()
    return path


# --- Round trips ---


def test_charges_round_trip(path):
    charged_run(path, budget(), 3)
    content = read_ledger(path)
    assert content.groups == ((flat_step(), 6),)
    assert content.charged == 6 and content.is_closed and not content.is_seeded
    assert (content.target_epsilon, content.delta) == (8.0, DELTA)
    with run_file(path) as file:
        assert file.openings()[0] == {"charged": 0, "machine": "this one"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_ledger(path.parent) == content  # the folder works, too
    data = classes()
    step, other = grouped_step(data), path.with_name("other")
    create_store(other, PrivacyBudget(step, np.inf, 1e-6, 5, 9), is_seeded=True)
    content = read_ledger(other)
    assert content.groups == ((step, 0),) and content.is_seeded
    assert content.groups[0][0].population == data.population
    assert (content.target_epsilon, content.delta) == (np.inf, 1e-6)


ARRAYS = [
    np.float32(3.5),
    np.zeros((0, 3), np.int32),
    np.arange(12.0).reshape(3, 4),
    np.asarray(np.arange(6, dtype=np.float32).reshape(2, 3).T),
    np.array([True, False]),
]


@pytest.mark.parametrize("part", [2**28, 7])
def test_arrays_round_trip_bit_for_bit(path, monkeypatch, part):
    """Also large ones, which are stored in parts because SQLite limits values."""
    assert store_module._PART <= 10**9  # SQLite's bound
    monkeypatch.setattr(store_module, "_PART", part)
    with opened(path) as store:
        store.save(2, ARRAYS, {"a": 1}, {"w": "f"}, 2)
        store.release(3, ARRAYS)
        store.keep(BEST, 7, ARRAYS)
    with opened(path) as store:
        saved, ((number, released),) = store.saved(), store.releases(after=2)
        assert (saved.taken, saved.run, saved.kinds) == (2, {"a": 1}, {"w": "f"})
        assert number == 3 and store.kept(BEST)[0] == 7
        for found in (saved.arrays, released, store.kept(BEST)[1]):
            for one, wanted in zip(found, ARRAYS, strict=True):
                assert one.dtype == wanted.dtype and one.shape == np.shape(wanted)
                np.testing.assert_array_equal(one, wanted)


def test_a_state_removes_the_releases_it_contains(path):
    with opened(path) as store:
        for number in (1, 3):
            store.release(number, [np.ones(4)])
        assert [number for number, _ in store.releases(0)] == [1, 3]
        store.save(1, [np.ones(4)], {}, {}, 1)
        assert [number for number, _ in store.releases(0)] == [3]


def test_large_files_are_committed_more_often(tmp_path, monkeypatch):
    saved, save = [], RunStore.save

    def noted(store, taken, *args):
        saved.append(taken)
        save(store, taken, *args)

    monkeypatch.setattr(RunStore, "save", noted)
    monkeypatch.setattr(store_module, "MOST_BYTES", 2 * 60 * 4)
    plain_trainer().train(tmp_path, checkpoint_every=100)
    assert saved == [0, 2, 4, 6, 6]


# --- The log ---

RECORDS = [
    {"step": 0, "epsilon": 0.0, HELD_OUT: {"test": {"mean": 0.5}}},
    {"step": 1, "epsilon": np.float32(np.inf), PRIVATE: {"mean_loss": np.nan}},
    {"step": np.int64(2), PRIVATE: {"mean_loss": 1.25}},
]


def test_the_log_round_trips_without_records_of_lost_steps(path):
    with opened(path) as store:
        for record in RECORDS:
            store.note(record)
    found = read_log(path)
    assert found[0] == RECORDS[0] and found[2] == RECORDS[2]
    assert found[1] == {"step": 1, "epsilon": "inf", PRIVATE: {"mean_loss": "nan"}}
    with opened(path) as store:
        store.drop_log(after=1)
    assert read_log(path.parent) == found[:2]
    released = releasable_records(RECORDS)
    assert released == [{"step": 0, "epsilon": 0.0}, {"step": 1, "epsilon": np.inf}]


def test_a_record_whose_commit_was_interrupted_is_written_once(path):
    with opened(path) as store:
        db = store._db

        def execute(statement, *values):
            found = db.execute(statement, *values)
            if statement == "COMMIT":
                store._db = db
                raise KeyboardInterrupt
            return found

        store.note({"step": 1})
        store._db = SimpleNamespace(execute=execute)
        with pytest.raises(KeyboardInterrupt):
            store.charge("phase 1")
        store.note({"step": 2})
    assert [record["step"] for record in read_log(path)] == [1, 2]


def test_the_log_command_prints_all_records(path, capsys):
    with opened(path) as store:
        store.note(RECORDS[0])
    for place in (path, path.parent):
        assert cli.run(["log", str(place)]) == 0
        lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
        kinds = [line["kind"] for line in lines]
        assert kinds == ["run", "step", "opening", *["charge"] * 3, "log"]
        assert lines[0]["epsilon"] == 8.0 and lines[-1][HELD_OUT]
        assert [line["number"] for line in lines[3:6]] == [1, 2, 3]
    assert cli.run(["log", str(path.with_name("none"))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- Refusals ---

VIEW = [
    "DROP TABLE charges",
    "CREATE VIEW charges AS SELECT 1 AS number, 1 AS step, 1 AS session, '' AS hash",
]
TRIGGER = ["CREATE TRIGGER t AFTER INSERT ON charges BEGIN SELECT 1; END"]


def forged(**changes):
    """A changed file with recomputed hashes."""
    text = facts_text("ab" * 16, epsilon=1.0, delta=DELTA, is_seeded=False)
    text = json.dumps(json.loads(text) | changes)
    value = text_hash("facts", "", text).hex()
    return f"UPDATE texts SET value = '{text}', hash = x'{value}' WHERE kind = 'facts'"


def other_step(text):
    value = text_hash("step", "phase 1", text).hex()
    return f"UPDATE texts SET value = '{text}', hash = x'{value}' WHERE kind = 'step'"


def with_step(step):
    """The file's charges become those of another step, added with its hash."""
    text = described(step.to_dict())
    row = f"'step', 'phase 2', '{text}', x'{text_hash('step', 'phase 2', text).hex()}'"
    return [
        f"INSERT INTO texts (kind, key, value, hash) VALUES ({row})",
        "UPDATE charges SET step = (SELECT max(id) FROM texts)",
    ]


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (["DELETE FROM charges WHERE number = 1"], "charge 1 is missing"),
        (["DELETE FROM charges WHERE number = 2"], "charge 2 is missing"),
        (["UPDATE charges SET hash = x'00' WHERE number = 3"], "charge 3"),
        (["UPDATE charges SET session = 99"], "charge 1 is missing"),
        (with_step(flat_step(noise_multiplier=9.0)), "charge 1 or an earlier one"),
        (["UPDATE texts SET value = replace(value, '0.02', '0.01')"], "step 'phase 1'"),
        (["UPDATE texts SET value = x'ff' WHERE kind = 'facts'"], "is not a text"),
        (["DELETE FROM texts WHERE kind = 'facts'"], "must have the facts once"),
        (["DELETE FROM texts WHERE kind = 'step'"], "charge 1 is missing"),
        (VIEW, "is not a run file of this library"),
        (TRIGGER, "is not a run file of this library"),
        (["DROP TABLE arrays"], "is not a run file of this library"),
        ([forged(format="else")], "is not a run: format must be"),
        ([forged(version=2)], "version must be 1, got 2"),
        ([forged(version=True)], "version must be 1, got True"),
        ([forged(more=1)], "the keys must be"),
        ([forged(epsilon=-1.0)], "epsilon must be > 0"),
        ([forged(delta=1.0)], "delta must lie in"),
        ([forged(run=3)], "run must be a name"),
        ([forged(book=3)], "book must be a name"),
        ([forged(book="a\x1b[2Jb")], "book must be a name"),
        ([forged(search=[])], "search must be a name"),
        ([forged(delta=1e-6)], "charge 1 or an earlier one"),
        (["DELETE FROM charges", other_step('{"type": "os.system"}')], "missing key"),
        (["DELETE FROM charges", other_step("[" * 10**5)], "nested too deeply"),
    ],
)
def test_an_edited_file_is_refused_with_the_reason(path, statements, reason):
    edited(path, *statements)
    with pytest.raises(LedgerError, match=reason):
        read_ledger(path)


@pytest.mark.parametrize("kind", ["state", "ended", "log", "opening", "closed"])
def test_a_flipped_bit_in_the_kind_of_a_text_hides_nothing(path, kind):
    """The hash of a text is checked where texts of its kind are read."""
    with opened(path) as store:
        store.begin_session({})
        store.note({"step": 3})
        store.save(3, [np.ones(3)], {}, {}, 3)
        store.end()
    raw, length = path.read_bytes(), len(kind)
    places = [i for i in range(len(raw)) if raw[i : i + length] == kind.encode()]
    refused = 0
    for place in places:
        for bit in range(8 * length):
            flipped = bytearray(raw)
            flipped[place + bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                with opened(path) as store:
                    assert store.saved().taken == 3 and content_of(store).has_ended
            except LedgerError:
                refused += 1
    assert refused >= 8 * length


def test_other_files_are_refused(tmp_path):
    path = tmp_path / STORE
    for content in (b"", b"\0" * 4096, b"SQLite format 3\0" + b"\xff" * 4096, b"{}\n"):
        path.write_bytes(content)
        with pytest.raises(LedgerError):
            read_ledger(path)
    with pytest.raises(OSError):
        read_ledger(tmp_path / "none")
    (tmp_path / "release").mkdir()
    with pytest.raises(LedgerError, match="give its run, "):
        read_ledger(tmp_path / "release")
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        read_ledger(tmp_path.parent)


def test_descriptions_have_a_largest_size(path, monkeypatch):
    """A step that could not be read back is not written."""
    reader = "jaxdp_episodic.trainer.run.ledger_file.MOST_DESCRIBED"
    monkeypatch.setattr(reader, 150)
    with pytest.raises((LedgerError, OSError)):
        read_ledger(path)
    monkeypatch.setattr(store_module, "MOST_DESCRIBED", 100)
    with pytest.raises(ValueError, match="public bounds of the sizes"):
        create_store(path.parent / "new" / STORE, budget(), is_seeded=False)
    assert [one.name for one in path.parent.iterdir()] == [STORE]


def test_a_state_without_its_charges_is_refused(path):
    with opened(path) as store:
        store.save(3, [np.ones(3)], {}, {}, 3)
    edited(path, "DELETE FROM charges WHERE number = 3")
    assert read_ledger(path).charged == 2  # alone it is a valid run
    with opened(path) as store, pytest.raises(LedgerError, match="missing or changed"):
        store.saved()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM arrays WHERE place = 1",
        "DELETE FROM arrays WHERE place = 0",
        "UPDATE arrays SET place = 2 WHERE place = 1",
        "UPDATE arrays SET id = id + 100 * (place = 0)",  # in another order
        "UPDATE arrays SET id = 100 + 2 * id + 3 * (id % 2)",  # their parts
        "UPDATE arrays SET head = replace(head, '[3]', '[1, 3]')",
        "UPDATE arrays SET head = replace(head, 'float64', 'int64')",
        "UPDATE arrays SET data = zeroblob(24) WHERE place = 0",
        "UPDATE arrays SET kind = 'releasd' WHERE kind = 'release'",
        "UPDATE texts SET value = CAST(x'7bff7d' AS TEXT) WHERE kind = 'log'",
    ],
)
def test_damaged_states_releases_and_logs_are_refused(path, damage, monkeypatch):
    monkeypatch.setattr(store_module, "_PART", 12)  # two parts each
    with opened(path) as store:
        store.save(2, [np.ones(3), np.ones(3)], {}, {}, 2)
        store.release(3, [np.ones(3), np.ones(3)])
        store.note({"step": 3})
    edited(path, damage)
    if "texts" in damage:
        with pytest.raises(LedgerError, match="is damaged"):
            read_log(path)
        return
    for read in (RunStore.saved, lambda store: list(store.releases(after=2))):
        with opened(path) as store, pytest.raises(LedgerError, match="is damaged"):
            read(store)


def test_a_copy_without_its_write_ahead_log_is_refused(path, tmp_path):
    """It lacks charges, so no reader accepts it and no run continues it."""
    copy = tmp_path / "copy.sqlite"
    with opened(path) as store:
        store.begin_session({})
        store.charge("phase 1")
        shutil.copy(path, copy)
    for _ in range(2):  # reading creates no empty log
        content = read_ledger(copy)
        assert (content.charged, content.is_closed) == (3, False)
        with pytest.raises(LedgerError, match="lacks its write-ahead log"):
            RunStore(copy)
    edited(copy, "PRAGMA journal_mode = DELETE")  # as the message advises
    RunStore(copy).close()


def test_a_crash_while_the_log_is_created_or_removed_is_accepted(path, monkeypatch):
    """The header names a missing log, but that log held no charge."""

    def goes_on(charged):
        data = bytearray(path.read_bytes())
        data[18:20] = b"\2\2"  # the header names the log
        path.write_bytes(data)
        with opened(path) as store:
            assert store.mark.charged == charged and not store.is_closed
            store.begin_session({})
            store.charge("phase 1")
        assert read_ledger(path).is_closed

    goes_on(3)  # while the first process makes the log
    crashed = RunStore(path)
    crashed.begin_session({})
    crashed.charge("phase 1")
    kept = {one: one.read_bytes() for one in path.parent.glob(f"{STORE}*")}
    crashed._db.close()
    for one, data in kept.items():
        one.write_bytes(data)
    RunStore(path).close()
    assert not read_ledger(path).is_closed
    goes_on(5)  # while a later process merges and removes the log
    assert read_ledger(path).charged == 6


def test_a_run_whose_close_was_interrupted_is_accepted(path, monkeypatch):
    """A second Ctrl-C while SQLite merges and removes the log on closing."""
    store = RunStore(path)
    store.begin_session({})
    store.charge("phase 1")
    monkeypatch.setattr(store, "_text", Interrupted(None, 1))
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store._db.close()  # as by the garbage collector
    content = read_ledger(path)
    assert (content.charged, content.is_closed) == (4, False)
    RunStore(path).close()


def test_nothing_is_released_uncharged_or_twice(path):
    with opened(path) as store:
        store.save(1, [], {}, {}, 1)
        store.release(3, [np.ones(1)])
        for number in (1, 3, 4):
            with pytest.raises(LedgerError, match=f"step {number} was not charged, or"):
                store.release(number, [np.ones(1)])


@pytest.mark.parametrize("of", ["", "-wal"])
@pytest.mark.parametrize("how", ["removed", "replaced", "changed", "charged"])
def test_an_open_run_is_locked(path, how, of):
    count = Ledger(budget(), charged=3)
    with opened(path) as store, count.writing_to(store, {}):
        count.charge()
        error = LedgerError
        if how == "charged":  # the other process made the next charge
            with opened(path) as other:
                other.begin_session({})
                other.charge("phase 1")
        elif how == "changed":
            edited(path, "DELETE FROM charges WHERE number = 4")
        else:
            file = path.with_name(path.name + of)
            file.rename(path.with_name("away"))
            if how == "replaced":
                shutil.copy(path.with_name("away"), file)
            error = FileNotFoundError
        for _ in range(2):
            with pytest.raises(error, match="while the run used it"):
                count.charge()
        assert count.charged == 4
    if of and how in ("removed", "replaced"):  # no log record is lost
        assert read_ledger(path).charged == 4
        with opened(path) as store, count.writing_to(store, {}):
            assert count.charge() == 5


def test_an_interrupted_charge_is_used_once(tmp_path, monkeypatch):
    """Also the first charge of a step, whose description is in the file already."""
    first = flat_step(noise_multiplier=3.0)
    plan = PrivacyBudget(flat_step(), 8.0, DELTA, 9, 9, before=(first,))
    path, count = tmp_path / STORE, Ledger(plan)
    create_store(path, plan, is_seeded=False)
    with opened(path) as store, count.writing_to(store, {}):
        charge = store.charge

        def interrupted(*args):
            charge(*args)
            raise KeyboardInterrupt

        for number in range(1, 6):
            monkeypatch.setattr(store, "charge", interrupted)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    count.charge()
            monkeypatch.undo()
            assert count.charge() == store.mark.charged == number
    assert [count for _, count in read_ledger(path).groups] == [1, 4]
    with opened(path) as store:
        Ledger(plan, charged=5, mark=count.mark).check(store)
        assert len(list(store.texts("step"))) == 2


def reads(path, secret):
    """Whether the file or its side files contain a secret."""
    return any(secret in one.read_bytes() for one in path.parent.glob(f"{STORE}*"))


def test_a_long_read_ends_a_run_that_must_erase(path, monkeypatch):
    """The next process erases who took part, before it charges anything."""
    monkeypatch.setattr(store_module, "_SECONDS_TO_WAIT", 0)
    secret = np.random.default_rng(0).bytes(3_000)
    store = RunStore(path)
    store.begin_session({})
    store.keep(EPOCH, 0, arrays := [np.frombuffer(secret, np.uint8)])
    with RunFile(path):
        for act in (store.forget, lambda kind: store.keep(kind, 1, arrays)):
            with pytest.raises(BlockingIOError, match="such as a report"):
                act(EPOCH)
        assert store.kept(EPOCH) is None and reads(path, secret[:99])
        store.close()
        again = RunStore(path)
        with pytest.raises(BlockingIOError, match="end that process and go on"):
            again.begin_session({})
        assert reads(path, secret[:99])
    again.begin_session({})
    assert not reads(path, secret[:99])
    again.close()
    assert read_ledger(path).charged == 3
    charged_run(path, budget(), 1)


def test_after_a_write_that_failed_nothing_is_charged(path, monkeypatch):
    """The content of the disk is unknown until the file is reopened."""
    with opened(path) as store:
        store.begin_session({})

        class Full:
            def __getattr__(self, name):
                return getattr(db, name)

            def execute(self, text, *values):
                if text == "COMMIT":
                    error = sqlite3.OperationalError("database or disk is full")
                    error.sqlite_errorcode = sqlite3.SQLITE_FULL
                    raise error
                return db.execute(text, *values)

        db = store._db
        monkeypatch.setattr(store, "_db", Full())
        with pytest.raises(OSError, match="disk is full") as caught:
            store.charge("phase 1", flat_step())
        assert caught.value.errno == 28
        monkeypatch.undo()
        with pytest.raises(OSError, match="an earlier write failed"):
            store.charge("phase 1", flat_step())
    assert read_ledger(path).charged == 3


def test_charges_beyond_the_budget_and_in_another_runs_file_are_refused(path):
    count = Ledger(budget(permitted=4), charged=3)
    with opened(path) as store, count.writing_to(store, {}):
        count.charge()
        with pytest.raises(BudgetExhaustedError):
            count.charge()
        with pytest.raises(FileExistsError, match="4 steps are charged .* at step 2"):
            Ledger(budget(), charged=2).check(store)
        with pytest.raises(LedgerError, match="charges other steps"):
            Ledger(budget(flat_step(noise_multiplier=1.1)), charged=4).check(store)
        older = count.mark._replace(hash=b"other")
        with pytest.raises(LedgerError, match="is not what the run wrote"):
            Ledger(budget(), charged=4, mark=older).check(store)
    # Steps charged by another process are counted first.
    count = Ledger(budget(), charged=6)
    with opened(path) as store, count.writing_to(store, {}):
        assert store.mark.charged == 6


# --- File systems ---


def test_commits_survive_a_power_failure(path):
    """They return when the log, or the name of a removed journal, is on the disk."""
    with opened(path) as store:
        store.begin_session({})
        assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA


def test_network_file_systems_have_no_write_ahead_log(tmp_path, monkeypatch):
    mounts, folder = tmp_path / "mounts", tmp_path / "a b"
    folder.mkdir()
    remote = f"server:/home {folder} nfs4".replace("a b", "a\\040b")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\n{remote} rw 0 0\n")
    monkeypatch.setattr(store_module, "_MOUNTS", mounts)
    assert is_on_network(folder / STORE) and not is_on_network(tmp_path / STORE)
    seen = []

    def look(progress):
        seen.append(sorted(path.name for path in folder.iterdir()))

    plain_trainer().train(folder, on_step=look)
    assert all(names == [".lock", STORE] for names in seen) and len(seen) == 6
    assert read_ledger(folder).charged == 6
    monkeypatch.setattr(store_module, "_MOUNTS", tmp_path / "none")
    assert not is_on_network(folder / STORE)


# --- Epsilon from the file: what it charges, see test_ledgers.py ---


def test_epsilon_of_a_killed_run_with_a_seed(tmp_path, capsys):
    step = grouped_step(classes())
    path = charged_run(tmp_path / STORE, budget(step), 6, is_seeded=True)
    edited(path, "DELETE FROM texts WHERE kind = 'closed'")  # killed
    asked = ["epsilon", "--ledger", str(path.parent), "--delta", "1e-3"]
    assert cli.run([*asked, "--method", "rdp", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    expected = jde.epsilon(step, num_steps=6, delta=1e-3, method="rdp")
    assert answer["epsilon"] == expected
    starts = [text.split(":")[0] for text in answer["warnings"]]
    assert starts == ["not private", "the run was not closed"]
    assert cli.run(["report", str(path.parent)]) == 0
    said = capsys.readouterr().out
    assert "6 steps are charged" in said and "example" in said


def test_wrong_files_and_options_are_one_line(path, capsys):
    edited(path, "DELETE FROM charges WHERE number = 1")
    for file, options, words in (
        (path, ["--num-steps", "3"], "--ledger"),
        (path, ["--per-unit", "--out", "x.csv"], "--ledger"),
        (path, [], "charge 1 is missing"),
        (path.with_name("none"), [], "No such file"),
    ):
        assert cli.run(["epsilon", "--ledger", str(file), *options]) == 2
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1
        assert printed.out == ""
