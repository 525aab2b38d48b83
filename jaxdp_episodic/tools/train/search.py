"""A private random search: a secret number of runs, of which the best is released.

Its description is a base run, and distributions for its fields.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions import tuning
from jaxdp_episodic.accountant.questions.api import rdp
from jaxdp_episodic.accountant.questions.budget import public_budget
from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    curve_to_epsilon,
    tuned_rdp,
)
from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.files.atomic import atomic_folder, write_atomically
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.book.book import Order, Paid, check_in, check_out
from jaxdp_episodic.tools.book.content import TUNE, BookTerms, new_name
from jaxdp_episodic.tools.requests.request import refuse_other_kind
from jaxdp_episodic.tools.train.run import (
    RELEASE,
    Booking,
    PartOfSearch,
    protected_by,
    run_training,
)
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import CLOSED_FORM, NONE, SCALED
from jaxdp_episodic.trainer.data import fields
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.assemble import Tables, assembled, plan
from jaxdp_episodic.trainer.run.release import STATEMENT

# Most combinations of values that change a run's cost; each needs a calibration.
_MAX_VARIANTS = 64
# Fields of a run that a search sets, or that would break its guarantee.
_FIXED = ("epsilon", "delta", "data", "evaluation", "seed", "version", "type")
# Keys of the run, and of its start, that a run of statistics alone must not have.
_OF_STEPS = ("model", "l2_clip_norm", "clipping", "num_steps", "normalizer")
_OF_A_START = ("kind", "share")
_finite = fields.within(-math.inf, math.inf, "()", rule="be a finite number")
_table = functools.partial(_validation.instance, kinds=dict, words="a table of keys")
_DIMENSIONS = 128  # largest number that a search around a config tries, as in `plan`


def _some(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        shown = _validation.shown(value)
        raise ValueError(f"{name} must be a list of values, got {shown}")
    return tuple(value)


class Choice(fields.CheckedSpec):
    """One of some values, all equally likely."""

    values: Annotated[tuple[Any, ...], _some]

    def draw(self, generator: np.random.Generator) -> Any:
        """Returns one value."""
        return self.values[int(generator.integers(len(self.values)))]


class Integers(fields.CheckedSpec):
    """A whole number from ``low`` to ``high``, both included."""

    low: Annotated[int, fields.whole(-(2**53))]
    high: Annotated[int, fields.whole(-(2**53))]

    def check_values(self) -> None:
        """Refuses an empty range."""
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low}, {self.high}")

    @property
    def values(self) -> range:
        """All values."""
        return range(self.low, self.high + 1)

    def draw(self, generator: np.random.Generator) -> int:
        """Returns one value."""
        return int(generator.integers(self.low, self.high, endpoint=True))


class Uniform(fields.CheckedSpec):
    """A number between ``low`` and ``high``."""

    low: Annotated[float, _finite]
    high: Annotated[float, _finite]

    def check_values(self) -> None:
        """Refuses an empty range."""
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low!r}, {self.high!r}")

    def draw(self, generator: np.random.Generator) -> float:
        """Returns one value."""
        return float(generator.uniform(self.low, self.high))


class LogUniform(Uniform):
    """A number between ``low`` and ``high``, both > 0, with a uniform logarithm."""

    def check_values(self) -> None:
        """Refuses a range with numbers that have no logarithm, or an empty one."""
        super().check_values()
        if not self.low > 0:
            raise ValueError(f"low must be > 0, got {self.low!r}")

    def draw(self, generator: np.random.Generator) -> float:
        """Returns one value."""
        logs = math.log(self.low), math.log(self.high)
        return min(max(math.exp(generator.uniform(*logs)), self.low), self.high)


Distribution = Choice | Integers | Uniform | LogUniform


class Search(fields.CheckedSpec):
    """The target of a search, its number of runs, and the distributions of both."""

    delta: Annotated[float, fields.within(0.0, 1.0, "()")]  # of the whole search
    trials: tuning.Trials  # the distribution of the number of runs
    # Dotted name of a field of the run to its distribution.
    hyperparameters: Mapping[str, Distribution]
    run: Annotated[dict[str, Any], _table]  # the base run, without epsilon and delta
    split: fields.Text = "validation"  # the run with its best score is released
    # Must be true, so that scores are post-processing of the private models. Scores on
    # private held-out data would disclose these.
    held_out_is_public: bool = False
    # Of the whole search; that of each run is calibrated.
    epsilon: fields.Positive | None = None
    run_epsilon: fields.Positive | None = None  # of each; the search's is computed

    def check_values(self) -> None:
        """Refuses what would break the guarantee, and searches without a target."""
        if self.trials.shape:
            shown = _validation.shown(self.trials)
            raise ValueError(f"fields of trials must be single numbers, got {shown}")
        if (self.epsilon is None) == (self.run_epsilon is None):
            raise ValueError(
                "give exactly one of epsilon (of the whole search) and run_epsilon (of "
                f"each run), got {'neither' if self.epsilon is None else 'both'}"
            )
        if self.held_out_is_public is not True:
            raise NotImplementedError(
                "held_out_is_public must be true, as no theorem covers a choice by "
                "scores on private held-out data, got "
                f"{_validation.shown(self.held_out_is_public)}"
            )
        for name in self.hyperparameters:
            if name.split(".")[0] in _FIXED:
                raise ValueError(
                    f"hyperparameters.{name} must be left out: it must be the same for "
                    "all runs"
                )
        if self.run.get("seed") is not None:
            raise ValueError("run.seed must be left out: a fixed seed is not private")
        for name in ("epsilon", "delta"):
            if name in self.run:
                raise ValueError(f"run.{name} must be at the top of the file instead")
        number = math.prod(len(values) for values in self._priced.values())
        if number > _MAX_VARIANTS:
            raise ValueError(
                f"hyperparameters {sorted(self._priced)} change a run's privacy cost: "
                f"they must have at most {_MAX_VARIANTS} combinations, got {number}"
            )

    @functools.cached_property
    def _priced(self) -> dict[str, Any]:
        """The values of the hyperparameters that change a run's privacy cost."""
        priced = {n: d for n, d in self.hyperparameters.items() if is_priced(n)}
        for name, dist in priced.items():
            if not isinstance(dist, Choice | Integers):
                raise NotImplementedError(
                    f"hyperparameters.{name} changes a run's privacy cost, so it must "
                    f"be Choice or Integers, got {type(dist).__name__}"
                )
        return {name: getattr(dist, "values") for name, dist in priced.items()}  # noqa: B009

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Returns hyperparameters of one run, by dotted name."""
        return {name: d.draw(generator) for name, d in self.hyperparameters.items()}

    def variants(self) -> Iterator[dict[str, Any]]:
        """Yields every combination of the values that change a run's privacy cost."""
        for values in itertools.product(*self._priced.values()):
            yield dict(zip(self._priced, values, strict=True))

    def config(self, values: Mapping[str, Any], epsilon: float) -> TrainingConfig:
        """Returns the validated config of a run with these hyperparameters."""
        table = copy.deepcopy(dict(self.run))
        table |= {"epsilon": epsilon, "delta": self.delta, "version": 1}
        for name, value in values.items():
            _set(table, name, value)
        learner, start = table.get("learner"), table.get("start")
        if isinstance(learner, dict) and learner.get("kind") in CLOSED_FORM:
            for name in _OF_STEPS:  # the learner takes none
                table.pop(name, None)
            if isinstance(start, dict):
                kept = {k: v for k, v in start.items() if k not in _OF_A_START}
                table["start"] = {**kept, "kind": learner["kind"]}
        config = TrainingConfig.from_dict(table, where="run")
        if config.adaptive is not None:
            raise ValueError(
                "run.adaptive must be left out: a search has runs fixed in advance"
            )
        split, wanted = self.split, config.evaluation
        if wanted is None or split not in wanted.splits:
            raise ValueError(
                f"run.evaluation.splits must have {split!r}, on which runs are compared"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns the search as plain values, in the form of ``search.json``."""
        table = super().to_dict()
        laws = {name: dist.to_dict() for name, dist in self.hyperparameters.items()}
        del table["hyperparameters"], table["run"]
        settings = table | {"type": "SearchSettings"}
        return {"settings": settings, "laws": laws, "run": dict(self.run)}


def is_priced(name: str) -> bool:
    """True if a field of a run changes its Rényi DP curve at a given epsilon."""
    first = name.split(".")[0]
    priced = ("num_steps", "learner", "learner.kind")
    return first in ("step", "start", "people") or name in priced


def read_search(path: Path, *, held_out_is_public: bool = False) -> Search:
    """Returns the search in a TOML file; paths of data are relative to it."""
    mapping = read_toml(path)
    refuse_other_kind(mapping, "a search", "hyperparameters", "learner", "data")
    if "data" in mapping and "run" not in mapping:
        if not held_out_is_public:
            raise ValueError(
                "--held-out-is-public must be given for a training config, as runs are "
                "compared on its held-out data; give it if these data are public"
            )
        config = read_config(path)  # names what is wrong
        mapping = search_around(mapping, config, path.parent)
    if held_out_is_public:
        mapping["held_out_is_public"] = True
    tables = mapping.get("hyperparameters")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        if not isinstance(table, dict) or "type" not in table:
            raise TypeError(
                f"hyperparameters.{name} must be a table with a type (names with dots "
                f"need quotes), got {_validation.shown(table)}"
            )
    return Search.from_dict(mapping, where="search")


def search_around(
    mapping: Mapping[str, Any], config: TrainingConfig, base: Path
) -> dict[str, Any]:
    """Returns a search's file around a training config, with four expected runs."""
    run = {k: v for k, v in mapping.items() if k not in ("version", "epsilon", "delta")}
    searched: dict[str, Any] = {}
    optimizer, clip = run.get("optimizer"), run.get("l2_clip_norm")
    if isinstance(optimizer, dict) and (rate := optimizer.get("learning_rate")):
        ends = {"low": rate / 4, "high": rate * 4}
        searched["optimizer.learning_rate"] = {"type": "LogUniform", **ends}
    if clip:
        values = [clip / 2, clip, clip * 2]
        searched["l2_clip_norm"] = {"type": "Choice", "values": values}
    if not searched and isinstance(run.get("start"), dict):
        columns, most = (run.get("data") or {}).get("features"), _DIMENSIONS
        if isinstance(columns, list):
            most = min(most, len(columns))
        elif config.features.kind in (NONE, SCALED):  # of others more, or unknown
            shape = config.data.load(TRAIN, base).features.shape[1:]
            most = min(most, math.prod(shape))
        values = sorted({max(1, most // part) for part in (4, 2, 1)})
        searched["start.dimensions"] = {"type": "Choice", "values": values}
    splits = (run.get("evaluation") or {}).get("splits") or ["validation"]
    target = {name: mapping.get(name) for name in ("epsilon", "delta")}
    return {
        "version": 1,
        **target,
        "split": splits[0],
        "held_out_is_public": False,
        "trials": {"type": "NegativeBinomialTrials", "expected_runs": 4.0, "eta": 0.0},
        "hyperparameters": searched,
        "run": run,
    }


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets the field with a dotted name; numbers are indices of lists."""
    *above, last = name.split(".")
    inner: Any = table
    for part in above:
        if isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
            inner = inner[int(part)]
        elif isinstance(inner, dict):
            inner = inner.setdefault(part, {})
        else:
            raise ValueError(f"hyperparameters.{name}: the run has no {part!r}")
    if not isinstance(inner, dict):
        raise ValueError(f"hyperparameters.{name}: the run has no such field")
    inner[last] = value


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
    """Trains a random number of runs and releases only the best one; see `tuned_rdp`.

    All is drawn once: an interrupted search continues with it, as another draw would
    bias the number of runs. All but ``release/`` in ``folder`` is secret.
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
        is_ours = state["version"] == _VERSION and state["search"] == _described(search)
        began, _ = state.get("book"), SearchBudget(**state["budget"])
        if not all(isinstance(name, str) for name in (state["name"], began or "")):
            raise TypeError("name and book must be texts")
        for run in state["runs"]:
            _ = dict(run["values"]), float(run["score"] or 0)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no search to resume") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / STATE}: damaged: {error!r}") from None
    if not is_ours:
        raise ValueError(
            f"{folder} holds another search: the file has changed since it began"
        )
    if began != book:
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
        low = target * _SMALLEST_SHARE

        def excess(run_epsilon: np.ndarray, _: np.ndarray) -> np.ndarray:
            one = float(run_epsilon[0])
            whole = total(one)
            cost = f"runs of epsilon {one:.4g}: the search costs {upward(whole)}"
            console.print(cost, highlight=False)
            return np.atleast_1d(np.log(whole / target))

        start, ends = np.array([target]), (low, target)
        (found,) = largest_within(excess, start, ends, slope=1.0, tolerance=_TOLERANCE)
        if not found:
            raise ValueError(
                f"epsilon must be larger for a search with {search.trials!r}, got "
                f"{target:g} at delta {search.delta:g}: runs of epsilon {low:.2g} "
                f"already cost {upward(budgets[low].epsilon)}; expect fewer runs, or "
                "use a smaller eta"
            )
        return budgets[float(found)]


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
