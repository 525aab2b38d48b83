"""``jaxdp-episodic book``: one privacy budget for a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.runs import refuse_disjoint
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.book import book, content as contents
from jaxdp_episodic.tools.book.storage import shown
from jaxdp_episodic.tools.cli.command import Options, aligned, facts, waiting
from jaxdp_episodic.tools.plots.figures import draw_book
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from jaxdp_episodic.trainer.config.training_config import read_config

_WIDTH = 10  # of the names of facts
_RULES = {
    "no refunds": "a run pays before it samples anything and gets nothing back, "
    "however it ends: paying only for the steps that were taken is not private if "
    "somebody looked at the run and stopped it",
    "choose by": "what runs release (parameters, scores on people who are not in these "
    "data); a run that is chosen by losses, norms or scores without noise is not "
    "covered",
}


def do_create(o: Options) -> list[str]:
    """The command ``book create``."""
    o.subject = shown(o.file_or_url)
    from jaxdp_episodic.tools.train.run import protected_by, run_of_config

    protected = protected_by(read_config(o.run), o.run.parent)
    total: dict[str, Any] = {"epsilon": o.epsilon, "delta": o.delta}
    total["method"] = o.method or "exact"
    if o.quota and o.menu:
        raise ValueError("give --quota or --menu, got both")
    if not (o.quota or o.menu):
        terms = book.create_book(o.file_or_url, protected, floors=o.floors, **total)
        return facts(_terms(terms) | _RULES, _WIDTH)
    if o.floors is not None:
        raise ValueError("--floors does not go with --quota or --menu")
    files = [(path, 0) for path in o.menu]
    for text in o.quota:
        path, _, number = text.rpartition("=")
        if not path or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--quota must be RUN.toml=N with N >= 1, got {text!r}")
        files.append((Path(path), int(number)))
    menu: dict[str, Any] = {}
    with waiting("computing the cost of the menu"):
        for path, _ in files:
            if path.stem in menu:
                raise ValueError(
                    "files of a menu must have different names, got two named "
                    f"{path.stem!r}"
                )
            if "data" in read_toml(path):  # a training config
                menu[path.stem] = run_of_config(read_config(path), path.parent)
                continue
            menu[path.stem] = run = _run_of_request(path)
            if isinstance(run, AdaptiveRun):
                raise NotImplementedError(
                    f"step of {path}: an adaptive run with prices or rules is no "
                    "composition, so it cannot be on a menu"
                )
        quotas = {path.stem: number for path, number in files} if o.quota else None
        total |= {"menu": menu, "quotas": quotas}
        terms = book.create_book(o.file_or_url, protected, **total)
    return facts(_terms(terms) | _RULES, _WIDTH)


def do_charge(o: Options) -> list[str]:
    """The command ``book charge``."""
    o.subject = shown(o.file_or_url)
    run, name = _run_of_request(o.file), o.name or o.file.stem
    with waiting("computing its price"):
        entry = book.charge_query(o.file_or_url, run, name=name, floor=o.floor)
    return [f"entry {entry.number}: {contents.in_words(entry.price)}; it is paid"]


def do_show(o: Options) -> list[str]:
    """The command ``book show``."""
    o.subject = shown(o.file_or_url)
    content = book.read_book(o.file_or_url)
    terms, paid = content.terms, content.paid
    spent = terms.prices.spent(paid)
    if o.plot is not None:
        totals = [terms.prices.spent(paid[:n]) for n in range(len(paid) + 1)]
        amounts = np.array([[value for _, value, _ in one] for one in totals], float)
        names = [f"{entry.number} {entry.name}" for entry in content.entries]
        shares = list(zip(names, np.diff(amounts, axis=0).tolist(), strict=False))
        draw_book(spent, shares, o.plot, title=_guarantee(terms))
    with waiting("composing the runs, for information"):
        run, cost = content.composition(), None
        if run is not None:
            cost = float(epsilon_of(run, delta=terms.delta, method=terms.method))
    if not o.json:
        return _text(content, cost)
    entries = [entry._asdict() for entry in content.entries]
    for entry in entries:
        del entry["about"]
    document = {
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
    return [json.dumps(document, allow_nan=False)]


def do_close(o: Options) -> list[str]:
    """The command ``book close``."""
    o.subject = shown(o.file_or_url)
    content = book.close_book(o.file_or_url)
    if content.is_closed:
        return ["it was closed already"]
    return [f"closed; {_guarantee(content.terms)}, which does not shrink"]


def _run_of_request(path: Path) -> ComposedSteps | AdaptiveRun:
    """The run of a request; an adaptive run as its worst composition, if it has one."""
    request = read_request(path, EpsilonRequest)
    step: Any = request.step
    if isinstance(step, AdaptiveRun):
        return step.composition() or step
    refuse_disjoint(step, "a book")
    if isinstance(step, ComposedSteps):
        return step
    return compose((step, request.num_steps))


def _guarantee(of: contents.BookTerms) -> str:
    return f"epsilon {of.epsilon:.15g} at delta {of.delta:.15g} for all runs together"


def _terms(terms: contents.BookTerms) -> dict[str, str]:
    """The fixed terms of a book, by name."""
    if isinstance(terms.prices, contents.GdpPrices):
        total = downward(terms.prices.budget.mu, 5)
        prices = (
            f"mu {total} and floors {terms.prices.budget.floors:.3g} in all; a "
            f"run's floor is {terms.prices.default_floor:.3g} unless it states another"
        )
    elif (quotas := terms.prices.menu.quotas) is not None:
        prices = "a menu: " + ", ".join(
            f"{name} {n} times" for name, n in quotas.items()
        )
    else:
        menu = terms.prices.menu
        costs = [f"{name} {n}" for name, n in (menu.prices or {}).items()]
        for index, name in enumerate(menu.options):
            if (block := (menu.blocks or {}).get(name, 1)) > 1:
                costs[index] += f" for every {block}"
        prices = f"a menu: {', '.join(costs)}, of {menu.budget} in all"
    return {
        "book": terms.name,
        "protected": terms.protected.words,
        "data": f"{terms.protected.data[:16]}… (fingerprint)",
        "guarantee": f"{_guarantee(terms)}, however each was chosen",
        "prices": prices,
    }


def _text(content: contents.BookContent, cost: float | None) -> list[str]:
    terms = content.terms
    lines = facts(_terms(terms), _WIDTH)
    if content.entries:
        rows = [("entry", "what", "name", "price", "time")]
        for e in content.entries:
            price, time = contents.in_words(e.price), e.time.partition("+")[0]
            rows.append((str(e.number), e.what, e.name, price, time))
        lines += ["", *(f"  {line}" for line in aligned(rows, left=len(rows[0]))), ""]
    for name, value, total in terms.prices.spent(content.paid):
        spent = f"{name} {value:.5g} of {total:.5g} ({100 * value / total:.0f} %)"
        lines += facts({"spent": spent}, _WIDTH)
    last = {"left": "closed" if content.is_closed else terms.prices.left(content.paid)}
    if cost is not None:
        last["if planned"] = (
            f"epsilon {upward(cost, 5)} at delta {terms.delta:.15g} is what these runs "
            "would cost if all had been fixed in advance; no guarantee where one "
            "was chosen in view of another"
        )
    elif content.entries:
        last["if planned"] = (
            "the composition of these runs is not known: one is a search, or an "
            "adaptive run with prices or rules"
        )
    return [*lines, *facts(last, _WIDTH)]
