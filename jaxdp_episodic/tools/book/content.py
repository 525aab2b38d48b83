"""The content of a book: its terms, its prices, the runs charged, and the hash chain.

Prices are fixed when the book is made: mu-GDP with floors, or options of a menu.
``paid`` lists the prices of earlier runs, in order.

Every record is a JSON object in a row of its own, numbered from 0. The row also holds
the SHA-256 of the previous row's hash and the record's text, so every reader finds an
edited or missing record. No row is ever rewritten.

    {"format": "jaxdp-episodic book", "version": 1, "book": "…", "epsilon": 8.0, …}
    {"run": "…", "session": "…", "what": "train", "name": "…", "about": {…},
     "price": {…}, "time": "…"}            a run has paid
    {"resumed": "…", "session": "…"}       another process continues it
    {"ended": "…", "steps": 300, "time": "…"}  it takes no more steps
    {"closed": true, "time": "…"}
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import PersonBounds
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions import gdp
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.report.sentences import unit_in_words
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.tools.book.storage import BookError, Row

FLOORS_SHARE = 0.2  # default share of delta for the floors of all runs
FLOOR_SHARE = 0.01  # default share of delta for the floor of one run
_FIELDS = ("mu", "floor")

AnyRun = ComposedSteps | AdaptiveRun
Price = Mapping[str, Any]


class BookExhaustedError(ValueError):
    """The run costs more than the book has left; nothing was charged."""


@dataclass(frozen=True)
class GdpPrices:
    """Prices of a book for any runs: mu and a floor for each; see `GdpBudget`."""

    budget: gdp.GdpBudget

    @property
    def default_floor(self) -> float:
        """The floor of a run that states none."""
        return FLOOR_SHARE * self.budget.delta

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the price of a run at a floor; the largest of its disjoint parts."""
        floor = self.default_floor if floor is None else floor
        each = [gdp.gdp_price(part, floor=floor, method=method) for part in parts]
        return {name: max(getattr(one, name) for one in each) for name in _FIELDS}

    def price_of_search(self, orders: Any, rdp: Any, floor: float | None) -> Price:
        """Returns the price of a search, from its Rényi DP; see `price_of_rdp`."""
        floor = self.default_floor if floor is None else floor
        return dataclasses.asdict(gdp.price_of_rdp(orders, rdp, floor=floor))

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses a price that exceeds what is left after ``paid``."""
        before, wanted = _read(paid), gdp.GdpPrice(**price)
        if not self.budget.permits(before, wanted):
            left = dataclasses.asdict(self.budget.left(before))
            raise BookExhaustedError(
                f"the run costs {in_words(price)}, but the book has {in_words(left)} "
                "left: nothing was charged or sampled"
            )

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns for each currency its name, the amount spent, and the total."""
        amounts = math.fsum(price["mu"] ** 2 for price in paid)
        floors = math.fsum(price["floor"] for price in paid)
        total = self.budget.mu**2, self.budget.floors
        return [("mu^2", amounts, total[0]), ("floor", floors, total[1])]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        left = self.budget.left(_read(paid))
        return f"a run of mu {left.mu:.5g}; floors {left.floor:.3g}"


@dataclass(frozen=True, eq=False)
class MenuPrices:
    """Prices of a book for the runs of a menu; see `AdaptiveRun`."""

    menu: AdaptiveRun  # before any option was used

    def __post_init__(self) -> None:
        self.menu.one_setting("menu")
        for name in self.menu.options:
            if not name.isprintable():
                raise ValueError(f"menu must have names that can be printed: {name!r}")

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the option that covers a run; the run may have more noise."""
        del method
        run, *others = parts
        if others or isinstance(run, AdaptiveRun):
            raise NotImplementedError(
                "adaptive: a book with a menu charges compositions, and adaptive runs "
                "with quotas on one part of the data; a book with mu-GDP prices "
                "charges any run"
            )
        if floor is not None:
            raise ValueError("floor must be left out: the book has a menu, no floors")
        options = self.menu.options
        fitting = [name for name in options if _is_at_most(run, options[name])]
        for name in sorted(fitting, key=lambda name: options[name] != run):
            return {"option": name}
        raise ValueError(
            "the run is not on the book's menu, which was fixed when it was made: "
            + ", ".join(options)
        )

    def price_of_search(self, orders: Any, rdp: Any, floor: float | None) -> Price:
        """Refuses every search."""
        raise NotImplementedError(
            "a search for hyperparameters cannot be on a menu, as only a bound on its "
            "Rényi DP is known; a book with mu-GDP prices charges it"
        )

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses an option that costs more than is left after ``paid``."""
        try:
            self._after([*paid, price])
        except ValueError as error:
            raise BookExhaustedError(
                f"{error}: nothing was charged or sampled"
            ) from None

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns for each quota, or the price, its name, what was used, the total."""
        after, quotas = self._after(paid), self.menu.quotas
        if quotas is None:
            return [("price", float(after.spent), float(self.menu.budget or 0))]
        used = after.taken
        return [(name, float(used[name]), float(n)) for name, n in quotas.items()]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        after, word = self._after(paid), " or " if self.menu.quotas is None else ", "
        return word.join(f"{name} {after.most(name)} times" for name in after.options)

    def _after(self, paid: Sequence[Price]) -> AdaptiveRun:
        """The menu after the options in ``paid`` were used."""
        names = (price["option"] for price in paid)
        return functools.reduce(AdaptiveRun.charge, names, self.menu)


Prices = GdpPrices | MenuPrices


def prices_from_dict(fields: Any, *, epsilon: float, delta: float) -> Prices:
    """Reads prices of any kind; raises KeyError, TypeError or ValueError."""
    if fields["kind"] == "base":
        raise ValueError(
            "prices are in base steps, which only versions up to 0.2 charge: read, "
            "charge and close this book with 0.2. A new book for these data is a "
            "separate budget, and the two add up"
        )
    kinds = ("gdp", "quotas", "prices")
    if _validation.choice("kind of prices", fields["kind"], kinds) == "gdp":
        return GdpPrices(_budget(epsilon, delta, fields["floors"]))
    menu = AdaptiveRun.from_dict(fields["menu"])
    if any(menu.taken.values()) or menu.rules is not None:
        raise ValueError("menu must be an unused one, with quotas or prices")
    return MenuPrices(menu)


def _read(paid: Sequence[Price]) -> list[gdp.GdpPrice]:
    return [gdp.GdpPrice(**price) for price in paid]


def in_words(price: Price) -> str:
    """Returns a price as text."""
    if "option" in price:
        return f"one of {price['option']}"
    return f"mu {price['mu']:.5g}, floor {price['floor']:.3g}"


# Cached, as a budget computes its mu by a search, and every charge reads the book.
_budget = functools.lru_cache(maxsize=16)(gdp.GdpBudget)


def _is_at_most(run: ComposedSteps, option: Any) -> bool:
    """Whether a run is an option, or the option with more noise (post-processing)."""
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
TRAIN = "train"
TUNE = "tune"
QUERY = "query"
_WHATS = (TRAIN, TUNE, QUERY)
_MOST_NAME = 200  # characters of a run's title
_MOST_BYTES = 2**26  # of a record; enough for a population of millions of units


class Protected(NamedTuple):
    """Who is protected, and in which data."""

    privacy_unit: str  # of a `GaussianStep`
    neighboring_relation: str  # of a `GaussianStep`
    people: PersonBounds | None  # public bounds, if people are protected
    data: str  # fingerprint of the loaded data (`ExampleTable.fingerprint`)

    @property
    def words(self) -> str:
        """The protected unit and the relation, as text."""
        unit = unit_in_words(self.privacy_unit, self.people)
        return f"{unit} ({self.neighboring_relation})"


@dataclass(frozen=True, eq=False)
class BookTerms:
    """The terms of a book, which are fixed when it is made."""

    name: str  # random, 32 characters, unique
    protected: Protected
    epsilon: float  # of all runs together, nats
    delta: float  # of all runs together
    method: str  # of the prices; see `jaxdp_episodic.epsilon`
    prices: Prices

    def __post_init__(self) -> None:
        check_method(self.method)
        relation = self.protected.neighboring_relation
        _validation.choice("neighboring_relation", relation, NEIGHBORING_RELATIONS)

    def refuse_other(self, found: Protected) -> None:
        """Refuses a run with another unit, relation, bounds of people, or data."""
        ours = self.protected
        for name in ("privacy_unit", "neighboring_relation", "people"):
            wanted, got = getattr(ours, name), getattr(found, name)
            if wanted != got:
                raise ValueError(
                    f"{name} must be {wanted!r}, as in the book, got {got!r}"
                )
        if ours.data != found.data:
            raise ValueError(
                f"book is for other data: its fingerprint is {ours.data[:12]}…, that "
                f"of the data here {found.data[:12]}…; another data set, or one that "
                "has changed, needs a book of its own"
            )


class Entry(NamedTuple):
    """The entry of one run, which has paid."""

    number: int  # of the entry, from 1
    run: str  # the run's name in its ledger, or the search's in its state
    what: str  # "train", "tune" or "query"
    name: str  # the run's title
    about: Mapping[str, Any]  # description in plain values: its steps, if it has any
    price: Mapping[str, Any]  # of the kind of the book's prices
    time: str  # UTC


@dataclass
class BookContent:
    """The content of a book; `add` appends a record."""

    terms: BookTerms
    sha256: str  # the chain's hash after the last record
    entries: list[Entry] = field(default_factory=list)  # runs that have paid, in order
    num_records: int = 1
    is_closed: bool = False  # nothing more can be charged
    # Run -> random name of the process that last started or resumed it.
    sessions: dict[str, str] = field(default_factory=dict)
    # Run that has ended -> its number of steps (of a search: of runs).
    ends: dict[str, int] = field(default_factory=dict)

    @property
    def paid(self) -> list[Mapping[str, Any]]:
        """The prices of all entries."""
        return [entry.price for entry in self.entries]

    def entry_of(self, run: str) -> Entry | None:
        """Returns the entry of a run; None if it has not paid."""
        return next((entry for entry in self.entries if entry.run == run), None)

    def composition(self) -> ComposedSteps | None:
        """Returns the composition of all runs; None if one of them has none."""
        runs = [entry.about.get("steps") for entry in self.entries]
        if not runs or None in runs:
            return None
        return compose(*((ComposedSteps.from_dict(run), 1) for run in runs))

    def add(self, row: Row) -> None:
        """Checks and adds the next row."""
        record = _record(row, self.num_records, self.sha256)
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
            self.entries.append(entry)
        self.sha256, self.num_records = row.hash, self.num_records + 1


def read_rows(rows: Sequence[Row]) -> BookContent:
    """Returns the content of a book; checks all of its rows."""
    if not rows:
        raise BookError("it is empty")
    where = "record 0"
    try:
        content = BookContent(_terms(rows[0]), rows[0].hash)
        for row in rows[1:]:
            where = f"record {row.number}"
            content.add(row)
        where, paid = "prices", content.paid
        if paid:  # earlier ones were checked when they were written
            content.terms.prices.check(paid[:-1], paid[-1])
    except BookError:
        raise
    except BookExhaustedError:
        raise BookError("its runs have paid more than its total") from None
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise BookError(f"{where}: {error}") from None
    return content


def check_name(name: Any) -> None:
    """Refuses a title that cannot be printed in one line."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {_validation.shown(name)}")
    if not (0 < len(name) <= _MOST_NAME and name.isprintable()):
        raise ValueError(
            f"name must have 1 to {_MOST_NAME} printable characters, got "
            f"{len(name)}: {_validation.shown(name)}"
        )


def new_name() -> str:
    """Returns a random name for a book, a run or a session."""
    return secrets.token_hex(16)


def _terms(row: Row) -> BookTerms:
    # The version is checked first, as another version may compute other hashes.
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


def row_of(number: int, before: str, record: Mapping[str, Any]) -> Row:
    """Returns the row for a record after the row with the hash ``before``."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    if len(text) > _MOST_BYTES:
        raise ValueError(
            "the run's description, mostly its population, must have at most "
            f"{_MOST_BYTES:,} bytes to be in a book, got {len(text):,}"
        )
    return Row(number, text, _hash(before, text))


def _record(row: Row, number: int, before: str) -> dict[str, Any]:
    """The record in a row; refuses a row that is not the next one of the chain."""
    if row.number != number or not isinstance(row.record, str):
        raise ValueError(f"it must have number {number}, got {row.number!r}")
    if row.hash != _hash(before, row.record):
        raise ValueError("its hash is wrong: the book was edited or damaged")
    record = parse_json(row.record)
    if not isinstance(record, dict):
        raise TypeError("it is no JSON object")
    return record


def _hash(before: str, text: str) -> str:
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
