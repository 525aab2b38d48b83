"""``jaxdp-episodic book``: one privacy budget for a data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.report.rounding import downward, upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.book.book import (
    charge_query,
    close_book,
    create_book,
    create_menu_book,
    read_book,
)
from jaxdp_episodic.tools.book.content import BookContent, BookTerms
from jaxdp_episodic.tools.book.prices import GdpPrices, in_words
from jaxdp_episodic.tools.book.storage import shown
from jaxdp_episodic.tools.cli.messages import (
    File,
    Files,
    Name,
    Number,
    aligned,
    option,
    reported,
    waiting,
)
from jaxdp_episodic.tools.plots.book import draw_book
from jaxdp_episodic.tools.requests.request import EpsilonRequest
from jaxdp_episodic.tools.requests.request_file import read_request
from jaxdp_episodic.trainer.config.training_config import read_config

_Book = Annotated[tyro.conf.Positional[str], option("FILE_OR_URL")]
_NO_REFUNDS = (
    "a run pays before its first draw and gets nothing back, however it ends: to pay "
    "for what was taken only is not private where somebody looked and stopped"
)
_CHOOSE_BY = (
    "what runs release (parameters, scores on people who are not in these data); a run "
    "that is chosen by losses, norms or scores without noise is not covered"
)


@dataclass(frozen=True)
class Create:
    """Make a book: who is protected, in which data, and the total. All of it is final.

    Runs are charged mu and a floor (any run, designed whenever), or are those of a menu
    (--quota, --menu), which is final too; see the page "One budget for a data set".
    """

    book: _Book
    """An SQLite file to make, or the URL of a database."""
    config: Annotated[tyro.conf.Positional[Path], option("RUN.toml")]
    """A training config on the data: they, the privacy unit, the relation and the
    bounds of people are the book's; nothing else of it is."""
    epsilon: Annotated[float, option("FLOAT")]
    """Of all runs together."""
    delta: Annotated[float, option("FLOAT")]
    """Of all runs together."""
    floors: Number = None
    """Of delta, what the floors of all runs may take; default: a fifth of delta."""
    quota: Annotated[Files, option("RUN.toml=N")] = ()
    """A run of a menu, and how often it may be taken: a training config, or a request
    as for `epsilon`. Each time it is given; in place of prices in mu."""
    menu: Annotated[Files, option("RUN.toml")] = ()
    """The same without a number: any mixture of such runs, each at a price."""
    method: Annotated[Name, option("NAME")] = None
    """Computes prices: exact (default), or pld, which is certified and slower."""

    def run(self) -> int:
        """Makes the book; returns the exit code."""
        return _reported(self.book, self._created)

    def _created(self) -> list[str]:
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.tools.train.booked import protected_by

        protected = protected_by(read_config(self.config), self.config.parent)
        total = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "method": self.method or "exact",
        }
        if self.quota and self.menu:
            raise ValueError("give --quota or --menu, got both")
        if not (self.quota or self.menu):
            terms = create_book(self.book, protected, floors=self.floors, **total)
        elif self.floors is not None:
            raise ValueError("--floors is for prices with floors, not for a menu")
        else:
            given = [_quota(text) for text in self.quota]
            paths = [path for path, _ in given] or [Path(name) for name in self.menu]
            names = [path.stem for path in paths]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"the menu has two files named {name!r}")
            quotas = {path.stem: number for path, number in given} or None
            with waiting("what the menu costs"):
                menu = {path.stem: _whole_run_of(path) for path in paths}
                terms = create_menu_book(
                    self.book, protected, menu, quotas=quotas, **total
                )
        return [
            *_facts(terms),
            f"{'no refunds':<12}{_NO_REFUNDS}",
            f"{'choose by':<12}{_CHOOSE_BY}",
        ]


@dataclass(frozen=True)
class Charge:
    """Charge what is asked of the data outside of training, before it is asked.

    A statistic, a validation query, a whole run by other means: what a request as for
    `epsilon` describes. Asked again, it pays again.
    """

    book: _Book
    """The book."""
    request: Annotated[tyro.conf.Positional[Path], option("FILE.toml")]
    """What is asked; its delta or epsilon is not used."""
    name: Annotated[Name, option("NAME")] = None
    """Of the entry; default: the file's name."""
    floor: Number = None
    """In a book without a menu; default: a hundredth of its delta."""

    def run(self) -> int:
        """Charges; returns the exit code."""
        return _reported(self.book, self._charged)

    def _charged(self) -> list[str]:
        run = _run_of_request(self.request)
        name = self.name or self.request.stem
        with waiting("what it costs"):
            entry = charge_query(self.book, run, name=name, floor=self.floor)
        return [f"entry {entry.number}: {in_words(entry.price)}; it has paid"]


@dataclass(frozen=True)
class Show:
    """Show what a book guarantees, what was charged, and what is left.

    Three numbers, apart: the guarantee, which is the same from the first run to the
    last; what is left; and, as information only, what the runs that there are would
    cost if all of them had been fixed in advance.
    """

    book: _Book
    """The book."""
    plot: File = None
    """Draw what each run took, into a .png or .svg."""
    json: bool = False
    """Print JSON in place of a table."""

    def run(self) -> int:
        """Prints and draws; returns the exit code."""
        return _reported(self.book, self._shown)

    def _shown(self) -> list[str]:
        content = read_book(self.book)
        if self.plot is not None:
            draw_book(
                content.terms.prices.spent(content.paid),
                _shares(content),
                self.plot,
                title=_guarantee(content.terms),
            )
        with waiting("composition of what was run, for information"):
            cost = _composed(content)
        if self.json:
            return [json.dumps(_document(content, cost), allow_nan=False)]
        return _text(content, cost)


@dataclass(frozen=True)
class Close:
    """Close a book for good: nothing can be charged any more.

    Its guarantee stays what it is: what was not spent makes it no smaller.
    """

    book: _Book
    """The book."""

    def run(self) -> int:
        """Closes; returns the exit code."""
        return _reported(self.book, self._closed)

    def _closed(self) -> list[str]:
        content = close_book(self.book)
        if content.is_closed:
            return ["it was closed already"]
        return [f"closed; {_guarantee(content.terms)}, which does not shrink"]


@dataclass(frozen=True)
class Book:
    """Keep one privacy budget for all that is ever run on a data set."""

    action: Annotated[
        Annotated[Create, tyro.conf.subcommand("create")]
        | Annotated[Charge, tyro.conf.subcommand("charge")]
        | Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Close, tyro.conf.subcommand("close")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        """Does what was asked for; returns the exit code."""
        return self.action.run()


def _reported(book: str, act: Callable[[], list[str]]) -> int:
    return reported(Path(shown(book)), act)


def _quota(text: str) -> tuple[Path, int]:
    """File and number of "RUN.toml=N"."""
    path, _, number = text.rpartition("=")
    if not path or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--quota must be RUN.toml=N with N >= 1, got {text!r}")
    return Path(path), int(number)


def _whole_run_of(path: Path) -> ComposedSteps:
    """The run that a training config or a request describes, if it is a composition."""
    if "data" in read_toml(path):
        from jaxdp_episodic.tools.train.booked import run_of_config

        return run_of_config(read_config(path), path.parent)
    run = _run_of_request(path)
    if isinstance(run, AdaptiveRun):
        raise NotImplementedError(
            f"step of {path}: a run that adapts at prices or by rules is no "
            "composition, and on no menu"
        )
    return run


def _run_of_request(path: Path) -> ComposedSteps | AdaptiveRun:
    """What a request describes; of a run that adapts the worst composition, if any."""
    request = read_request(path, EpsilonRequest)
    if isinstance(request.step, ComposedSteps):
        return request.step
    if isinstance(request.step, AdaptiveRun):
        same = request.step.composition()
        return request.step if same is None else same
    return compose((request.step, request.num_steps))


def _guarantee(terms: BookTerms) -> str:
    return f"epsilon {terms.epsilon:g} at delta {terms.delta:g} for all runs together"


def _facts(terms: BookTerms) -> list[str]:
    """What is fixed."""
    if isinstance(terms.prices, GdpPrices):
        total = downward(terms.prices.budget.mu, 5)
        prices = (
            f"mu {total} and floors {terms.prices.budget.floors:.3g} in all; a "
            f"run's floor is {terms.prices.default_floor:.3g} unless it states another"
        )
    elif terms.prices.menu.quotas is not None:
        quotas = terms.prices.menu.quotas.items()
        prices = "a menu: " + ", ".join(f"{name} {n} times" for name, n in quotas)
    else:
        menu = terms.prices.menu
        costs = [f"{name} {n}" for name, n in (menu.prices or {}).items()]
        for index, name in enumerate(menu.options):
            if (block := (menu.blocks or {}).get(name, 1)) > 1:
                costs[index] += f" for every {block}"
        prices = f"a menu: {', '.join(costs)}, of {menu.budget} in all"
    rows = {
        "book": terms.name,
        "protected": terms.protected.words,
        "data": f"{terms.protected.data[:16]}… (fingerprint)",
        "guarantee": f"{_guarantee(terms)}, however each was chosen",
        "prices": prices,
    }
    return [f"{name:<12}{value}" for name, value in rows.items()]


def _composed(content: BookContent) -> float | None:
    """Epsilon of what was run, as if fixed in advance; None where it is not known."""
    run, terms = content.composition(), content.terms
    if run is None:
        return None
    return float(epsilon_of(run, delta=terms.delta, method=terms.method))


def _text(content: BookContent, cost: float | None) -> list[str]:
    terms = content.terms
    lines = _facts(terms)
    if content.entries:
        rows = [("entry", "what", "name", "price", "time")]
        for e in content.entries:
            price, time = in_words(e.price), e.time.partition("+")[0]
            rows.append((str(e.number), e.what, e.name, price, time))
        lines += ["", *(f"  {line}" for line in aligned(rows, left=len(rows[0]))), ""]
    for name, value, total in terms.prices.spent(content.paid):
        share = f" ({100 * value / total:.0f} %)"
        lines.append(f"{'spent':<12}{name} {value:.5g} of {total:.5g}{share}")
    left = terms.prices.left(content.paid)
    lines.append(f"{'left':<12}{'closed' if content.is_closed else left}")
    if cost is not None:
        lines.append(
            f"{'information':<12}epsilon {upward(cost, 5)} at delta {terms.delta:g} is "
            "what these runs cost if all were fixed in advance; no guarantee where one "
            "was chosen in view of another"
        )
    elif content.entries:
        lines.append(
            f"{'information':<12}the composition of what was run is not known: there "
            "is a search in it, or a run that adapts at prices or by rules"
        )
    return lines


def _document(content: BookContent, cost: float | None) -> dict[str, Any]:
    terms = content.terms
    entries = [
        {name: value for name, value in e._asdict().items() if name != "about"}
        for e in content.entries
    ]
    spent = terms.prices.spent(content.paid)
    return {
        "book": terms.name,
        "guarantee": {"epsilon": terms.epsilon, "delta": terms.delta},
        "protected": terms.protected.words,
        "data": terms.protected.data,
        "is_closed": content.is_closed,
        "entries": plain(entries),
        "spent": {name: value for name, value, _ in spent},
        "total": {name: total for name, _, total in spent},
        "composition_for_information": {"epsilon": plain(cost), "delta": terms.delta},
        "sha256": content.sha256,
    }


def _shares(content: BookContent) -> list[tuple[str, list[float]]]:
    """Of each entry its name, and what it took of each currency."""
    prices, paid = content.terms.prices, content.paid
    spent = [
        [value for _, value, _ in prices.spent(paid[:number])]
        for number in range(len(paid) + 1)
    ]
    shares = []
    for entry, before, after in zip(content.entries, spent, spent[1:], strict=False):
        took = [new - old for old, new in zip(before, after, strict=True)]
        shares.append((f"{entry.number} {entry.name}", took))
    return shares
