"""What a book says: its terms and prices, what runs took, and the chain over all.

Prices are mu-GDP with floors, or places on a menu, and fixed when the book is made;
``paid`` lists the prices of earlier runs, in order.

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

import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
)
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.gdp_budget import (
    GdpBudget,
    GdpPrice,
    gdp_price,
    price_of_rdp,
)
from jaxdp_episodic.accountant.report.protected import unit_in_words
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.tools.book.storage import BookError, Row

# Of delta: what the floors of all runs may take, and the floor of a run, unless stated.
FLOORS_SHARE = 0.2
FLOOR_SHARE = 0.01
_FIELDS = ("mu", "floor")

AnyRun = ComposedSteps | AdaptiveRun
Price = Mapping[str, Any]


class BookExhaustedError(ValueError):
    """What a book has left does not suffice. Nothing was charged."""


@dataclass(frozen=True)
class GdpPrices:
    """Any runs, each charged mu and a floor of its own; see `GdpBudget`."""

    budget: GdpBudget

    @property
    def default_floor(self) -> float:
        """The floor of a run that states none: a hundredth of delta."""
        return FLOOR_SHARE * self.budget.delta

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        return {"kind": "gdp", "floors": self.budget.floors}

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the price of a run at its floor, the largest over disjoint parts."""
        lost = self.default_floor if floor is None else floor
        each = [gdp_price(part, floor=lost, method=method) for part in parts]
        return {name: max(getattr(one, name) for one in each) for name in _FIELDS}

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses a price that does not fit beside those paid."""
        before, wanted = _read(paid), GdpPrice(**price)
        if not self.budget.permits(before, wanted):
            left = dataclasses.asdict(self.budget.left(before))
            raise BookExhaustedError(
                f"the run costs {in_words(price)}, and the book has {in_words(left)} "
                "left: nothing was charged, nothing was drawn"
            )

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns names of the currencies, what was spent, and the total of each."""
        before, total = _read(paid), self.budget
        amounts = float(sum(price.amount for price in before))
        floors = float(sum(price.floor for price in before))
        return [
            ("mu^2", amounts, float(total.total)),
            ("floor", floors, total.floors),
        ]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        left = self.budget.left(_read(paid))
        return f"a run of mu {left.mu:.5g}; floors {left.floor:.3g}"


@dataclass(frozen=True, eq=False)
class MenuPrices:
    """Whole runs of a menu that was stated at the start; see `AdaptiveRun`."""

    menu: AdaptiveRun  # before anything was taken

    def __post_init__(self) -> None:
        self.menu.one_setting("menu")
        for name in self.menu.options:
            if not name.isprintable():
                raise ValueError(f"menu must have names that can be printed: {name!r}")

    def check_total(self, *, epsilon: float, delta: float, method: str) -> None:
        """Refuses a menu that costs more than the total; takes seconds."""
        same = self.menu.composition()
        if same is None:
            cost = float(self.menu.epsilon(delta=delta))
        else:
            cost = float(epsilon_of(same, delta=delta, method=method))
        if not cost <= epsilon:
            raise ValueError(
                f"epsilon={epsilon:g} is less than the menu costs, {cost:.5g} at "
                f"delta={delta:g}: take smaller quotas, or runs with more noise"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        kind = "prices" if self.menu.quotas is None else "quotas"
        return {"kind": kind, "menu": self.menu.to_dict()}

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the option that a run is; more noise than it says is allowed."""
        del method
        run, *others = parts
        if others or isinstance(run, AdaptiveRun):
            raise NotImplementedError(
                "adaptive: a book with a menu has whole runs that are compositions, "
                "also runs that adapt within quotas on one part of the data; a book "
                "with mu-GDP prices charges any run"
            )
        if floor is not None:
            raise ValueError("floor is for a book with mu-GDP prices, got a menu")
        options = self.menu.options
        fitting = [name for name in options if _is_at_most(run, options[name])]
        for name in sorted(fitting, key=lambda name: options[name] != run):
            return {"option": name}
        raise ValueError(
            "the run is not on the book's menu, which was fixed when it was made: "
            + ", ".join(options)
        )

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses an option that costs more than is left."""
        try:
            self._after([*paid, price])
        except ValueError as error:
            raise BookExhaustedError(
                f"{error}: nothing was charged, nothing was drawn"
            ) from None

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns what limits the runs, what was taken of it, and all of it."""
        after, quotas = self._after(paid), self.menu.quotas
        if quotas is None:
            return [("price", float(after.spent), float(self.menu.budget or 0))]
        taken = after.taken
        return [(name, float(taken[name]), float(n)) for name, n in quotas.items()]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        after, word = self._after(paid), " or " if self.menu.quotas is None else ", "
        return word.join(f"{name} {after.most(name)} times" for name in after.options)

    def _after(self, paid: Sequence[Price]) -> AdaptiveRun:
        """The menu after what was taken."""
        after = self.menu
        for price in paid:
            after = after.charge(price["option"])
        return after


Prices = GdpPrices | MenuPrices


def prices_from_dict(fields: Any, *, epsilon: float, delta: float) -> Prices:
    """Reads prices of any kind; raises KeyError, TypeError or ValueError."""
    if fields["kind"] == "base":
        raise ValueError(
            "prices are in base steps, which version 0.2 was the last to charge: read, "
            "charge and close this book with 0.2. A new book for these data is a "
            "budget of its own, and the two add up"
        )
    kinds = ("gdp", "quotas", "prices")
    if _validation.choice("kind of prices", fields["kind"], kinds) == "gdp":
        return GdpPrices(_budget(epsilon, delta, fields["floors"]))
    menu = AdaptiveRun.from_dict(fields["menu"])
    if any(menu.taken.values()) or menu.rules is not None:
        raise ValueError("menu must be one of quotas or prices that has not begun")
    return MenuPrices(menu)


def _read(paid: Sequence[Price]) -> list[GdpPrice]:
    return [GdpPrice(**price) for price in paid]


def price_of_search(
    prices: Prices, orders: Any, rdp: Any, *, floor: float | None = None
) -> Price:
    """Returns the price of what is known by its Rényi-DP; see `price_of_rdp`."""
    if not isinstance(prices, GdpPrices):
        raise NotImplementedError(
            "a search for hyperparameters is on no menu: a Rényi bound of it is all "
            "that is known; a book with mu-GDP prices charges it"
        )
    lost = prices.default_floor if floor is None else floor
    return dataclasses.asdict(price_of_rdp(orders, rdp, floor=lost))


def in_words(price: Price) -> str:
    """Returns a price as people read it."""
    if "option" in price:
        return f"one of {price['option']}"
    return f"mu {price['mu']:.5g}, floor {price['floor']:.3g}"


def merged(runs: Sequence[ComposedSteps]) -> ComposedSteps:
    """Returns the composition of runs; those steps that draw alone are counted up."""
    alone: dict[Any, int] = {}
    parts: list[tuple[Any, int]] = []
    for run in runs:
        for step, count in zip(run.steps, run.counts, strict=True):
            if isinstance(step, GaussianStep) and int(step.cycle) > 1:
                parts.append((step, int(count)))
            else:
                alone[step] = alone.get(step, 0) + int(count)
    return compose(*alone.items(), *parts)


# What they hold is searched for, and a book is read before every charge.
_budget = functools.lru_cache(maxsize=16)(GdpBudget)


def _is_at_most(run: ComposedSteps, option: Any) -> bool:
    """Whether a run is an option, or that with more noise, which is post-processing."""
    if not isinstance(option, ComposedSteps) or len(run.steps) != len(option.steps):
        return False
    counts = zip(run.counts, option.counts, strict=True)
    if any(int(ours) != int(theirs) for ours, theirs in counts):
        return False
    for ours, theirs in zip(run.steps, option.steps, strict=True):
        if isinstance(ours, GaussianStep) and isinstance(theirs, GaussianStep):
            if not ours.noise_multiplier >= theirs.noise_multiplier:
                return False
            ours = dataclasses.replace(ours, noise_multiplier=theirs.noise_multiplier)
        if ours != theirs:
            return False
    return True


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
