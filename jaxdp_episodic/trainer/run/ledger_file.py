"""The file of a run: its format, and how charges are read and checked.

``run.sqlite`` is an SQLite database of three tables, written by one process:

* ``texts``: one row each for the facts of the run (``facts``), each kind of step
  (``step``), each process that opened the run (``opening``) and closed it (``closed``;
  false: a later process did), the saved state (``state``), the chosen end (``ended``),
  and each record of the log (``log``). Values are JSON; a row has the hash of its text.
* ``charges``: one row for each charged step, on disk before the step runs. Its hash
  covers the hash before it, its number, the text of its step and the random name of the
  process; the first one follows the hash of the facts.
* ``arrays``: releases of steps, the saved state, the best steps, the assignments of the
  current epoch; each array in parts, each with a hash.

The file alone cannot show that it was replaced by an older copy, and no key protects
it. It is not trusted: nothing in it is executed, other tables are refused, and the
memory of a reader is bounded.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from jaxdp_episodic._validation import shown
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    steps_owed,
)
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.files import sqlite_file
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.json_file import parse_json

T = TypeVar("T")
Texts = Sequence[tuple[str, str, str]]
"""Kind, key and value of rows of ``texts``."""
Charges = Iterable[tuple[int, int, int, bytes]]
"""Rows of ``charges``."""
STORE = "run.sqlite"
FORMAT = "jaxdp-episodic run"
VERSION = 1
MOST_DESCRIBED = 2**26
"""Largest size in bytes of all descriptions: tens of millions of units."""

# Kinds of texts.
FACTS = "facts"
STEP = "step"
OPENING = "opening"
CLOSED = "closed"
STATE = "state"
ENDED = "ended"
LOG = "log"
_KINDS = {FACTS, STEP, OPENING, CLOSED, STATE, ENDED, LOG, "whole"}  # of 1.0
TABLES = {
    "texts": "CREATE TABLE texts (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, "
    "key TEXT NOT NULL, value TEXT NOT NULL, hash BLOB NOT NULL)",
    "charges": "CREATE TABLE charges (number INTEGER PRIMARY KEY, "
    "step INTEGER NOT NULL, session INTEGER NOT NULL, hash BLOB NOT NULL)",
    "arrays": "CREATE TABLE arrays (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, "
    "number INTEGER NOT NULL, place INTEGER NOT NULL, part INTEGER NOT NULL, "
    "head TEXT NOT NULL, data BLOB NOT NULL, hash BLOB NOT NULL, "
    "UNIQUE (kind, number, place, part))",
}
_INDEX = "sqlite_autoindex_arrays_1"
_HEADER_KEYS = {"format", "version", "run", "epsilon", "delta", "seeded"}
_MORE_KEYS = {"planned", "book", "search", "adaptive"}
OLD_LEDGER = "ledger.jsonl"
_OLD_FORMAT = "jaxdp-episodic ledger"
_CHARGE = b"1\n"
# Bytes of the hash at the end of a line: the key, 64 digits and closing characters.
_HASH_BYTES = 76


class LedgerError(ValueError):
    """A run's file that is damaged, edited, or of another run."""


class Charge(NamedTuple):
    """One charged step."""

    number: int  # from 1
    step: int  # key of its kind in `RunFile.steps`
    session: str  # random name of the process; "" in old ledgers
    hash: bytes  # of this charge and all earlier ones


refusing = partial(sqlite_file.refusing, damaged=LedgerError)


def text_hash(kind: str, key: str, value: str) -> bytes:
    """Returns the hash of a row of ``texts``."""
    return hashlib.sha256("\0".join((kind, key, value)).encode()).digest()


def next_hash(before: bytes, number: int, step: bytes, session: str) -> bytes:
    """Returns the hash of a charge; ``step`` is the hash of the step's text."""
    link = before + number.to_bytes(8, "little") + step + session.encode()
    return hashlib.sha256(link).digest()


def described(step: Mapping[str, Any] | None) -> str:
    """Returns the JSON text of a step; "null" in adaptive runs."""
    return json.dumps(step, sort_keys=True)


def facts_text(
    run: str, *, epsilon: float, delta: float, is_seeded: bool, **more: Any
) -> str:
    """Returns the JSON text of the facts of a run; omits None."""
    known = {
        "format": FORMAT,
        "version": VERSION,
        "run": run,
        "epsilon": float(epsilon) if math.isfinite(epsilon) else "inf",
        "delta": delta,
        "seeded": is_seeded,
    }
    known |= {key: value for key, value in more.items() if value is not None}
    return json.dumps(known, allow_nan=False)


def _lacks_log(path: Path) -> bool:
    """Whether a file needs a write-ahead log that does not exist.

    It was copied without the log, or the log was deleted: charges may be missing.
    """
    log = path.with_name(path.name + "-wal")
    if log.exists():
        return False
    # Without locks SQLite does not open a file with such a log. Reading the file
    # directly would drop the locks of this process on it.
    with closing(sqlite_file.connect(path, "ro&nolock=1")) as db:
        try:
            db.execute("PRAGMA journal_mode")
        except sqlite3.Error as error:
            is_in_log = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN
            return is_in_log and not log.exists()
    return False


class RunFile:
    """The file of a run, open for reading and checked; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # By the name: closing a database drops all locks of this process on it.
        is_old = path.suffix == ".jsonl"
        try:
            check_plain_file(path)
            if not is_old:
                sqlite_file.refuse_lost_commits(path)
        except ValueError as error:
            raise LedgerError(str(error)) from None
        with refusing(path):
            self.lacks_log = not is_old and _lacks_log(path)
            if is_old:
                self._db = sqlite3.connect("")  # on disk if it grows
                write_rows(self._db, *old_rows(path))
            else:
                self._db = self._connected()
            try:
                self._check()
            except BaseException:
                self._db.close()
                raise

    def _connected(self) -> sqlite3.Connection:
        # A reader creates an empty log if there is none, unless the file is immutable.
        db = sqlite_file.connect(
            self.path, "ro&immutable=1" if self.lacks_log else "ro"
        )
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_DESCRIBED)
        try:
            db.execute("BEGIN")
            db.execute("SELECT 1 FROM sqlite_schema").fetchone()
            return db
        except sqlite3.OperationalError as error:
            db.close()
            # Only a writer can roll back a commit that a crash has interrupted.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
        db = sqlite_file.connect(self.path, "rw")
        db.execute("PRAGMA query_only = ON")
        db.execute("BEGIN")
        return db

    def _check(self) -> None:
        """Refuses files of other kinds, and damaged ones."""
        rows = self._db.execute("SELECT type, name, sql FROM sqlite_schema")
        wanted = {("table", name, sql) for name, sql in TABLES.items()}
        if set(rows) != {*wanted, ("index", _INDEX, None)}:
            raise LedgerError(f"{self.path} is not a run file of this library")
        for table in ("texts", "charges"):  # finds rows hidden from an index
            (found,) = self._db.execute(f"PRAGMA quick_check({table})").fetchone()
            if found != "ok":
                raise LedgerError(f"{self.path} is damaged: {found}")
        kinds = {kind for (kind,) in self._db.execute("SELECT kind FROM texts")}
        if not kinds <= _KINDS:  # a flipped bit would hide a state
            raise self._damaged("a text is of an unknown kind")
        facts = list(self.texts(FACTS))
        if len(facts) != 1:
            raise self._damaged(f"it must have the facts once, got {len(facts)} times")
        _, key, text = facts[0]
        self.start = text_hash(FACTS, key, text)
        self.facts = checked_facts(self.path, text)
        self.steps = {
            place: (name, value, text_hash(STEP, name, value))
            for place, name, value in self.texts(STEP)
        }

    def _damaged(self, what: str) -> LedgerError:
        return LedgerError(f"{self.path} was edited or damaged: {what}")

    def texts(self, kind: str) -> Iterator[tuple[int, str, str]]:
        """Yields row key, key and value of the texts of a kind, in order."""
        size = 0
        for place, key, value, digest in self._db.execute(
            "SELECT id, key, value, hash FROM texts WHERE kind = ? ORDER BY id", (kind,)
        ):
            if not isinstance(key, str) or not isinstance(value, str):
                raise self._damaged(f"{kind} is not a text")
            if text_hash(kind, key, value) != digest:
                raise self._damaged(f"{kind} {shown(key)} does not match its hash")
            size += len(value) if kind != LOG else 0
            if size > MOST_DESCRIBED:
                raise LedgerError(f"{self.path}: more than {MOST_DESCRIBED:,} bytes")
            yield place, key, value

    def charges(self) -> Iterator[Charge]:
        """Yields the charges in order, each checked."""
        sessions = {place: key for place, key, _ in self.texts(OPENING)}
        before, count = self.start, 0
        for number, step, session, digest in self._db.execute(
            "SELECT number, step, session, hash FROM charges ORDER BY number"
        ):
            count += 1
            if step not in self.steps or session not in sessions or number != count:
                raise self._damaged(f"charge {count} is missing, or of an unknown step")
            name = sessions[session]
            before = next_hash(before, number, self.steps[step][2], name)
            if before != digest:
                raise self._damaged(f"charge {count} or an earlier one was changed")
            yield Charge(number, step, name, before)

    def openings(self) -> list[dict[str, Any]]:
        """Returns what each process found: steps "charged" before, its environment."""
        found = [as_json(self.path, value) for _, _, value in self.texts(OPENING)]
        if not all(isinstance(one, dict) for one in found):
            raise self._damaged("an opening is not a table")
        return found

    @property
    def is_closed(self) -> bool:
        """Whether the last process closed the run in order."""
        closed = [value for _, _, value in self.texts(CLOSED)]
        return not self.lacks_log and not self.unclosed and closed[-1:] != ["false"]

    @property
    def unclosed(self) -> list[str]:
        """The last process, unless it or a later one merged its log into the file."""
        opened = [key for _, key, _ in self.texts(OPENING)]
        closed = {key for _, key, _ in self.texts(CLOSED)}
        return [key for key in opened[-1:] if key not in closed]

    def log(self) -> list[dict[str, Any]]:
        """Returns the records of the run's log."""
        with refusing(self.path):
            return [as_json(self.path, value) for _, _, value in self.texts(LOG)]

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_rows(db: sqlite3.Connection, texts: Texts, charges: Charges = ()) -> None:
    """Makes the tables of an empty database, and writes their rows."""
    for table in TABLES.values():
        db.execute(table)
    db.executemany(
        "INSERT INTO texts (kind, key, value, hash) VALUES (?, ?, ?, ?)",
        [(*text, text_hash(*text)) for text in texts],
    )
    db.executemany("INSERT INTO charges VALUES (?, ?, ?, ?)", charges)


# --- Ledgers of version 0.2: JSON lines with hashes, and a line ``1`` per charge ---


def old_rows(path: Path) -> tuple[Texts, Charges]:
    """Returns the texts and charges of an old ledger; the facts come first."""
    header: dict[str, Any] = {}
    texts, charged = [(FACTS, "", "")], list[tuple[int, int]]()
    places, shared = dict[str, int](), dict[Any, Any]()  # a tuple takes 56 bytes
    step, opening, record = 0, 0, None

    def opened(environment: dict[Any, Any]) -> int:
        name = str(environment.pop("process", ""))
        environment["charged"] = len(charged)
        texts.append((OPENING, name, json.dumps(environment)))
        return len(texts)

    for record in _old_records(path):
        if record is None:
            if not step:
                raise LedgerError(f"{path}: a charge precedes the first step")
            opening = opening or opened({})  # of a process that wrote none
            charged.append(shared.setdefault((step, opening), (step, opening)))
        elif not header:
            header = record
        elif record.get("charged", len(charged)) != len(charged):
            raise LedgerError(f"{path}: a count differs from the lines before it")
        elif "adaptive" in record:
            header["adaptive"] = record["adaptive"]
        elif "step" in record or "option" in record:
            name = str(record.get("option", f"phase {len(places) + 1}"))
            if name not in places:
                texts.append((STEP, name, described(record.get("step"))))
            step = places.setdefault(name, len(texts))
        elif "opened" in record:
            opening = opened(or_refused(path, dict, record["opened"]))
        elif "ended" in record:
            texts.append((ENDED, "", "true"))
    opening = opening or opened({})  # else it would seem to be closed
    if record is not None and record.keys() == {"charged"}:
        texts.append((CLOSED, texts[opening - 1][1], "true"))
    if (header.pop("format", 0), header.pop("version", 0)) != (_OLD_FORMAT, 1):
        raise LedgerError(f"{path} is not a ledger of a known version")
    try:
        header["epsilon"] = float(header["epsilon"])
        facts = facts_text(is_seeded=header.pop("seeded"), **header)
        texts[0] = FACTS, "", facts
        hashes = [text_hash(*text) for text in texts]
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"{path} is damaged: {error!r}") from None
    checked_facts(path, facts)

    def charges() -> Iterator[tuple[int, int, int, bytes]]:
        before = hashes[0]
        for number, (step, opening) in enumerate(charged, start=1):
            before = next_hash(before, number, hashes[step - 1], texts[opening - 1][1])
            yield number, step, opening, before

    return texts, charges()


def _old_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the records of an old ledger, each checked; None for a charge."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while line := file.readline(MOST_DESCRIBED + 1):
            if line == _CHARGE or (size and _CHARGE.startswith(line)):
                yield None
            elif not line.endswith(b"\n") and line.startswith(b"{") and size:
                yield {}  # interrupted by a crash
                return
            else:
                body, end = line[:-_HASH_BYTES], digest.copy()
                end.update(body)
                hashed = f',"hash":"{end.hexdigest()}"}}\n'.encode()
                if line[-_HASH_BYTES:] != hashed:
                    raise LedgerError(f"{path}: a line was changed or removed")
                size += len(line)
                if size > MOST_DESCRIBED:
                    raise LedgerError(f"{path}: more than {MOST_DESCRIBED:,} bytes")
                yield as_json(path, body + b"}")
            digest.update(line)


def run_file(path: Path) -> RunFile:
    """Opens the folder of a run, its file, or a ledger of version 0.2."""
    if path.is_dir():
        name = next((n for n in (STORE, OLD_LEDGER) if (path / n).exists()), None)
        if name is None and (path.parent / STORE).exists():
            raise LedgerError(f"{path} has no charges: give its run, {path.parent}")
        if name is None:
            raise FileNotFoundError(f"{path} has no {STORE}: give the folder of a run")
        path = path / name
    return RunFile(path)


# --- What the file says ---


class LedgerContent(NamedTuple):
    """The content of a run's file."""

    run: str  # its random name
    target_epsilon: float  # inf without privacy
    delta: float
    is_seeded: bool  # whether draws and noise have a known seed
    planned: int | None  # planned number of steps, with epoch schemes
    groups: tuple[tuple[GaussianStep, int], ...]  # steps and their charged counts
    is_closed: bool  # whether the last process ended in order
    adaptive: AdaptiveBudget | None = None  # budget of an adaptive run, without charges
    options: tuple[str, ...] = ()  # option of each group of an adaptive run
    has_ended: bool = False  # whether an adaptive run has chosen to end
    book: str | None = None  # name of the book that is charged for the run
    search: str | None = None  # name of the search that the run is part of

    def refuse_other_book(self, book: str | None) -> None:
        """Raises ValueError if the run is charged to a book other than this one."""
        if self.book not in (None, book):
            given = "none" if book is None else f"{book[:12]}…"
            raise ValueError(
                f"book must be {self.book[:12]}…, to which the ledger charges the run, "
                f"got {given}"
            )

    @property
    def a_step(self) -> GaussianStep:
        """One of the run's steps: all protect the same units."""
        return self.groups[-1][0] if self.adaptive is None else self.adaptive.a_step

    @property
    def choices(self) -> list[str]:
        """The charged options of an adaptive run, in order."""
        groups = zip(self.options, self.groups, strict=False)  # () for planned runs
        return [name for name, (_, count) in groups for _ in range(count)]

    @property
    def adaptive_taken(self) -> AdaptiveBudget | None:
        """The budget of an adaptive run after all charges; ValueError if exceeded."""
        budget = self.adaptive
        if budget is not None:
            for name in self.choices:
                budget = budget.charge(name)
        return budget

    @property
    def charged(self) -> int:
        """Number of charged steps."""
        return sum(count for _, count in self.groups)

    @property
    def owed(self) -> int:
        """Number of steps to be charged: an epoch that has begun counts as a whole."""
        return sum(count for _, count in self.groups_owed())

    def run_charged(self) -> tuple[GaussianStep | ComposedSteps, int | None]:
        """Returns ``(step, num_steps)`` to be charged, for the accountant."""
        groups = self.groups_owed()
        if len(groups) == 1:
            return groups[0]
        return compose(*groups), None

    def groups_owed(self) -> list[tuple[GaussianStep, int]]:
        """Returns the steps to be charged: whole epochs; if adaptive, the quotas."""
        # The file does not say why a run ended within an epoch.
        if self.adaptive is not None:
            fixed = self.adaptive.as_fixed()
            if fixed is None:
                raise NotImplementedError(
                    "only adaptive runs of quotas can be composed with others, except "
                    "in a book: use the ledger of this one by itself"
                )
            counts = map(int, fixed.counts)
            return list(zip(self.adaptive.options.values(), counts, strict=True))
        # The plan is for all groups: what the earlier ones leave is for the last one.
        left = (self.planned or 0) - sum(count for _, count in self.groups[:-1])
        planned = [0] * (len(self.groups) - 1) + [max(left, 0)]
        return [
            (step, int(steps_owed(step, count, number)))
            for (step, count), number in zip(self.groups, planned, strict=False)
        ]


def read_ledger(path: Path) -> LedgerContent:
    """Returns the content of a run's file after checking all charges."""
    with refusing(path), run_file(path) as run:
        return content_of(run)


def content_of(run: RunFile) -> LedgerContent:
    """Returns the content of an open run; see `read_ledger`."""
    facts, path, adaptive = run.facts, run.path, None
    if "adaptive" in facts:
        adaptive = or_refused(path, AdaptiveBudget.from_dict, facts["adaptive"])
    same = groupby(run.charges(), lambda charge: charge.step)
    counts = [(step, sum(1 for _ in charges)) for step, charges in same]
    if adaptive is None and not counts:
        if not run.steps:
            raise LedgerError(f"{path} is damaged: it describes no step")
        counts = [(next(iter(run.steps)), 0)]
    steps = {key: step_of(path, adaptive, *run.steps[key][:2]) for key, _ in counts}
    return LedgerContent(
        run=facts["run"],
        target_epsilon=float(facts["epsilon"]),
        delta=facts["delta"],
        is_seeded=facts["seeded"],
        planned=facts.get("planned"),
        book=facts.get("book"),
        search=facts.get("search"),
        groups=tuple((steps[key], count) for key, count in counts),
        is_closed=run.is_closed,
        adaptive=adaptive,
        options=tuple(run.steps[key][0] for key, _ in counts) if adaptive else (),
        has_ended=any(run.texts(ENDED)),
    )


def step_of(
    path: Path, adaptive: AdaptiveBudget | None, name: str, text: str
) -> GaussianStep:
    """Returns the step that a text describes; for adaptive runs the named option."""
    if adaptive is not None:
        return or_refused(path, adaptive.option, name)
    found = as_json(path, text, allow_infinity=True)  # for the horizon of bands
    step = or_refused(path, GaussianStep.from_dict, found, where="step")
    if step.shape:
        raise LedgerError(f"{path}: step must be one setting, got shape {step.shape}")
    return step


def checked_facts(path: Path, text: str) -> dict[str, Any]:
    """Returns the facts of a run; refuses other files and versions."""
    facts = as_json(path, text)
    if not isinstance(facts, Mapping) or facts.get("format") != FORMAT:
        raise LedgerError(f"{path} is not a run: format must be {FORMAT!r}")
    if facts.keys() - _MORE_KEYS - _HEADER_KEYS or _HEADER_KEYS - facts.keys():
        raise LedgerError(f"{path}: the keys must be {sorted(_HEADER_KEYS)}")
    epsilon, delta = facts["epsilon"], facts["delta"]
    version, planned = facts["version"], facts.get("planned", 1)
    fits = {
        f"version must be {VERSION}": type(version) is int and version == VERSION,
        "planned must be a number of steps": type(planned) is int and planned >= 1,
        "book must be a name": _is_name(facts.get("book", "")),
        "search must be a name": _is_name(facts.get("search", "")),
        "epsilon must be > 0 or 'inf'": epsilon == "inf"
        or (isinstance(epsilon, float) and epsilon > 0),
        "delta must lie in (0, 1)": isinstance(delta, float) and 0 < delta < 1,
        "run must be a name": _is_name(facts["run"]),
        "seeded must be true or false": isinstance(facts["seeded"], bool),
    }
    for words in (words for words, is_so in fits.items() if not is_so):
        got = shown(facts[words.split()[0]])
        raise LedgerError(f"{path}: {words}, got {got}")
    return dict(facts)


def _is_name(value: Any) -> bool:
    """Whether a value can be printed unchanged; files may be hostile."""
    return isinstance(value, str) and value.isprintable()


def as_json(path: Path, text: str | bytes, *, allow_infinity: bool = False) -> Any:
    """Returns the value of a JSON text, or raises `LedgerError`."""
    try:
        return parse_json(text, allow_infinity=allow_infinity)
    except ValueError as error:
        raise LedgerError(f"{path} is damaged: {error}") from None


def or_refused(path: Path, make: Callable[..., T], *values: Any, **named: Any) -> T:
    """Returns what a function returns for a record, or raises `LedgerError`."""
    try:
        return make(*values, **named)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise LedgerError(f"{path}: {error}") from None
