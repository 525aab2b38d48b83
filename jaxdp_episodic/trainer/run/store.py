"""The file of a run while a process trains it; `run.ledger_file` has its format.

Whatever ends the process, and whenever, this holds:

    released steps <= charged steps <= released steps + one per crash

A step goes through three commits, each on the disk before the next thing happens:

* charge: before the step's gradient, statistic or score is computed. A planned run
  makes the draw and the noise of a step ahead, in memory, for this step alone.
* release: the noised result, before the optimizer, the user or another process has it.
* state: what follows from the releases, in one commit that deletes them.

One file holds all, so no part of it can be older than another. A resumed run applies
the releases that its state does not contain, which is post-processing. A step that was
charged and not released is given up: to repeat it would be another release, with other
noise.

No draw and no noise is written, with two exceptions, without which a run cannot go on:
who takes part in which step of the running epoch (random allocation, shuffling), and
the random groups of correlated noise. They are overwritten once they are not needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.files.atomic import atomic_path, owner_only
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.sqlite_file import connect
from jaxdp_episodic.trainer.run.ledger_file import (
    CLOSED,
    ENDED,
    FACTS,
    LOG,
    MOST_DESCRIBED,
    OPENING,
    STATE,
    STEP,
    Charges,
    LedgerError,
    RunFile,
    Texts,
    as_json,
    described,
    facts_text,
    next_hash,
    refusing,
    text_hash,
    write_rows,
)

RELEASE = "release"
EPOCH = "epoch"
GROUPS = "groups"
_SECRET = (EPOCH, GROUPS)
BEST = "best"
_ARRAYS = {STATE, RELEASE, BEST, *_SECRET}
MOST_BYTES = 2**28
"""Bytes of releases above which a state is due, so that they are taken out."""

_PART = 2**28  # bytes of an array in one row: SQLite has at most 10^9 in one
# Bytes before a secret in its row. What follows more than a page lies on pages of its
# own, which are overwritten as a whole; rows are copied when a page is split.
_PADDING = 2**13
_SECONDS_TO_WAIT = 60  # for a process that reads the file
_PAGES_A_CHECKPOINT = 2**14  # of 4 KiB in the write-ahead log: 64 MiB
_SIDE_FILES = ("-wal", "-shm", "-journal")
# File systems of several machines, on which a write-ahead log has no shared memory.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p"}
_MOUNTS = Path("/proc/self/mounts")


class Mark(NamedTuple):
    """A run's file after one of its charges."""

    run: str  # the run's random name
    charged: int
    hash: bytes  # of that charge, chained to all charges before it


class Saved(NamedTuple):
    """The saved state of a run."""

    taken: int  # completed steps: released ones, and those given up
    run: Mapping[str, Any]  # what the run is; see `described_run`
    kinds: Mapping[str, str]  # types and shapes of the arrays, by their paths
    arrays: list[np.ndarray]
    last_release: int  # number of the last released step; 0 if there is none


class RunStore(RunFile):
    """The file of a run, open in the one process that holds the run's folder."""

    def __init__(self, path: Path) -> None:
        self._is_in_doubt = False
        self._log = path.with_name(path.name + "-wal")
        super().__init__(path)
        if self.lacks_log and self.unclosed:
            self._db.close()
            raise LedgerError(
                f"{path} lacks its write-ahead log, {self._log.name}: it was copied "
                "without it while a process trained, or the log was deleted, so "
                "charges may be missing. Copy both files, or begin another run. If an "
                "SQLite program has merged the log into the file, say so by: sqlite3 "
                f"{path.name} 'PRAGMA journal_mode=DELETE'"
            )
        self._files = {path: _identity(path)}
        self.session, self._opening, self._begun = secrets.token_hex(16), 0, 0
        self._pending: list[Mapping[str, Any]] = []
        self._kinds = {kind[0]: place for place, kind in self.steps.items()}
        self._bytes = 0  # of the releases since the last state
        state = self._state() or {"taken": -1, "kinds": {}}
        self._taken, self._state_kinds = state["taken"], state["kinds"]

    def _connected(self) -> sqlite3.Connection:
        db = connect(self.path, "rw")
        db.execute(f"PRAGMA busy_timeout = {1000 * _SECONDS_TO_WAIT}")
        if is_on_network(self.path):
            db.execute("PRAGMA journal_mode = DELETE")
        # commits are on the disk, file names too
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute(f"PRAGMA wal_autocheckpoint = {_PAGES_A_CHECKPOINT}")
        db.execute("PRAGMA secure_delete = OFF")  # except for secrets: see `forget`
        return db

    @contextmanager
    def _commit(self) -> Iterator[sqlite3.Connection]:
        """A transaction: its body is on the disk when it ends, or not at all."""
        if self._is_in_doubt:
            raise OSError(
                f"{self.path}: an earlier write failed, what is on the disk is not "
                "known; open it again"
            )
        self._refuse_replaced()
        written = 0
        with refusing(self.path):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    for record in self._pending:
                        value = json.dumps(plain(record), allow_nan=False)
                        self._text(LOG, str(record.get("step", 0)), value)
                    written = len(self._pending)
                    yield self._db
                    self._db.execute("COMMIT")
                except sqlite3.Error:
                    # A repeated fsync may succeed although the data were never written.
                    self._is_in_doubt = True
                    raise
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                else:  # committed, also if an interrupt came right after
                    del self._pending[:written]

    def _refuse_replaced(self) -> None:
        """Refuses to write if the file or its log is not the one that was opened."""
        for path, opened in self._files.items():
            if _identity(path) == opened:
                continue
            message = f"{path} was removed or replaced while the run used it"
            if path == self._log:  # SQLite still holds the removed one
                self._empty_log()
                message += ": resume the run"
            raise FileNotFoundError(message)

    def _text(self, kind: str, key: str, value: str) -> int:
        row = self._db.execute(
            "INSERT INTO texts (kind, key, value, hash) VALUES (?, ?, ?, ?)",
            (kind, key, value, text_hash(kind, key, value)),
        )
        return int(row.lastrowid or 0)

    def _row(self, query: str, *values: Any) -> Any:
        """The first row of a query, or None."""
        with refusing(self.path):
            return self._db.execute(query, values).fetchone()

    # --- Charges ----------------------------------------------------------------------

    @property
    def mark(self) -> Mark:
        """The file's last charge."""
        query = "SELECT number, hash FROM charges ORDER BY number DESC LIMIT 1"
        number, last = self._row(query) or (0, self.start)
        return Mark(self.facts["run"], number, last)

    def session_of(self, number: int) -> str:
        """Returns the random name of the process that charged a step."""
        query = "SELECT key FROM texts WHERE id = (SELECT session FROM charges WHERE "
        return self._row(query + "number = ?)", number)[0]

    def contains(self, mark: Mark) -> bool:
        """Returns whether the file has a mark's charge, after the same charges."""
        found = self._row("SELECT hash FROM charges WHERE number = ?", mark.charged)
        own = found[0] if found else self.start if mark.charged == 0 else None
        return mark.run == self.facts["run"] and own == mark.hash

    def begin_session(self, environment: Mapping[str, Any]) -> None:
        """Records that this process begins, and where, under a random name."""
        value = json.dumps({**environment, "charged": self.mark.charged})
        with self._readers_wait():
            if not is_on_network(self.path):
                # No other mode: the file system has no shared memory.
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("SELECT 1 FROM charges").fetchone()  # makes the log
            self._files[self._log] = _identity(self._log)
            with self._commit() as db:
                # A flipped bit of the index hides rows, or lets REINDEX free others.
                (found,) = db.execute("PRAGMA quick_check").fetchone()
                if found != "ok":
                    raise self._damaged(found)
                db.execute("REINDEX arrays")
                self._opening = self._text(OPENING, self.session, value)
        # From here on charges go to the log. A copy of the file alone shows that.
        self._empty_log()

    @contextmanager
    def _readers_wait(self) -> Iterator[None]:
        """Says what to do about a process that has read the file for a long time."""
        try:
            with refusing(self.path):
                yield
        except BlockingIOError:
            raise BlockingIOError(
                f"{self.path} is in use by another process that reads it, such as a "
                f"report, and {self._log.name} may show who took part in an epoch that "
                "has ended: end that process and go on, or resume the run"
            ) from None

    def _empty_log(self) -> None:
        """Moves the write-ahead log, which may hold secrets, into the file."""
        with self._readers_wait():
            (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise BlockingIOError

    def charge(self, name: str, step: Any = None, number: int | None = None) -> None:
        """Charges one step; it is on the disk when this returns."""
        # The next charge, or that of an interrupted call, must be ``number``.
        with self._commit() as db:
            _, last, before = self.mark
            number = number or last + 1
            query = "SELECT step FROM charges WHERE number = ? AND session = ?"
            own = self._begun == number and self._row(query, number, self._opening)
            wanted = number if own else number - 1
            if last != wanted:
                raise LedgerError(
                    f"{self.path} was changed while the run used it: it has {last} "
                    f"charges instead of {wanted}"
                )
            self._begun, place = number, own[0] if own else self._kinds.get(name)
            if place is None:
                value = described(None if step is None else step.to_dict())
                place = self._text(STEP, name, value)
                self.steps[place] = name, value, text_hash(STEP, name, value)
            if not own:
                link = next_hash(before, number, self.steps[place][2], self.session)
                row = number, place, self._opening, link
                db.execute("INSERT INTO charges VALUES (?, ?, ?, ?)", row)
        self._kinds[name] = place

    def end(self) -> None:
        """Records that an adaptive run has chosen to end."""
        with self._commit():
            self._text(ENDED, "", "true")

    # --- Releases and states ----------------------------------------------------------

    def release(self, number: int, arrays: Sequence[Any]) -> None:
        """Commits the release of a charged step, once; only then may it be used."""
        query = "SELECT 1 FROM arrays WHERE kind = ? AND number = ?"
        with self._commit() as db:
            is_new = self._row(query, RELEASE, number) is None
            if not self._taken < number <= self.mark.charged or not is_new:
                raise LedgerError(
                    f"{self.path}: step {number} was not charged, or released before"
                )
            self._bytes += self._put(db, RELEASE, number, arrays)

    def releases(self, after: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yields number and arrays of the releases after a step, checked."""
        charged = self.mark.charged
        for number, arrays in self._found(RELEASE):
            if number > charged:
                raise LedgerError(
                    f"{self.path} has a release of step {number}, and {charged} steps "
                    "charged"
                )
            if number > after:
                yield number, arrays

    @property
    def is_full(self) -> bool:
        """Whether the releases since the last state are so large that one is due."""
        return self._bytes >= MOST_BYTES

    def save(
        self,
        taken: int,
        arrays: Sequence[Any],
        run: Mapping[str, Any],
        kinds: Mapping[str, str],
        last_release: int,
    ) -> None:
        """Commits the state after ``taken`` steps, and deletes the releases in it."""
        # ``last_release`` is the number of the last released step; 0: there is none.
        if taken == self._taken and kinds == self._state_kinds:
            if self._pending:
                with self._commit():
                    pass
            return
        mark = self.mark
        value = {"taken": taken, "charged": mark.charged, "mark": mark.hash.hex()}
        value |= {"run": run, "kinds": kinds, "arrays": len(arrays)}
        value["last_release"] = last_release
        with self._commit() as db:
            db.execute("DELETE FROM arrays WHERE kind = ?", (STATE,))
            db.execute("DELETE FROM texts WHERE kind = ?", (STATE,))
            self._put(db, STATE, taken, arrays)
            self._text(STATE, "", json.dumps(value))
            db.execute(
                "DELETE FROM arrays WHERE kind = ? AND number <= ?", (RELEASE, taken)
            )
        self._bytes, self._taken, self._state_kinds = 0, taken, dict(kinds)

    def _state(self) -> dict[str, Any] | None:
        with refusing(self.path):
            values = [value for _, _, value in self.texts(STATE)]
        return as_json(self.path, values[-1]) if values else None

    def saved(self) -> Saved | None:
        """Returns the saved state, if any, and checks that its charges are there."""
        found = self._state()
        if found is None:
            return None
        mark = Mark(self.facts["run"], found["charged"], bytes.fromhex(found["mark"]))
        if not self.contains(mark):
            raise LedgerError(
                f"{self.path}: charges that its state contains are missing or changed"
            )
        taken = found["taken"]
        arrays = dict(self._found(STATE)).get(taken, [])
        if len(arrays) != found["arrays"]:
            raise LedgerError(f"{self.path} is damaged: its state lacks arrays")
        last = found.get("last_release", taken)  # earlier versions did not write it
        return Saved(taken, found["run"], found["kinds"], arrays, last)

    # --- Secrets, best parameters, log ------------------------------------------------

    def keep(self, kind: str, number: int, arrays: Sequence[Any]) -> None:
        """Writes arrays in place of those of the same kind."""
        if kind in _SECRET:
            self.forget(kind)
        with self._commit() as db:
            db.execute("DELETE FROM arrays WHERE kind = ?", (kind,))
            self._put(db, kind, number, arrays)

    def kept(self, kind: str) -> tuple[int, list[np.ndarray]] | None:
        """Returns the number and the arrays of a kind; None if there are none."""
        return next(self._found(kind), None)

    def forget(self, kind: str) -> None:
        """Overwrites the arrays of a kind, in the write-ahead log too."""
        if self._row("SELECT 1 FROM arrays WHERE kind = ? LIMIT 1", kind) is not None:
            self._db.execute("PRAGMA secure_delete = ON")
            try:
                with self._commit() as db:
                    db.execute("DELETE FROM arrays WHERE kind = ?", (kind,))
            finally:
                self._db.execute("PRAGMA secure_delete = OFF")
        self._empty_log()  # also if it could not be emptied before

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the log; it is written with the next commit."""
        self._pending.append(record)

    def drop_log(self, after: int) -> None:
        """Deletes log records of later steps, which were not released."""
        later = "DELETE FROM texts WHERE kind = ? AND CAST(key AS INTEGER) > ?"
        with self._commit() as db:
            db.execute(later, (LOG, after))

    def _put(
        self, db: sqlite3.Connection, kind: str, number: int, arrays: Sequence[Any]
    ) -> int:
        """Writes arrays in parts; returns their bytes."""
        size = 0
        for place, one in enumerate(arrays):
            array = np.ascontiguousarray(one)
            raw = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, "u1")
            if kind in _SECRET:
                raw = np.concatenate([np.zeros(_PADDING, np.uint8), raw])
            count = max(-(-raw.size // _PART), 1)
            head = json.dumps([array.dtype.name, np.shape(one), count, len(arrays)])
            for part in range(count):
                data = raw[part * _PART : (part + 1) * _PART].data
                where = kind, number, place, part, head
                db.execute(
                    "INSERT INTO arrays (kind, number, place, part, head, data, hash) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*where, data, _array_hash(*where, data)),
                )
            size += raw.size
        return size

    def _found(self, kind: str) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yields numbers and arrays of a kind; every bit must be what was written."""
        # The index has no hashes, and is made anew when a process begins.
        kinds = "SELECT DISTINCT kind FROM arrays NOT INDEXED"
        query = (
            "SELECT number, place, part, head, data, hash FROM arrays NOT INDEXED "
            "WHERE kind = ? ORDER BY id"
        )
        damaged = LedgerError(f"{self.path} is damaged: an array of {kind} has changed")
        with refusing(self.path):
            if not {name for (name,) in self._db.execute(kinds)} <= _ARRAYS:
                raise damaged
            rows = self._db.execute(query, (kind,))
            for number, own in groupby(rows, key=itemgetter(0)):
                arrays, parts, wanted = list[np.ndarray](), list[bytes](), 0
                for _, place, part, head, data, digest in own:
                    is_next = place == len(arrays) and part == len(parts)
                    found = _array_hash(kind, number, place, part, head, data)
                    if not is_next or found != digest:
                        raise damaged
                    name, shape, count, wanted = json.loads(head)
                    parts.append(data)
                    if len(parts) == count:
                        whole = parts[0] if count == 1 else b"".join(parts)
                        start = _PADDING if kind in _SECRET else 0
                        array = np.frombuffer(whole, np.dtype(name), offset=start)
                        arrays.append(array.reshape(shape))
                        parts = []
                if parts or len(arrays) != wanted:
                    raise damaged
                yield number, arrays

    def close(self) -> None:
        """Records an orderly end, if possible, and merges the log into the file."""
        try:
            # On a full disk, say: the charges are safe.
            with suppress(OSError, ValueError), refusing(self.path):
                ended = [] if self._is_in_doubt else self.unclosed
                if ended or self._pending:
                    with self._commit():
                        for session in ended:
                            own = json.dumps(session == self.session)
                            self._text(CLOSED, session, own)
        finally:  # after an interrupt too: SQLite would remove the log all the same
            with suppress(sqlite3.Error):  # another process reads it
                self._db.execute("PRAGMA busy_timeout = 1000")
                self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _array_hash(
    kind: str, number: int, place: int, part: int, head: str, data: Any
) -> bytes:
    digest = hashlib.sha256(f"{kind} {number} {place} {part} {head} ".encode())
    digest.update(data)
    return digest.digest()


def create_store(
    path: Path,
    budget: PrivacyBudget | AdaptiveBudget,
    *,
    is_seeded: bool,
    run: str | None = None,
    book: str | None = None,
    search: str | None = None,
) -> str:
    """Writes the file of a new run, and returns the run's random name.

    A file at ``path`` is replaced: the caller has checked that it has no charges.
    """
    run = run or secrets.token_hex(16)
    adapts = isinstance(budget, AdaptiveBudget)
    facts = facts_text(
        run,
        epsilon=budget.epsilon,
        delta=budget.delta,
        is_seeded=is_seeded,
        planned=budget.planned,
        book=book,
        search=search,
        adaptive=budget.to_dict() if adapts else None,
    )
    texts = [(FACTS, "", facts)]
    if not adapts:
        texts.append((STEP, "phase 1", described(budget.phases[0][0].to_dict())))
    new_store(path, texts)
    return run


def new_store(path: Path, texts: Texts, charges: Charges = ()) -> None:
    """Writes a run's file with these rows; see `create_store`."""
    most = max(len(value) for _, _, value in texts)
    if most > MOST_DESCRIBED // 2:
        raise ValueError(
            f"the run's file cannot describe the step: {most:,} bytes, mostly its "
            f"population, of at most {MOST_DESCRIBED // 2:,}; state public bounds of "
            "the sizes in the sampling instead"
        )
    # Side files of a file that was deleted must not be taken for the new one's.
    for name in ("", *_SIDE_FILES):
        path.with_name(path.name + name).unlink(missing_ok=True)
    with atomic_path(path) as temporary:
        os.close(owner_only(str(temporary), os.O_RDWR | os.O_CREAT | os.O_EXCL))
        with refusing(path), closing(connect(temporary, "rw")) as db:
            db.execute("PRAGMA journal_mode = MEMORY")  # nobody has seen the file
            db.execute("BEGIN")
            write_rows(db, texts, charges)
            db.execute("COMMIT")


def is_on_network(path: Path) -> bool:
    """Returns whether a file is on a known file system of several machines."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    place, best = path.resolve(), (-1, "")
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if place.is_relative_to(point):
            best = max(best, (len(point), kind))
    kind = best[1]
    return kind in _NETWORK or (kind.startswith("fuse.") and "sshfs" in kind)
