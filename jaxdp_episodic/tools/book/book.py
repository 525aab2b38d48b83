"""Making, reading, charging and closing a book, each in one transaction.

The contract, even if a process is killed at any moment: a run that has drawn has paid
exactly once, and the prices of all runs together never exceed the total.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.runs import parts_of, refuse_disjoint
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import check_method, epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.gdp import GdpBudget
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.json_file import read_json
from jaxdp_episodic.tools.book.content import (
    FLOORS_SHARE,
    FORMAT,
    QUERY,
    VERSION,
    AnyRun,
    BookContent,
    BookTerms,
    Entry,
    MenuPrices,
    Protected,
    check_name,
    in_words,
    new_name,
    read_rows,
    row_of,
)
from jaxdp_episodic.tools.book.storage import BookError, Row, Rows, Storage, shown

_Result = TypeVar("_Result")
_Write = Callable[[Mapping[str, Any]], Row]  # writes the next record


class BookClosedError(ValueError):
    """The book is closed: nothing more can be charged to it."""


@dataclass(frozen=True, eq=False)
class Order:
    """A run to be charged to a book."""

    what: str  # "train", "tune" or "query"
    name: str  # the run's title
    protected: Protected  # whom it protects, in which data
    about: Mapping[str, Any]  # description in plain values; equal for the same run
    price: Callable[[BookTerms], Mapping[str, Any]]  # computes the price; takes seconds

    def __post_init__(self) -> None:
        check_name(self.name)


def order_of(
    *parts: AnyRun, what: str, name: str, protected: Protected, floor: Any = None
) -> Order:
    """Returns the order for a run, given by its parts on disjoint data."""
    for part in parts:
        refuse_disjoint(part, "a book")

    def price(terms: BookTerms) -> Mapping[str, Any]:
        return terms.prices.price(*parts, method=terms.method, floor=floor)

    run, *others = parts
    if others or isinstance(run, AdaptiveRun):
        about = {"parts": [part.to_dict() for part in parts]}
    else:
        about = {"steps": run.to_dict()}
    return Order(what, name, protected, json.loads(json.dumps(about)), price)


def create_book(
    where: str,
    protected: Protected,
    *,
    epsilon: Any,
    delta: Any,
    floors: Any = None,
    method: str = "exact",
    menu: Mapping[str, ComposedSteps] | None = None,
    quotas: Mapping[str, int] | None = None,
) -> BookTerms:
    """Makes a book for any runs, charged by mu-GDP, or for those of a menu.

    See `GdpBudget`. A menu has no floors; its runs have quotas, or (None) prices.
    """
    if floors is None:
        checked = _validation.open_unit_array("delta", delta)
        floors = FLOORS_SHARE * _validation.single("delta", checked)
    total = GdpBudget(epsilon, delta, floors)
    check_method(method)
    prices: dict[str, Any] = {"kind": "gdp", "floors": total.floors}
    if menu is not None:
        target = {"epsilon": total.epsilon, "delta": total.delta}
        limits: dict[str, Any] = target if quotas is None else {"quotas": quotas}
        run = MenuPrices(AdaptiveRun(menu, **limits)).menu
        kind = "prices" if quotas is None else "quotas"
        prices = {"kind": kind, "menu": run.to_dict()}
        worst = run.composition()
        if worst is None:
            cost = float(run.epsilon(delta=total.delta))
        else:
            cost = float(epsilon_of(worst, delta=total.delta, method=method))
        if not cost <= total.epsilon:
            raise ValueError(
                f"epsilon must be at least the cost of the menu, {cost:.5g} at "
                f"delta={total.delta:g}, got {total.epsilon:g}: give smaller quotas, "
                "or runs with more noise"
            )
    people = protected.people
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "book": new_name(),
        "epsilon": total.epsilon,
        "delta": total.delta,
        **protected._asdict(),
        "people": None if people is None else people.to_dict(),
        "method": method,
        "prices": prices,
    }
    content = read_rows([row := row_of(0, "", fields)])  # as others will read it
    Storage(where).create(row)
    return content.terms


def read_book(where: str) -> BookContent:
    """Returns the checked content of a book."""
    return _changed(where, lambda content, write: content, writes=False)


def close_book(where: str) -> BookContent:
    """Closes a book to new charges; returns its content before."""

    def close(content: BookContent, write: _Write) -> BookContent:
        if not content.is_closed:
            write({"closed": True, "time": _now()})
        return content

    return _changed(where, close)


def charge_query(
    where: str, run: AnyRun, *, name: str, floor: float | None = None
) -> Entry:
    """Charges a query outside of training, before it is made; see `charge`."""
    # Nothing identifies a query: each call charges. What it leaves open is the book's.
    seen = read_book(where)
    own = seen.terms.protected
    order = order_of(run, what=QUERY, name=name, protected=own, floor=floor)
    for part in parts_of(run):
        relation = getattr(part, "neighboring_relation", None)
        found = own._replace(neighboring_relation=relation or own.neighboring_relation)
        if isinstance(part, GaussianStep):
            if part.population is not None and relation == "add_remove":
                raise ValueError(
                    "population must be left out: under add_remove sizes of groups are "
                    "private, but the book is public; state public bounds in the "
                    "sampling"
                )
            unit = str(part.privacy_unit)
            found = found._replace(privacy_unit=unit, people=part.people)
        seen.terms.refuse_other(found)
    return charge(
        where, order, run=new_name(), session=new_name(), sessions=(), seen=seen
    )


def charge(
    where: str,
    order: Order,
    *,
    run: str,
    sessions: tuple[str, ...],  # names of earlier processes, from the run's folder
    session: str,  # name of this process
    seen: BookContent | None = None,  # the book as it was read a moment ago
    at_end: int | None = None,  # number of steps, if the folder's run has ended
) -> Entry:
    """Charges a run unless it has paid; returns its entry once it is on the disk."""
    # A resumed run names the sessions that its folder knows. The book's last session
    # of the run must be one of them. Otherwise a copy of the folder was resumed, and
    # both copies would take steps that were paid for once.
    seen = read_book(where) if seen is None else seen
    seen.terms.refuse_other(order.protected)
    name = seen.terms.name
    closed = BookClosedError(f"book {shown(where)} is closed: nothing was charged")
    price: Mapping[str, Any] | None = None
    if seen.entry_of(run) is None:
        if seen.is_closed:
            raise closed
        price = order.price(seen.terms)  # takes seconds, in no transaction

    def pay(content: BookContent, write: _Write) -> Entry:
        if content.terms.name != name:  # the price was computed for another book
            raise BookError(
                f"book {shown(where)} was {name[:12]}… a moment ago and has been "
                f"replaced by another one, {content.terms.name[:12]}…: nothing was "
                "charged"
            )
        paid = content.entry_of(run)
        if paid is not None:
            _check_resumed(content, paid, order, sessions, at_end)
            write({"resumed": run, "session": session})
            return paid
        if content.is_closed:
            raise closed
        if price is None:
            raise BookError(
                f"book {shown(where)} had an entry of this run a moment ago, and has "
                "none now: it was restored to an older state"
            )
        content.terms.prices.check(content.paid, price)
        head = {"run": run, "session": session, "what": order.what, "name": order.name}
        about = {"about": dict(order.about), "price": dict(price), "time": _now()}
        content.add(write(head | about))
        return content.entries[-1]

    return _changed(where, pay)


def _check_resumed(
    content: BookContent,
    paid: Entry,
    order: Order,
    sessions: tuple[str, ...],
    at_end: int | None,
) -> None:
    """Refuses a run with other settings, a copy of the run, or an older state of it."""
    entry = f"entry {paid.number} of the book is of this run"
    ours, theirs = paid.about, order.about
    if "steps" in ours and "steps" in theirs:  # two versions may have written them
        ours, theirs = (ComposedSteps.from_dict(one["steps"]) for one in (ours, theirs))
    if ours != theirs:
        raise ValueError(
            f"{entry} with other settings: start another run, in another folder"
        )
    if content.sessions[paid.run] not in sessions:
        raise ValueError(
            f"{entry}, and another copy of it was resumed: this copy has not paid; "
            "start another run, in another folder"
        )
    end = content.ends.get(paid.run)
    if end is not None and end != at_end:
        state = "has not ended" if at_end is None else f"ended after {at_end:,}"
        raise ValueError(
            f"{entry}, which has ended after {end:,} steps (of a search: runs); the "
            f"run in this folder {state}: it is an older copy, and would release a "
            "second time what was paid for once. Start another run, in another folder"
        )


def _changed(
    where: str, act: Callable[[BookContent, _Write], _Result], *, writes: bool = True
) -> _Result:
    """Reads a book; returns ``act``'s result. One transaction."""

    def read(rows: Rows) -> _Result:
        try:
            content = read_rows(rows.read())
        except BookError as error:
            raise BookError(f"book {shown(where)}: {error}") from None
        after = content.num_records, content.sha256
        return act(content, lambda record: rows.append(row_of(*after, record)))

    return Storage(where).transaction(read, writes=writes)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


RECEIPT = "book.json"
_MOST_BYTES = 2**20  # of a receipt; enough for thousands of killed processes


class Receipt(NamedTuple):
    """What a run's folder records about its entry in a book."""

    book: str  # the book's name
    run: str  # the run's name
    sessions: tuple[str, ...]  # if it has paid, one is its last session in the book
    has_paid: bool  # False: the run may have paid nevertheless

    def write(self, folder: Path) -> None:
        """Writes it into a run's folder."""
        text = json.dumps(self._asdict(), indent=1) + "\n"
        write_atomically(folder / RECEIPT, text, is_private=True)


class Paid(NamedTuple):
    """The entry of a run that has paid, and the terms of its book."""

    terms: BookTerms
    entry: Entry

    @property
    def price(self) -> str:
        """The price of the run, in words."""
        return in_words(self.entry.price)


def check_in(
    where: str, folder: Path, order: Order, *, run: str, at_end: int | None = None
) -> Paid:
    """Charges the run of a folder unless it has paid; see `charge` for the errors."""
    content = read_book(where)
    terms, found = content.terms, read_receipt(folder)
    if found is None or found.run != run:  # or a receipt of a run that drew nothing
        found = Receipt(terms.name, run, (), False)
    if found.has_paid and found.book != terms.name:
        raise ValueError(
            f"book must be the one that the run in {folder} has paid from, "
            f"{found.book[:12]}…, got {shown(where)}, which is {terms.name[:12]}…"
        )
    if found.has_paid and content.entry_of(run) is None:
        raise _restored(where, folder)
    known, session = found.sessions, new_name()
    Receipt(terms.name, run, (*known, session), found.has_paid).write(folder)
    entry = charge(
        where,
        order,
        run=run,
        sessions=known,
        session=session,
        seen=content,
        at_end=at_end,
    )
    Receipt(terms.name, run, (session,), True).write(folder)
    return Paid(terms, entry)


def check_out(where: str, folder: Path, paid: Paid, *, steps: int) -> None:
    """Records that a run takes no more steps; call it before anything is released.

    From then on `charge` refuses every older copy of the run.
    """
    receipt, run = read_receipt(folder), paid.entry.run

    def end(content: BookContent, write: _Write) -> None:
        found = content.entry_of(run)
        if found is None:
            raise _restored(where, folder)
        entry = f"entry {found.number} of the book is of this run"
        if receipt is None or content.sessions[run] not in receipt.sessions:
            raise ValueError(
                f"{entry}, and another copy of it was resumed while it ran: nothing of "
                "this copy may be released, as only one of the two was paid for"
            )
        ended = content.ends.get(run)
        if ended is None:
            write({"ended": run, "steps": steps, "time": _now()})
        elif ended != steps:
            raise ValueError(
                f"{entry}, which has ended after {ended:,} steps (of a search: runs), "
                f"not after {steps:,}: nothing of this folder may be released"
            )

    _changed(where, end)


def _restored(where: str, folder: Path) -> BookError:
    return BookError(
        f"book {shown(where)} has no entry of the run in {folder}, which has paid: it "
        "was restored to an older state"
    )


def read_receipt(folder: Path) -> Receipt | None:
    """Returns the receipt in a folder; None if there is none."""
    path = folder / RECEIPT
    try:
        found = read_json(path, max_bytes=_MOST_BYTES)
        sessions = tuple(str(session) for session in found["sessions"])
        book, run = str(found["book"]), str(found["run"])
        if not f"{book}{run}".isprintable():
            raise TypeError("names that cannot be printed")
        return Receipt(book, run, sessions, bool(found["has_paid"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged: {error!r}") from None
