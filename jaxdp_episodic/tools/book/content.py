"""What a book says: its terms, what runs took, and the chain that holds it together.

Every record is a JSON object in a row of its own, numbered from 0, and beside it the
SHA-256 of the hash before it and the record's text: an edit, or a record that is gone
from the middle, is found by everyone who reads. Nothing is ever rewritten.

    {"format": "jaxdp-episodic book", "version": 1, "book": "…", "epsilon": 8.0, …}
    {"run": "…", "session": "…", "what": "train", "name": "…", "about": {…},
     "price": {…}, "time": "…"}            a run has paid
    {"resumed": "…", "session": "…"}       another process goes on with it
    {"ended": "…", "steps": 300, "time": "…"}  it takes no more steps
    {"closed": true, "time": "…"}
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import ComposedSteps
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.report.protected import bounds_in_words
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.tools.book.prices import (
    Prices,
    merged,
    prices_from_dict,
)
from jaxdp_episodic.tools.book.storage import BookError, Row

FORMAT = "jaxdp-episodic book"
VERSION = 1
TRAIN = "train"
TUNE = "tune"
QUERY = "query"
_WHATS = (TRAIN, TUNE, QUERY)
# Letters of a run's title.
_MOST_NAME = 200
# Bytes of a record: millions of units.
_MOST_BYTES = 2**26


class Protected(NamedTuple):
    """Who is protected, and in which data.

    Attributes:
      privacy_unit: as of a `GaussianStep`.
      neighboring_relation: likewise.
      people: public bounds of what one person owns, where people are protected.
      data: fingerprint of the data as they were loaded (`ExampleTable.fingerprint`).
    """

    privacy_unit: str
    neighboring_relation: str
    people: PersonBounds | None
    data: str

    @property
    def words(self) -> str:
        """Whom a guarantee protects."""
        unit = f"one {self.privacy_unit}"
        if self.privacy_unit == PERSON:
            unit += f", {bounds_in_words(self.people)}"
        return f"{unit} ({self.neighboring_relation})"


@dataclass(frozen=True, eq=False)
class BookTerms:
    """What is fixed when a book is made.

    Attributes:
      name: random, 32 letters; no other book has it.
      protected: who.
      epsilon: of all runs together, nats.
      delta: likewise.
      method: how prices are computed; see `jaxdp_episodic.epsilon`.
      prices: what runs are charged.
    """

    name: str
    protected: Protected
    epsilon: float
    delta: float
    method: str
    prices: Prices

    def __post_init__(self) -> None:
        check_method(self.method)
        _validation.choice(
            "neighboring_relation",
            self.protected.neighboring_relation,
            NEIGHBORING_RELATIONS,
        )

    def refuse_other(self, found: Protected) -> None:
        """Refuses a run that protects others, or is of other data, than the book.

        Raises:
          ValueError: it does, or is; the message names what differs.
        """
        ours = self.protected
        for name in ("privacy_unit", "neighboring_relation", "people"):
            wanted, got = getattr(ours, name), getattr(found, name)
            if wanted != got:
                raise ValueError(
                    f"{name} must be {wanted!r}, as in the book, got {got!r}: a budget "
                    "is for one kind of neighbour"
                )
        if ours.data != found.data:
            raise ValueError(
                f"book is for other data: its fingerprint is {ours.data[:12]}…, that "
                f"of the data here {found.data[:12]}…; another data set, or one that "
                "has changed, needs a book of its own"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the first record of a book."""
        people = self.protected.people
        return {
            "format": FORMAT,
            "version": VERSION,
            "book": self.name,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "privacy_unit": self.protected.privacy_unit,
            "neighboring_relation": self.protected.neighboring_relation,
            "people": None if people is None else people.to_dict(),
            "data": self.protected.data,
            "method": self.method,
            "prices": self.prices.to_dict(),
        }


class Entry(NamedTuple):
    """What one run has paid.

    Attributes:
      number: of the entry, from 1.
      run: its name: that in its ledger, of a search that in its state.
      what: "train", "tune" or "query".
      name: its title.
      about: what it is, plain values: its steps, where it has any.
      price: as of the book's prices.
      time: when, UTC.
    """

    number: int
    run: str
    what: str
    name: str
    about: Mapping[str, Any]
    price: Mapping[str, Any]
    time: str

    @property
    def steps(self) -> ComposedSteps | None:
        """The run, for the accountant; None of a search, and where choices cost."""
        found = self.about.get("steps")
        return None if found is None else ComposedSteps.from_dict(found)


class BookContent(NamedTuple):
    """What a book says.

    Attributes:
      terms: fixed when it was made.
      entries: of the runs that have paid, in order.
      sessions: run -> random name of the process that last went on with it.
      ends: run -> steps (of a search, runs) with which it ended, if it has.
      is_closed: nothing can be charged any more.
      num_records: all of them.
      sha256: the chain's hash after the last one.
    """

    terms: BookTerms
    entries: tuple[Entry, ...]
    sessions: Mapping[str, str]
    ends: Mapping[str, int]
    is_closed: bool
    num_records: int
    sha256: str

    @property
    def paid(self) -> list[Mapping[str, Any]]:
        """The prices of all entries."""
        return [entry.price for entry in self.entries]

    def entry_of(self, run: str) -> Entry | None:
        """Returns what a run has paid, if it has."""
        return next((entry for entry in self.entries if entry.run == run), None)

    def composition(self) -> ComposedSteps | None:
        """Returns all runs that are there, as one that was fixed in advance.

        What it costs is no guarantee where a run was chosen in view of others. None:
        there are none, or one of them is a search, or adapts at prices or by rules.
        """
        runs = [entry.steps for entry in self.entries]
        known = [run for run in runs if run is not None]
        return merged(known) if runs and len(known) == len(runs) else None


def first_row(terms: BookTerms) -> Row:
    """Returns the first row of a new book."""
    return _row(0, "", terms.to_dict())


def check_name(name: Any) -> None:
    """Refuses what is no title: it is printed, in one line.

    Raises:
      TypeError, ValueError: it is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {_validation.shown(name)}")
    if not (0 < len(name) <= _MOST_NAME and name.isprintable()):
        raise ValueError(
            f"name must have 1 to {_MOST_NAME} letters that can be printed, got "
            f"{len(name)}: {_validation.shown(name)}"
        )


def new_name() -> str:
    """Returns a random name, for books, runs and sessions."""
    return secrets.token_hex(16)


def next_row(content: BookContent, record: Mapping[str, Any]) -> Row:
    """Returns the row that puts a record after all that a book says."""
    return _row(content.num_records, content.sha256, record)


def read_rows(rows: Sequence[Row]) -> BookContent:
    """Returns what the rows of a book say, after checking all of them.

    Raises:
      BookError: no book, one of an unknown version, or one that is damaged.
    """
    if not rows:
        raise BookError("it is empty")
    reader = _Reader(_header(rows[0]), rows[0].hash)
    for row in rows[1:]:
        try:
            reader.take(row)
        except (KeyError, TypeError, ValueError) as error:
            raise BookError(f"record {row.number}: {error}") from None
    content = reader.content()
    try:
        holds = content.terms.prices.holds(content.paid)
    except (KeyError, TypeError, ValueError) as error:
        raise BookError(f"prices: {error}") from None
    if not holds:  # whoever wrote it checked this
        raise BookError("its runs took more than it has")
    return content


def _header(row: Row) -> BookTerms:
    try:
        _check_version(row)
        fields = _record(row, 0, "")
        totals = {name: fields[name] for name in ("epsilon", "delta")}
        method, people = fields["method"], fields["people"]
        bounds = None if people is None else PersonBounds.from_dict(people)
        texts = [fields[name] for name in ("privacy_unit", "data", "book")]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise BookError("privacy_unit, data and book must be texts")
        return BookTerms(
            texts[2],
            Protected(texts[0], fields["neighboring_relation"], bounds, texts[1]),
            **totals,
            method=method,
            prices=prices_from_dict(fields["prices"], **totals),
        )
    except BookError:
        raise
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise BookError(f"record 0: {error}") from None


def _check_version(row: Row) -> None:
    """Refuses what another version wrote, whose hashes may be others."""
    found = parse_json(row.record) if isinstance(row.record, str) else None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BookError(f"record 0: format must be {FORMAT!r}")
    if found.get("version") != VERSION:
        raise BookError(
            f"version must be {VERSION}, got "
            f"{_validation.shown(found.get('version'))}: "
            "another version of jaxdp-episodic wrote it"
        )


class _Reader:
    """Takes up the records of a book, one by one."""

    def __init__(self, terms: BookTerms, sha256: str) -> None:
        self._terms, self._hash, self._next = terms, sha256, 1
        self._entries: list[Entry] = []
        self._sessions: dict[str, str] = {}
        self._ends: dict[str, int] = {}
        self._is_closed = False

    def take(self, row: Row) -> None:
        record = _record(row, self._next, self._hash)
        if self._is_closed and not {"resumed", "ended"} & record.keys():
            raise ValueError("it comes after the book was closed")
        if "closed" in record:
            self._is_closed = True
        elif "resumed" in record:
            if record["resumed"] not in self._sessions:
                raise ValueError("it is of a run that has paid nothing")
            self._sessions[record["resumed"]] = str(record["session"])
        elif "ended" in record:
            self._end(record)
        else:
            self._charge(record)
        self._hash, self._next = row.hash, self._next + 1

    def _end(self, record: Mapping[str, Any]) -> None:
        run, steps = record["ended"], record["steps"]
        if run not in self._sessions or run in self._ends:
            raise ValueError("it ends a run that has paid nothing, or has ended before")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be a number >= 0, got {steps!r}")
        self._ends[run] = steps

    def _charge(self, record: Mapping[str, Any]) -> None:
        names = ("run", "what", "name", "about", "price", "time")
        entry = Entry(len(self._entries) + 1, *(record[name] for name in names))
        _validation.choice("what", entry.what, _WHATS)
        for text in (entry.name, entry.run, entry.time):
            check_name(text)
        if entry.run in self._sessions:
            raise ValueError("its run has paid already")
        self._sessions[entry.run] = str(record["session"])
        self._entries.append(entry)

    def content(self) -> BookContent:
        return BookContent(
            self._terms,
            tuple(self._entries),
            self._sessions,
            self._ends,
            self._is_closed,
            self._next,
            self._hash,
        )


def _row(number: int, before: str, record: Mapping[str, Any]) -> Row:
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    if len(text) > _MOST_BYTES:
        raise ValueError(
            f"the book cannot describe the run: {len(text):,} bytes, mostly its "
            f"population, of at most {_MOST_BYTES:,}"
        )
    return Row(number, text, _hash(before, text))


def _record(row: Row, number: int, before: str) -> dict[str, Any]:
    """What a row holds, if it is the one that comes next."""
    if row.number != number or not isinstance(row.record, str):
        raise ValueError(f"it has number {row.number!r} in place of {number}")
    if row.hash != _hash(before, row.record):
        raise ValueError("its hash is another: the book was edited or damaged")
    record = parse_json(row.record)
    if not isinstance(record, dict):
        raise TypeError("it is no object")
    return record


def _hash(before: str, text: str) -> str:
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
