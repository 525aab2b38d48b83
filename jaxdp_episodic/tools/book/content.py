"""What a book says: its terms, what runs took, and the chain that holds it together.

Every record is a JSON object in a row of its own, numbered from 0. Beside it stands the
SHA-256 of the previous hash and the record's text, so that every reader finds an edited
or missing record. Nothing is ever rewritten.

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
from jaxdp_episodic.accountant.describe.step import ComposedSteps
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.report.protected import unit_in_words
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.tools.book.prices import (
    BookExhaustedError,
    Prices,
    merged,
    prices_from_dict,
)
from jaxdp_episodic.tools.book.storage import BookError, Row

FORMAT = "jaxdp-episodic book"
VERSION = 1
TRAIN, TUNE, QUERY = _WHATS = ("train", "tune", "query")
_MOST_NAME = 200  # letters of a run's title
_MOST_BYTES = 2**26  # of a record: millions of units


class Protected(NamedTuple):
    """Who is protected, and in which data."""

    privacy_unit: str  # as of a `GaussianStep`
    neighboring_relation: str  # likewise
    people: PersonBounds | None  # public bounds, where people are protected
    data: str  # fingerprint of the data as loaded (`ExampleTable.fingerprint`)

    @property
    def words(self) -> str:
        """Whom a guarantee protects."""
        unit = unit_in_words(self.privacy_unit, self.people)
        return f"{unit} ({self.neighboring_relation})"


@dataclass(frozen=True, eq=False)
class BookTerms:
    """What is fixed when a book is made."""

    name: str  # random, 32 letters; no other book has it
    protected: Protected
    epsilon: float  # of all runs together, nats
    delta: float  # likewise
    method: str  # of the prices; see `jaxdp_episodic.epsilon`
    prices: Prices  # what runs are charged

    def __post_init__(self) -> None:
        check_method(self.method)
        relation = self.protected.neighboring_relation
        _validation.choice("neighboring_relation", relation, NEIGHBORING_RELATIONS)

    def refuse_other(self, found: Protected) -> None:
        """Refuses a run whose unit, relation, people or data are not the book's."""
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
    """What one run has paid."""

    number: int  # of the entry, from 1
    run: str  # its name: that in its ledger, of a search that in its state
    what: str  # "train", "tune" or "query"
    name: str  # its title
    about: Mapping[str, Any]  # what it is, plain values: its steps, if it has any
    price: Mapping[str, Any]  # as of the book's prices
    time: str  # UTC

    @property
    def steps(self) -> ComposedSteps | None:
        """The run, for the accountant; None of a search, and where choices cost."""
        found = self.about.get("steps")
        return None if found is None else ComposedSteps.from_dict(found)


@dataclass
class BookContent:
    """What a book says; `take` adds a record to it."""

    terms: BookTerms  # fixed when it was made
    sha256: str  # the chain's hash after the last record
    entries: tuple[Entry, ...] = ()  # of the runs that have paid, in order
    num_records: int = 1  # all of them
    is_closed: bool = False  # nothing can be charged any more

    def __post_init__(self) -> None:
        # Run -> random name of the process that last went on with it.
        self.sessions: dict[str, str] = {}
        # Run -> steps (of a search, runs) with which it ended, if it has.
        self.ends: dict[str, int] = {}

    @property
    def paid(self) -> list[Mapping[str, Any]]:
        """The prices of all entries."""
        return [entry.price for entry in self.entries]

    def entry_of(self, run: str) -> Entry | None:
        """Returns what a run has paid, if it has."""
        return next((entry for entry in self.entries if entry.run == run), None)

    def composition(self) -> ComposedSteps | None:
        """Returns all runs that are there, as one that was fixed in advance."""
        runs = [entry.steps for entry in self.entries]
        known = [run for run in runs if run is not None]
        return merged(known) if runs and len(known) == len(runs) else None

    def next_row(self, record: Mapping[str, Any]) -> Row:
        """Returns the row that puts a record after all others."""
        return _row(self.num_records, self.sha256, record)

    def take(self, row: Row) -> Entry | None:
        """Checks the next row and takes it in; returns its entry, if it is one."""
        record, entry = _record(row, self.num_records, self.sha256), None
        if self.is_closed and not {"resumed", "ended"} & record.keys():
            raise ValueError("it comes after the book was closed")
        if "closed" in record:
            self.is_closed = True
        elif "resumed" in record:
            if record["resumed"] not in self.sessions:
                raise ValueError("it is of a run that has paid nothing")
            self.sessions[record["resumed"]] = str(record["session"])
        elif "ended" in record:
            run, steps = record["ended"], record["steps"]
            if run not in self.sessions or run in self.ends:
                raise ValueError(
                    "it ends a run that has paid nothing, or has ended before"
                )
            if not isinstance(steps, int) or steps < 0:
                raise ValueError(f"steps must be a number >= 0, got {steps!r}")
            self.ends[run] = steps
        else:
            values = (record[name] for name in Entry._fields[1:])
            entry = Entry(len(self.entries) + 1, *values)
            _validation.choice("what", entry.what, _WHATS)
            for text in (entry.name, entry.run, entry.time):
                check_name(text)
            if entry.run in self.sessions:
                raise ValueError("its run has paid already")
            self.sessions[entry.run] = str(record["session"])
            self.entries += (entry,)
        self.sha256, self.num_records = row.hash, self.num_records + 1
        return entry


def read_rows(rows: Sequence[Row]) -> BookContent:
    """Returns what the rows of a book say, after checking all of them."""
    if not rows:
        raise BookError("it is empty")
    where = "record 0"
    try:
        content = BookContent(_terms(rows[0]), rows[0].hash)
        for row in rows[1:]:
            where = f"record {row.number}"
            content.take(row)
        where, paid = "prices", content.paid
        if paid:  # whoever wrote it checked this
            content.terms.prices.check(paid[:-1], paid[-1])
    except BookError:
        raise
    except BookExhaustedError:
        raise BookError("its runs took more than it has") from None
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise BookError(f"{where}: {error}") from None
    return content


def first_row(terms: BookTerms) -> Row:
    """Returns the first row of a new book."""
    return _row(0, "", terms.to_dict())


def check_name(name: Any) -> None:
    """Refuses what is no title, which is printed in one line."""
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


def _terms(row: Row) -> BookTerms:
    # The version first, as another one may hash otherwise.
    found = parse_json(row.record) if isinstance(row.record, str) else None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}")
    if found.get("version") != VERSION:
        shown = _validation.shown(found.get("version"))
        raise BookError(
            f"version must be {VERSION}, got {shown}: another version of "
            "jaxdp-episodic wrote it"
        )
    fields = _record(row, 0, "")
    unit, data, name = texts = [fields[n] for n in ("privacy_unit", "data", "book")]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise ValueError("privacy_unit, data and book must be texts")
    people = fields["people"]
    bounds = None if people is None else PersonBounds.from_dict(people)
    totals = {key: fields[key] for key in ("epsilon", "delta")}
    return BookTerms(
        name,
        Protected(unit, fields["neighboring_relation"], bounds, data),
        **totals,
        method=fields["method"],
        prices=prices_from_dict(fields["prices"], **totals),
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
