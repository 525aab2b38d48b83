"""A private random search: a secret number of runs, of which the best is released."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.api import rdp
from jaxdp_episodic.accountant.questions.budget import public_budget
from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    curve_to_epsilon,
    tuned_rdp,
)
from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.files.atomic import atomic_folder, write_atomically
from jaxdp_episodic.tools.book.book import Order, Paid, check_in, check_out
from jaxdp_episodic.tools.book.content import TUNE, BookTerms, new_name
from jaxdp_episodic.tools.train.booked import Booking, PartOfSearch, protected_by
from jaxdp_episodic.tools.train.run import RELEASE, run_training
from jaxdp_episodic.tools.train.search_space import Search
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.assemble import Tables, assembled, plan
from jaxdp_episodic.trainer.run.release import STATEMENT

STATE = "search.json"
RUNS = "runs"
CHOSEN = "hyperparameters.json"
_VERSION = 1  # of search.json
_TOLERANCE = 1e-3  # relative error of a run's epsilon, from below
_TOTALS = 9  # evaluations to find a run's epsilon, about
_SMALLEST_SHARE = 1e-4  # smallest tried epsilon of a run, as a share of the whole


class SearchResult(NamedTuple):
    """The outcome of a search. Only ``epsilon`` and the best run may be published."""

    epsilon: float  # of the whole search, *upper bound*; nats
    num_runs: int  # secret
    chosen: int | None  # index of the best run; None if there was no run
    hyperparameters: dict[str, Any]  # of the best run
    score: float  # of the best run


def run_search(
    search: Search,
    folder: Path,
    *,
    resume: bool = False,
    base: Path | None = None,
    console: Console | None = None,
    book: Booking | None = None,
) -> SearchResult:
    """Trains a random number of runs and releases only the best one.

    The number of runs and all hyperparameters are drawn once, from the operating
    system's entropy, and stored before the first run. An interrupted search continues
    with them; drawing again would bias the number, and is refused. The runs are charged
    together; see `tuned_rdp` for the theorem. The first of equal scores wins; a score
    that is not finite loses.

    ``folder`` holds ``search.json`` (number of runs, scores) and ``runs/`` (a folder
    for each, with its own ``release/``), which are **secret**, as is the duration of
    the search. ``release/`` may be published: it is the best run's, with the epsilon of
    the whole search and the hyperparameters.
    """
    if all_processes().count > 1:
        raise NotImplementedError(
            f"a search must run in one process, got {all_processes().count}: every "
            "process would choose other runs"
        )
    console = console or standard_error()
    with run_files.locked(folder):
        name = None if book is None else book.book
        state = (
            _resumed(search, folder, name)
            if resume
            else _started(search, folder, base, console, name)
        )
        budget = SearchBudget(**state["budget"])
        console.print(
            f"each run epsilon {upward(budget.run_epsilon)}, the search "
            f"{upward(budget.epsilon)} at delta {search.delta:.15g}; "
            f"{len(state['runs'])} runs (secret)",
            highlight=False,
        )
        paid = None
        if book is not None:
            paid = _paid(book, search, folder, state, base)
            console.print(f"book: entry {paid.entry.number}, {paid.price}")
        for index, run in enumerate(state["runs"]):
            if run["score"] is not None:
                continue
            console.rule(f"run {index + 1} of {len(state['runs'])}")
            target = folder / RUNS / f"{index:04d}"
            result = run_training(
                search.config(run["values"], budget.run_epsilon),
                target,
                resume=bool(run_files.files_of_a_run(target)),
                title=f"Run {index + 1}",
                base=base,
                console=console,
                book=PartOfSearch(state["name"], paid),
            )
            score = result.scores[search.split]
            value = float(-score.mean if score.name == "rmse" else score.mean)
            run["score"] = value if math.isfinite(value) else "-inf"  # larger is better
            _save(folder, state)
        if book is not None and paid is not None:
            check_out(book.where, folder, paid, steps=len(state["runs"]))
        return _finish(search, folder, state, budget)


def _started(
    search: Search, folder: Path, base: Path | None, console: Console, book: str | None
) -> dict[str, Any]:
    """Draws the search and stores it before anything is trained."""
    if (folder / STATE).exists():
        raise FileExistsError(
            f"{folder} holds a search; resume it, or name another folder"
        )
    budget = search_budget(search, base, console)
    generator = np.random.default_rng()  # the operating system's entropy
    number = search.trials.draw(generator)
    runs = [{"values": search.draw(generator), "score": None} for _ in range(number)]
    for run in runs:  # refuses a wrong value before the first run
        search.config(run["values"], budget.run_epsilon)
    state = {
        "version": _VERSION,
        "name": new_name(),
        "book": book,
        "search": _described(search),
        "budget": budget._asdict(),
        "runs": runs,
    }
    _save(folder, state)
    return state


def _resumed(search: Search, folder: Path, book: str | None) -> dict[str, Any]:
    """The stored search; refuses another description or another book."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no search to resume") from None
    except ValueError as error:
        raise ValueError(f"{folder / STATE}: damaged: {error}") from None
    if state.get("version") != _VERSION or state["search"] != _described(search):
        raise ValueError(
            f"{folder} holds another search: the file has changed since it began"
        )
    if (began := state.get("book")) != book:
        with_it = "without one" if began is None else f"with {began[:12]}…"
        given = "none" if book is None else f"{book[:12]}…"
        said = f"the search in {folder} began {with_it}, got {given}"
        raise ValueError(f"book must be the same on resume: {said}")
    return state


def _described(search: Search) -> dict[str, Any]:
    """The search as plain values after a round trip through JSON."""
    return json.loads(json.dumps(search.to_dict()))


def _save(folder: Path, state: dict[str, Any]) -> None:
    write_atomically(folder / STATE, json.dumps(state, indent=1, allow_nan=False))


def _finish(
    search: Search, folder: Path, state: dict[str, Any], budget: SearchBudget
) -> SearchResult:
    """Chooses the best run, and writes the release."""
    scores = [float(run["score"]) for run in state["runs"]]
    if not scores:
        return SearchResult(budget.epsilon, 0, None, {}, -math.inf)
    best = int(np.argmax(scores))  # the first of equal ones
    values, release = state["runs"][best]["values"], folder / RELEASE
    with atomic_folder(release) as made:
        # Without times, which disclose how many runs came after the best one.
        chosen = folder / RUNS / f"{best:04d}" / RELEASE
        files = {"copy_function": shutil.copyfile, "dirs_exist_ok": True}
        shutil.copytree(chosen, made, **files)
        single = (made / STATEMENT).read_text(encoding="utf-8")
        whole = _statement(search, budget) + single
        (made / STATEMENT).write_text(whole, encoding="utf-8")
        (made / CHOSEN).write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    return SearchResult(budget.epsilon, len(scores), best, values, scores[best])


def _statement(search: Search, budget: SearchBudget) -> str:
    """The statement on the whole search, to precede that of its best run."""
    # What is printed is a bound as well: a target as given, or a cost rounded up.
    if search.epsilon is not None:
        charge = f"epsilon <= {search.epsilon:.15g}"
    elif budget.is_public:
        charge = f"epsilon <= {upward(budget.epsilon, 5)}"
    else:
        charge = "an epsilon that is not stated, as it depends on private sizes, "
    trials = search.trials
    runs = f"{type(trials).__name__} with {float(trials.mean):g} expected runs"
    return (
        "# Privacy of the search that chose this run\n\n"
        f"**{charge} at delta = {search.delta:.15g}**, for this run and its "
        "hyperparameters as the best of a secret, random number of runs "
        f"({runs}; Papernot and Steinke 2022, arXiv:2110.03620). The score is from "
        f"public held-out data ({search.split}). Do not publish the number of "
        "runs, another run, or how long the search took. The statement below is about "
        "this run alone and does not count the choice.\n\n"
    )


class SearchBudget(NamedTuple):
    """The privacy cost of a search."""

    run_epsilon: float  # of each run; nats, at the search's delta
    epsilon: float  # of the whole search, *upper bound*; nats
    is_public: bool  # False if it depends on private sizes


def search_budget(
    search: Search, base: Path | None = None, console: Console | None = None
) -> SearchBudget:
    """Returns the cost of a search; for a target, with the largest runs within it."""
    console = console or Console(quiet=True)
    console.print("computing the cost of the search")
    data, _ = search.config({}, 1.0).training_data(base)
    target, budgets = search.epsilon, dict[float, SearchBudget]()
    priced = (1 if target is None else _TOTALS) * sum(1 for _ in search.variants())
    with ProgressBar(console, "runs priced", priced) as bar:

        def total(run_epsilon: float) -> float:
            curve, is_public = _curve(search, run_epsilon, data, bar)
            found = curve_to_epsilon(DEFAULT_ORDERS, curve, delta=search.delta)
            budgets[run_epsilon] = SearchBudget(run_epsilon, float(found), is_public)
            return budgets[run_epsilon].epsilon

        if target is None:
            assert search.run_epsilon is not None  # exactly one is given
            total(search.run_epsilon)
            return budgets[search.run_epsilon]
        low, high = target * _SMALLEST_SHARE, target
        if not total(low) <= target:
            raise ValueError(
                f"epsilon must be larger for a search with {search.trials!r}, got "
                f"{target:g} at delta {search.delta:g}: runs of epsilon {low:.2g} "
                f"already cost {upward(budgets[low].epsilon)}; expect fewer runs, or "
                "use a smaller eta"
            )
        if total(high) <= target:  # one run, for example
            return budgets[high]

        def excess(run_epsilon: np.ndarray, _: np.ndarray) -> np.ndarray:
            one = float(run_epsilon[0])
            whole = total(one)
            cost = f"runs of epsilon {one:.4g}: the search costs {upward(whole)}"
            console.print(cost, highlight=False)
            return np.atleast_1d(np.log(whole / target))

        ends = np.array([low]), np.array([high])
        found = float(largest_within(excess, *ends, tolerance=_TOLERANCE)[0])
        return budgets[found]


def _curve(
    search: Search, run_epsilon: float, data: ExampleTable, bar: ProgressBar | None
) -> tuple[np.ndarray, bool]:
    """The search's Rényi DP at `DEFAULT_ORDERS`; True if it uses public facts alone."""
    curve = np.zeros(DEFAULT_ORDERS.size)
    is_public, protected = True, set[tuple[Any, ...]]()
    configs = [search.config(values, run_epsilon) for values in search.variants()]
    # Values without effect give equal configs, which are computed once.
    for config in {json.dumps(one.to_dict()): one for one in configs}.values():
        budget = plan(config, data)
        one = rdp(budget.run(budget.num_steps), DEFAULT_ORDERS)
        curve = np.maximum(curve, one)
        step = budget.step
        protected.add((step.privacy_unit, step.neighboring_relation, step.people))
        is_public &= public_budget(budget) is not None
        if bar is not None:
            bar.advance(1)
    if len(protected) > 1:
        raise ValueError(
            "hyperparameters must not change the privacy unit, relation or bounds of "
            f"people, got {len(protected)} different protections"
        )
    return tuned_rdp(search.trials, DEFAULT_ORDERS, curve), is_public


def _paid(
    book: Booking,
    search: Search,
    folder: Path,
    state: dict[str, Any],
    base: Path | None,
) -> Paid:
    """Charges the search before its first run, unless it has paid.

    Before that, each remaining kind of run is tried on zeros: an error costs nothing
    yet. Runs with equal models, learners and steps are tried once.
    """
    runs, run_epsilon = state["runs"], state["budget"]["run_epsilon"]
    left = [run["values"] for run in runs if run["score"] is None]
    configs = [search.config(values, run_epsilon) for values in left]
    for config in {str((c.model, c.learner, c.step)): c for c in configs}.values():
        tables = Tables(config, base, keeps_features=False)
        trainer, evaluations, _ = assembled(config, tables)
        trainer.dry_run(evaluations)
    first = search.config({}, run_epsilon)
    data, _ = first.training_data(base)
    protected = protected_by(first, base)

    def price(terms: BookTerms) -> Mapping[str, Any]:
        tuned, is_public = _curve(search, run_epsilon, data, None)
        if not is_public:
            raise ValueError(
                "run.step.sampling must have a public lower bound, population, in "
                "every sampling without replacement: the book's prices are public, but "
                "this search's depends on private sizes"
            )
        return terms.prices.price_of_search(DEFAULT_ORDERS, tuned, book.floor)

    about = {"search": state["search"]}
    order = Order(TUNE, folder.resolve().name, protected, about, price)
    at_end = None if left else len(runs)
    return check_in(book.where, folder, order, run=state["name"], at_end=at_end)
