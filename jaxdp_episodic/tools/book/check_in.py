"""How a run in a folder pays once, however often it is resumed.

The folder's receipt names the book and the sessions, random names of processes, that
may be the last one of this run there. A process adds its own name to the receipt, then
puts it into the book in place of one that the receipt has, then forgets the others. So
a process that is killed anywhere in between can go on, and of two copies of a folder
only the first that goes on: the other's receipt knows no name that is in the book. Nor
does that of a run whose copy went on while it ran: it is asked again before a release.
The book is then told that the run has ended: a copy made before that, or a backup put
back over it, does not go on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.json_file import read_json
from jaxdp_episodic.tools.book.book import Order, charge, end_run, read_book
from jaxdp_episodic.tools.book.content import BookTerms, Entry, new_name
from jaxdp_episodic.tools.book.prices import in_words
from jaxdp_episodic.tools.book.storage import BookError, shown

RECEIPT = "book.json"
# Bytes of a receipt: of thousands of processes that were killed at the same place.
_MOST_BYTES = 2**20


class Receipt(NamedTuple):
    """What a folder knows of its run in a book."""

    book: str  # the book's name
    run: str  # the run's name
    sessions: tuple[str, ...]  # one is the last in the book, if the run has paid
    has_paid: bool  # the run is known to have paid


class Paid(NamedTuple):
    """A run's entry, and the terms of the book that it is in."""

    terms: BookTerms
    entry: Entry

    @property
    def guarantee(self) -> str:
        """What the book promises, in a sentence."""
        terms = self.terms
        return (
            f"all runs of this book together, however each was chosen in view of what "
            f"others had released, are ({terms.epsilon:g}, {terms.delta:g})-"
            f"differentially private for {terms.protected.words}"
        )

    @property
    def price(self) -> str:
        """What the run has paid, in words."""
        return in_words(self.entry.price)


def check_in(
    where: str, folder: Path, order: Order, *, run: str, at_end: int | None = None
) -> Paid:
    """Charges the run of a folder, or goes on with it; see `charge` for the errors."""
    content = read_book(where)
    terms, found = content.terms, read_receipt(folder)
    if found is None or found.run != run:  # of a run that drew nothing, or is gone
        found = Receipt(terms.name, run, (), False)
    if found.has_paid and found.book != terms.name:
        raise ValueError(
            f"book must be the one that the run in {folder} has paid from, "
            f"{found.book[:12]}…, got {shown(where)}, which is {terms.name[:12]}…"
        )
    if found.has_paid and content.entry_of(run) is None:
        raise BookError(
            f"book {shown(where)} does not know the run in {folder}, which has paid: "
            "it was put back to an older state"
        )
    known, session = found.sessions, new_name()
    _write(folder, Receipt(terms.name, run, (*known, session), found.has_paid))
    asked = {"run": run, "book": terms.name, "at_end": at_end}
    entry = charge(where, order, sessions=known, session=session, **asked)
    _write(folder, Receipt(terms.name, run, (session,), True))
    return Paid(terms, entry)


def check_out(where: str, folder: Path, paid: Paid, *, steps: int) -> None:
    """Tells the book that a run has ended, before anything of it is released."""
    receipt = read_receipt(folder)
    sessions = () if receipt is None else receipt.sessions
    end_run(where, paid.entry.run, sessions, steps)


def read_receipt(folder: Path) -> Receipt | None:
    """Returns what a folder knows of a book; None if nothing."""
    path = folder / RECEIPT
    try:
        found = read_json(path, max_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    try:
        sessions = tuple(str(session) for session in found["sessions"])
        book, run = str(found["book"]), str(found["run"])
        if not f"{book}{run}".isprintable():
            raise TypeError("names that cannot be printed")
        return Receipt(book, run, sessions, bool(found["has_paid"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged: {error!r}") from None


def _write(folder: Path, receipt: Receipt) -> None:
    text = json.dumps(receipt._asdict(), indent=1) + "\n"
    write_atomically(folder / RECEIPT, text, is_private=True)
