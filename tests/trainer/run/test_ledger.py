"""The ledger: on the disk before a release, refused if it is not what was written."""

import errno
import json
import os
import stat
import tracemalloc

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerMark
from jaxdp_episodic.accountant.report.ledger_file import (
    CHARGE,
    Chain,
    LedgerError,
    has_charges,
    header,
    opening,
    read_ledger,
)
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.checkpoint import Checkpoints
from jaxdp_episodic.trainer.run.ledger import Ledger, LedgerFile, create_ledger
from training_runs import classes, flat_step, grouped_step, plain_trainer

DELTA = 1e-5
HERE = {"machine": "this one"}


def budget(step=None, *, steps=50, permitted=100):
    return PrivacyBudget(step or flat_step(), 8.0, DELTA, steps, permitted)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.jsonl"
    create_ledger(path, budget(), is_seeded=False)
    return path


def charged_in(path, number, *, openings=1):
    """Charges step by step; returns the mark at the end."""
    for _ in range(openings):
        with LedgerFile(path) as ledger:
            ledger.note_opening(HERE)
            for _ in range(number):
                ledger.charge()
    return read_ledger(path).end


# --- The format ---


def test_a_step_is_two_bytes_and_equal_steps_are_described_once(path):
    charged_in(path, 3, openings=2)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines.count(CHARGE) == 6
    kinds = [
        sorted(json.loads(line).keys() - {"hash"}) for line in lines if b"{" in line
    ]
    seal, opening = ["charged"], ["charged", "opened"]
    assert kinds[1:] == [["step"], opening, seal, opening, seal]
    content = read_ledger(path)
    assert content.groups == ((flat_step(), 6),)
    assert (content.charged, content.end.charged, content.is_sealed) == (6, 6, True)
    assert (content.target_epsilon, content.delta, content.is_seeded) == (
        8.0,
        DELTA,
        False,
    )
    assert content.end.num_bytes == path.stat().st_size
    assert [tuple(o) for o in content.openings] == [(0, HERE)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"pickle" not in path.read_bytes()


@pytest.mark.slow
def test_a_million_steps_take_little_memory_and_two_megabytes(path):
    with LedgerFile(path) as ledger:
        ledger.charge(10**6 - 1)
        tracemalloc.start()
        ledger.charge()
        _, writing = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    content = read_ledger(path)
    _, reading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert content.charged == 10**6
    assert path.stat().st_size < 2_010_000
    assert writing < 100_000 and reading < 1_000_000


def test_there_is_a_seal_every_thousand_steps(path):
    with LedgerFile(path) as ledger:
        for _ in range(1001):
            ledger.charge()
        assert not read_ledger(path).is_sealed
        assert path.read_bytes().count(b'\n{"charged":1000,"hash"') == 1
    assert read_ledger(path).is_sealed


@pytest.mark.parametrize("epsilon", [2.5, np.inf])
def test_what_a_run_is_comes_back(tmp_path, epsilon):
    data = classes()
    step = grouped_step(data)
    path = tmp_path / "ledger.jsonl"
    create_ledger(path, PrivacyBudget(step, epsilon, 1e-6, 5, 9), is_seeded=True)
    content = read_ledger(path)
    assert content.groups == ((step, 0),)
    assert content.groups[0][0].population == data.population
    assert (content.target_epsilon, content.delta) == (epsilon, 1e-6)
    assert content.is_seeded and not has_charges(path)


# --- What is refused ---


def test_wherever_it_is_cut_nothing_is_forgotten(path):
    """Every length: refused, or at least what the checkpoint counts."""
    mark = charged_in(path, 3)
    charged_in(path, 2)
    whole, refused = path.read_bytes(), []
    for length in reversed(range(len(whole))):  # shorter and shorter, in place
        os.truncate(path, length)
        try:
            content = read_ledger(path, checkpoint=mark)
        except LedgerError as error:
            refused.append(str(error))
            assert length < mark.num_bytes or "neither a charge nor" in str(error)
        else:
            assert length >= mark.num_bytes and content.charged >= 3
    assert len(refused) >= mark.num_bytes
    refused.reverse()
    assert "was cut or rolled back: it ends with 2 steps charged, and when the " in (
        refused[mark.num_bytes - 200]
    ) or any("with 2 steps charged" in text for text in refused)


def test_no_byte_can_be_changed(path):
    charged_in(path, 3)
    whole = path.read_bytes()
    # In place: a file that is written anew may have to wait for the disk.
    with path.open("r+b", buffering=0) as file:
        for place in range(len(whole) - 1):
            for change in (1, 0x20, 0):
                file.seek(place)
                file.write(bytes([whole[place] ^ change]))
                if change:
                    with pytest.raises(LedgerError):
                        read_ledger(path)
    path.write_bytes(whole[:-1] + b" ")  # the end of the last line: one cut off
    assert (read_ledger(path).charged, read_ledger(path).is_sealed) == (3, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace(CHARGE, b"", 1), "edited, added or taken away"),
        (lambda text: text.replace(CHARGE, 2 * CHARGE, 1), "edited, added or taken"),
        (lambda text: text.replace(b"0.02", b"0.01"), "edited, added or taken away"),
        (lambda text: text + b"2\n", "neither a charge nor a record"),
        (lambda text: text + b"\0\0", "neither a charge nor the beginning"),
        (lambda text: text + b'{"charged":0}\n', "neither a charge nor a record"),
        (lambda text: b"", "empty"),
        (lambda text: text[: text.index(b"\n") + 1], "no step is described"),
    ],
    ids=["less", "more", "rate", "two", "zeros", "record", "empty", "header"],
)
def test_an_edited_ledger_is_refused_without_a_checkpoint(path, change, reason):
    charged_in(path, 3)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LedgerError, match=reason):
        read_ledger(path)
    with pytest.raises(LedgerError, match=reason):
        LedgerFile(path)


def test_a_forged_chain_does_not_fit_the_checkpoint(tmp_path, path):
    """Whoever computes all hashes again still has another file."""
    mark = charged_in(path, 5)
    run = read_ledger(path).end.run
    chain, lines = Chain(), []
    records = [
        header(run, epsilon=8.0, delta=DELTA, is_seeded=False),
        {"step": flat_step().to_dict()},
        opening(HERE, 0),
    ]
    for record in records:
        lines.append(chain.line(record))
        chain.add(lines[-1])
    for line in (2 * CHARGE, chain.line({"charged": 0})):
        lines.append(line)
        chain.add(line)
    forged = tmp_path / "forged.jsonl"
    forged.write_bytes(b"".join(lines[:-1]) + CHARGE * 500)
    assert read_ledger(forged).charged == 502
    with pytest.raises(LedgerError, match="it was edited: its first"):
        shorter = mark._replace(num_bytes=chain.num_bytes - len(lines[-1]))
        read_ledger(forged, checkpoint=shorter)
    with pytest.raises(LedgerError):
        read_ledger(forged, checkpoint=mark)


def test_an_older_copy_is_refused(path):
    charged_in(path, 3)
    older = path.read_bytes()
    mark = charged_in(path, 4)
    path.write_bytes(older)
    assert read_ledger(path).charged == 3  # by itself it is a ledger
    with pytest.raises(
        LedgerError, match="rolled back: it ends with 3 steps .* it had 7"
    ):
        read_ledger(path, checkpoint=mark)


def test_the_ledger_of_another_run_is_refused(tmp_path, path):
    mark = charged_in(path, 3)
    other = tmp_path / "other.jsonl"
    create_ledger(other, budget(), is_seeded=False)
    charged_in(other, 9)
    with pytest.raises(LedgerError, match="of another run .* than the checkpoint"):
        read_ledger(other, checkpoint=mark)
    with pytest.raises(LedgerError, match="of another run"):
        LedgerFile(other, contains=mark)


def sealed_file(path, *records, tail=b""):
    """Writes records with right hashes; bytes are taken as the record's body."""
    chain, lines = Chain(), []
    for record in records:
        if isinstance(record, bytes):
            body = record[:-1]
            line = body + b',"hash":"' + chain.sha256(body).encode() + b'"}\n'
        else:
            line = chain.line(record)
        lines.append(line)
        chain.add(line)
    path.write_bytes(b"".join(lines) + tail)


FIRST = header("ab" * 16, epsilon=1.0, delta=DELTA, is_seeded=False)
STEP = {"step": flat_step().to_dict()}
MANY = {"step": jde.GaussianStep(flat_step().design, noise_multiplier=[1.0, 2.0])}


@pytest.mark.parametrize(
    ("records", "tail", "reason"),
    [
        ([{**FIRST, "format": "else"}], b"", "no ledger: format must be"),
        ([{**FIRST, "version": 2}], b"", "version must be 1, got 2"),
        ([{**FIRST, "version": True}], b"", "version must be 1, got True"),
        ([{**FIRST, "more": 1}], b"", "the keys must be"),
        ([{**FIRST, "epsilon": 10**400}], b"", "epsilon must be > 0"),
        ([{**FIRST, "epsilon": -1.0}], b"", "epsilon must be > 0"),
        ([{**FIRST, "delta": 1.0}], b"", "delta must lie in"),
        ([{**FIRST, "run": 3}], b"", "run must be a string"),
        ([{**FIRST, "book": 3}], b"", "book must be a name"),
        ([{**FIRST, "search": []}], b"", "search must be a name"),
        ([FIRST], CHARGE, "a charge before any step"),
        ([FIRST, {"step": {"type": "os.system"}}], b"", "missing key 'version'"),
        ([FIRST, {"step": MANY["step"].to_dict()}], b"", "one setting"),
        ([FIRST, STEP, {"charged": 7}], b"", "7 steps were charged, the lines before"),
        ([FIRST, STEP, {"charged": 0.0}], b"", "0.0 steps were charged"),
        ([FIRST, STEP, {"refund": 1}], b"", "unknown kind: .'refund'"),
        ([FIRST, STEP, {"opened": 3, "charged": 0}], b"", "opened must be a table"),
        ([b'{"a":NaN}'], b"", "NaN is no JSON number"),
        ([b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"], b"", "nested too deeply"),
        ([b'{"a":' + b"9" * 10**5 + b"}"], b"", "not valid JSON"),
        ([FIRST, STEP], b"1\n{x\n", "neither a charge nor a record"),
    ],
    ids=range(21),
)
def test_an_untrusted_file_is_refused_with_the_reason(path, records, tail, reason):
    sealed_file(path, *records, tail=tail)
    with pytest.raises(LedgerError, match=reason):
        read_ledger(path)


def test_descriptions_take_bounded_memory(path, monkeypatch):
    monkeypatch.setattr(
        "jaxdp_episodic.accountant.report.ledger_file.MOST_DESCRIBED", 5_000
    )
    sealed_file(path, FIRST, *[STEP] * 3)
    assert len(read_ledger(path).groups) == 3
    sealed_file(path, FIRST, *[STEP] * 30)
    with pytest.raises(LedgerError, match="more than 5,000 bytes of descriptions"):
        read_ledger(path)
    path.write_bytes(b"{" * 6_000)
    with pytest.raises(LedgerError, match="longer than 5,000 bytes"):
        read_ledger(path)


# --- Write-ahead, and what a disk can do ---


def test_one_process_at_a_time(path):
    with LedgerFile(path) as ledger:
        with pytest.raises(BlockingIOError, match="another process charges to it"):
            LedgerFile(path)
        ledger.charge()
    assert charged_in(path, 1).charged == 2


def test_a_charge_is_on_the_disk_when_it_returns(path, monkeypatch):
    synced = []
    sync = os.fsync

    def noted(descriptor):
        sync(descriptor)
        synced.append(path.read_bytes().count(CHARGE))

    with LedgerFile(path) as ledger:
        monkeypatch.setattr(os, "fsync", noted)
        for number in (1, 2, 3):
            ledger.charge()
            assert synced[-1] == number == ledger.charged


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_charges_one_step_at_most(path, monkeypatch, call, written):
    """Whatever part of the charge is there, no step was released without one."""
    count = Ledger(budget())
    real = getattr(os, call)

    def full(descriptor, data=b""):
        if call == "write":
            real(descriptor, bytes(data)[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with LedgerFile(path) as file, count.writing_to(file, HERE):
        assert [count.charge() for _ in range(3)] == [1, 2, 3]
        monkeypatch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            count.charge()
        monkeypatch.undo()
        with pytest.raises(OSError, match="an earlier write failed"):
            count.charge()
    assert count.charged == 3
    there = read_ledger(path).charged
    assert there == 3 + (call == "fsync" or written > 0)
    with LedgerFile(path) as file, count.writing_to(file, HERE):
        assert count.charged == file.charged == there
        count.charge()
    assert read_ledger(path).charged == there + 1


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_an_interrupted_charge_is_finished(path, monkeypatch, call, written):
    """Nothing failed: the run ends in order, its ledger closed and sealed."""
    count = Ledger(budget())
    real, interrupts = getattr(os, call), []

    def interrupted(descriptor, *data):
        if interrupts:
            return real(descriptor, *data)
        interrupts.append(1)
        if call == "write":
            real(descriptor, bytes(data[0])[:written])
        raise KeyboardInterrupt

    with LedgerFile(path) as file, count.writing_to(file, HERE):
        assert count.charge() == 1
        monkeypatch.setattr(os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            count.charge()
    content = read_ledger(path)
    assert content.is_sealed and content.charged == 2
    # The step was not taken: it is taken now, charged already.
    with LedgerFile(path) as file, count.writing_to(file, HERE):
        assert count.charged == 2
        assert count.charge() == 3


def test_an_interrupt_while_a_charge_is_counted_leaves_a_true_mark(path, monkeypatch):
    """It goes into a checkpoint, which else could never be resumed."""
    add = Chain.add

    def interrupted(chain, data):
        add(chain, data)
        raise KeyboardInterrupt

    with LedgerFile(path) as file:
        file.charge()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Chain, "add", interrupted)
            file.charge()
        mark = file.mark
    assert read_ledger(path, checkpoint=mark).charged == 2


def test_a_record_cut_off_by_a_crash_is_dropped(path):
    charged_in(path, 2)
    with open(path, "ab") as file:
        file.write(b'1\n{"charged":3,"ha')
    content = read_ledger(path)
    assert content.charged == 3 and not content.is_sealed
    with LedgerFile(path) as ledger:
        assert ledger.charged == 3
        ledger.charge()
    assert read_ledger(path).charged == 4 and read_ledger(path).is_sealed


@pytest.mark.parametrize("how", ["removed", "replaced", "longer", "shorter"])
def test_nobody_else_touches_it_meanwhile(path, how):
    with LedgerFile(path) as ledger:
        ledger.charge()
        text = path.read_bytes()
        if how in ("removed", "replaced"):
            path.unlink()
        if how == "replaced":
            path.write_bytes(text)
        elif how == "longer":
            path.write_bytes(text + CHARGE)
        elif how == "shorter":
            os.truncate(path, len(text) - len(CHARGE))
        error = LedgerError if how in ("longer", "shorter") else FileNotFoundError
        with pytest.raises(error, match="while the run used it"):
            ledger.charge()
        assert ledger.charged == 1


def test_a_ledger_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        create_ledger(tmp_path / "ledger.jsonl", budget(), is_seeded=False)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_no_reader_would_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxdp_episodic.trainer.run.ledger.MOST_DESCRIBED", 100)
    with pytest.raises(ValueError, match="public bounds of the sizes"):
        create_ledger(tmp_path / "ledger.jsonl", budget(), is_seeded=False)


# --- The count of a run, and its file ---


def test_the_file_is_charged_what_only_the_run_knows(path):
    count = Ledger(budget(), charged=4)
    with LedgerFile(path) as file, count.writing_to(file, HERE):
        assert file.charged == 4
        count.charge()
    count.charge()  # outside: in memory only
    assert read_ledger(path).charged == 5
    with LedgerFile(path, contains=count.mark) as file, count.writing_to(file, HERE):
        assert file.charged == count.charged == 6


def test_the_file_may_not_know_more_than_the_run(path):
    charged_in(path, 3)
    with (
        LedgerFile(path) as file,
        pytest.raises(FileExistsError, match="3 steps are charged .* at step 2"),
        Ledger(budget(), charged=2).writing_to(file, HERE),
    ):
        pass


def test_other_steps_are_refused(path):
    other = Ledger(budget(flat_step(noise_multiplier=1.1)))
    with (
        LedgerFile(path) as file,
        pytest.raises(LedgerError, match="charges other steps"),
        other.writing_to(file, HERE),
    ):
        pass


def test_the_budget_is_kept_in_the_file(path):
    count = Ledger(budget(permitted=2))
    with LedgerFile(path) as file, count.writing_to(file, HERE):
        count.charge(), count.charge()
        with pytest.raises(BudgetExhaustedError):
            count.charge()
    assert read_ledger(path).charged == 2


@pytest.mark.slow
def test_every_step_of_a_run_is_charged_before_it_is_drawn(tmp_path):
    """The ledger on the disk, read at the moment when the gradient is asked for."""
    run, seen = plain_trainer(), []
    gradient, path = run._gradient, tmp_path / run_files.LEDGER

    class Watched:
        def __call__(self, *args, **kwargs):
            seen.append((read_ledger(path).charged, run.num_steps_taken))
            return gradient(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(gradient, name)

    run._gradient = Watched()
    run.train(tmp_path)
    assert seen == [(number, number - 1) for number in range(1, 7)]
    content = read_ledger(path)
    assert content.is_sealed and content.groups == ((run.budget.step, 6),)
    with Checkpoints(tmp_path / run_files.CHECKPOINTS) as checkpoints:
        mark = checkpoints.restore(run.state, run.run).ledger
    assert mark is not None and mark.charged == 6
    read_ledger(path, checkpoint=mark)


def stopped_at(folder, number):
    """A run whose process ended after that many steps, its checkpoint older."""

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == number:
            raise Stop

    run = plain_trainer()
    with pytest.raises(Stop):
        run.train(folder, on_step=stop, checkpoint_every=2)


def test_resume_charges_no_step_twice_and_forgets_none(tmp_path):
    stopped_at(tmp_path, 5)
    run = plain_trainer()
    assert run.resume(tmp_path) == 5
    assert (run.num_steps_taken, run.num_steps_charged) == (5, 5)
    run.train(tmp_path)
    assert read_ledger(tmp_path / run_files.LEDGER).charged == 6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (lambda path, older: path.unlink(), FileNotFoundError, "ledger.* is gone"),
        (lambda path, older: path.write_bytes(older), LedgerError, "rolled back"),
        (
            lambda path, older: path.write_bytes(
                path.read_bytes().replace(CHARGE, b"", 1)
            ),
            LedgerError,
            "it was edited|taken away",
        ),
        (
            lambda path, older: create_ledger(path, budget(), is_seeded=False),
            LedgerError,
            "another run",
        ),
    ],
    ids=["removed", "older", "edited", "another run's"],
)
def test_a_run_does_not_go_on_with_a_wrong_ledger(tmp_path, damage, error, reason):
    path = tmp_path / run_files.LEDGER
    stopped_at(tmp_path, 1)
    older = path.read_bytes()
    again = plain_trainer()
    again.resume(tmp_path)
    again.train(tmp_path)
    damage(path, older)
    run = plain_trainer()
    with pytest.raises(error, match=reason):
        run.resume(tmp_path)
    assert run.num_steps_charged == 0
    with pytest.raises(error if error is LedgerError else OSError):
        again.train(tmp_path)  # nor does the trainer that was there


def test_a_checkpoint_without_a_ledger_is_refused(tmp_path):
    run = plain_trainer()
    with Checkpoints(tmp_path / run_files.CHECKPOINTS) as checkpoints:
        checkpoints.save(run.snapshot())
    with pytest.raises(LedgerError, match="made without a ledger"):
        plain_trainer().resume(tmp_path)


# --- Epsilon from the file alone ---


@pytest.fixture
def epsilon_of(capsys):
    def run(path, *options):
        code = cli.run(["epsilon", "--ledger", str(path), *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize("method", [None, "exact", "rdp", "pld"])
def test_epsilon_is_that_of_what_was_charged(path, epsilon_of, method):
    charged_in(path, 37)
    options = () if method is None else ("--method", method)
    code, out, err = epsilon_of(path, "--json", *options)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    how = method or "exact"
    expected = jde.epsilon(flat_step(), num_steps=37, delta=DELTA, method=how)
    assert answer["epsilon"] == expected
    assert (answer["num_steps"], answer["delta"], answer["method"]) == (37, DELTA, how)
    early, plan = answer["warnings"]  # the target permits 50
    assert f"planned was 8 at delta {DELTA:g}" in early and "owes its plan" in plan


def test_another_delta_and_what_the_number_does_not_show(tmp_path, epsilon_of):
    data = classes()
    step = grouped_step(data)
    path = tmp_path / "ledger.jsonl"
    create_ledger(path, budget(step), is_seeded=True)
    charged_in(path, 5)
    with open(path, "ab") as file:
        file.write(b"1")  # killed in the middle of a charge
    code, out, _ = epsilon_of(path, "--delta", "1e-3", "--json", "--method", "rdp")
    answer = json.loads(out)
    expected = jde.epsilon(step, num_steps=6, delta=1e-3, method="rdp")
    assert code == 0 and answer["epsilon"] == expected
    assert [text.split(":")[0] for text in answer["warnings"]] == [
        "not private",
        "the ledger does not end with a seal",
    ]
    code, out, _ = epsilon_of(path, "--method", "rdp")
    assert code == 0 and "warning: not private" in out and "num steps" in out


def test_different_steps_are_composed(path, epsilon_of):
    other = jde.GaussianStep(flat_step().design, noise_multiplier=2.0)
    sealed_file(path, FIRST, STEP, tail=3 * CHARGE)
    chain, text = Chain(), path.read_bytes()
    chain.add(text)
    path.write_bytes(text + chain.line({"step": other.to_dict()}) + 4 * CHARGE)
    assert read_ledger(path).groups == ((flat_step(), 3), (other, 4))
    _, out, _ = epsilon_of(path, "--json", "--method", "rdp")
    run = jde.compose((flat_step(), 3), (other, 4))
    assert json.loads(out)["epsilon"] == jde.epsilon(run, delta=DELTA, method="rdp")


def test_wrong_ledgers_and_options_are_one_line(path, epsilon_of):
    charged_in(path, 2)
    for options in (["--num-steps", "3"], ["--per-unit", "--out", "x.csv"]):
        code, out, err = epsilon_of(path, *options)
        assert code == 2 and "--ledger" in err and err.count("\n") == 1
    path.write_bytes(path.read_bytes().replace(CHARGE, b"", 1))
    code, out, err = epsilon_of(path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "taken away" in err
    code, _, err = epsilon_of(path.with_name("none"))
    assert code == 2 and "No such file" in err


def test_marks_compare_by_value():
    assert LedgerMark("a", 1, 2, "b") == LedgerMark(*["a", 1, 2, "b"])
