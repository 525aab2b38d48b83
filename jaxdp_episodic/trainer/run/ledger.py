"""The charges of a run, refused beyond the budget, and the description of a run.

Inside `Ledger.writing_to` a charge is in the run's file before it counts; elsewhere it
is in memory only. An adaptive run's choice is written together with its charge.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
    SpentAhead,
    public_budget,
)
from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.files.json_file import differences
from jaxdp_episodic.trainer.config.training_adaptive import Released, ScoreThen
from jaxdp_episodic.trainer.config.training_parts import FIXED
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.gradient.processes import Processes
from jaxdp_episodic.trainer.run.evaluation import PrivateValidation
from jaxdp_episodic.trainer.run.ledger_file import (
    LedgerContent,
    LedgerError,
    content_of,
)
from jaxdp_episodic.trainer.run.store import Mark, RunStore, Saved


class Ledger:
    """Counts the charges of a run, planned or adaptive, and refuses one too many."""

    def __init__(
        self,
        budget: Any,
        options: Sequence[str] = (),
        *,
        charged: int = 0,
        mark: Mark | None = None,
        has_ended: bool = False,
    ) -> None:
        if not 0 <= charged <= budget.permitted_steps:
            raise ValueError(
                "charged must lie in 0 .. permitted_steps "
                f"({budget.permitted_steps}), got {charged}"
            )
        # ``now`` is an adaptive run's budget after all choices.
        self._budget = self._before = self.now = budget
        self._adapts = isinstance(budget, AdaptiveBudget)
        self.charged = self._begun = charged
        self.mark = mark  # the run's file after the last charge; None without a file
        self._store: RunStore | None = None
        self._spent: SpentAhead | None = None
        self._session = ""  # in which this process may have charged last
        # An adaptive run's choices, in order; the last one may not be charged yet.
        self.options, self.has_ended = list[str](), False
        for name in options:
            self.choose(name)
        self.has_ended = has_ended

    @property
    def budget_charged(self) -> AdaptiveBudget:
        """The adaptive budget after all charges, without a choice not yet charged."""
        return self._before if len(self.options) > self.charged else self.now

    @property
    def is_public(self) -> bool:
        """False if epsilons were computed from private sizes; see `public_budget`."""
        return self._adapts or public_budget(self._budget) is not None

    def charge(self) -> int:
        """Charges one step, returns their number; only then may the step be taken."""
        budget = self._budget
        if self.charged >= budget.permitted_steps:
            raise BudgetExhaustedError(
                f"step {self.charged + 1} would exceed epsilon={budget.epsilon:g} at "
                f"delta={budget.delta:g}: {budget.permitted_steps} steps are permitted"
            )
        self._begun = self.charged + 1
        if self._store is not None:
            self._store.charge(*self._kind(self._begun), self._begun)
            self.mark = self._store.mark
        self.charged = self._begun
        return self.charged

    def choose(self, name: str) -> None:
        """Makes an option, if it is permitted, the next to be charged."""
        if self.has_ended:
            raise ValueError("the run has chosen to end and takes no more steps")
        self.now.option(name)
        if not self.now.can(name):
            raise BudgetExhaustedError(
                f"option {name!r} is used up or not permitted now; left are "
                f"{self.now.left_in_words()}"
            )
        self._before, self.now = self.now, self.now.charge(name)
        self.options.append(name)

    def next_after(self, taken: int, ask: Callable[[], str | None]) -> str | None:
        """Returns the kind of the next step, chosen once; None: the run is over."""
        if not self._adapts:
            return self.name_of(taken + 1)
        if taken >= len(self.options) and not self.has_ended:
            name = None
            if taken < len(self.now.first):
                name = self.now.first[taken]
            elif not self.is_over(taken):
                name = ask()
            if name is None:
                self.end()
            else:
                self.choose(name)
        return self.options[taken] if taken < len(self.options) else None

    def end(self) -> None:
        """Records, in the file too, that an adaptive run has chosen to end."""
        if self._store is not None:
            self._store.end()
        self.has_ended = True

    def is_over(self, taken: int) -> bool:
        """Returns whether a run is over after this many completed steps."""
        if not self._adapts:
            return taken >= self._budget.num_steps
        if taken < len(self.options):
            return False
        if self.has_ended or taken < len(self.now.first):
            return self.has_ended
        return not any(map(self.now.can, self.now.options))

    def name_of(self, number: int) -> str:
        """Returns the name of the kind of a charged step."""
        if self._adapts:
            return self.options[number - 1]
        # All phases except the last have one step.
        return f"phase {min(number, len(self._budget.before) + 1)}"

    def turn(self, number: int) -> int:
        """Returns how many gradient steps were charged before a step."""
        if not self._adapts:
            return number - 1 - len(self._budget.before)
        return sum(name in self._budget.training for name in self.options[: number - 1])

    def _kind(self, number: int) -> tuple[str, GaussianStep | None]:
        """The name of a step, and its description unless the file's facts have it."""
        if self._adapts:
            return self.name_of(number), None
        phases = self._budget.phases
        return self.name_of(number), phases[min(number, len(phases)) - 1][0]

    @contextmanager
    def writing_to(
        self, store: RunStore, environment: Mapping[str, Any]
    ) -> Iterator[None]:
        """Charges to a file, and first writes the charges that are only in memory."""
        found = store.mark.charged
        # One more than ours is our own charge, interrupted before it was counted.
        self.charged = self._begun = max(self.charged, found)
        store.begin_session(environment)
        self._session, self.mark = store.session, store.mark
        for number in range(found + 1, self.charged + 1):
            store.charge(*self._kind(number))
        try:
            self._store, self.mark = store, store.mark
            yield
        finally:
            self._store = None

    def cost_of(self, number: int, is_seeded: bool) -> str:
        """Returns what an error between a step's charge and release has cost."""
        if is_seeded:
            return (
                f"Step {number} was charged and not released. The run has a seed: it "
                "repeats the step when it is resumed."
            )
        budget = self._budget
        if self._adapts:
            left = self.now.left_in_words()
            cost = f"It was of the option {self.name_of(number)!r}; left are {left}"
        elif not budget.is_private:
            cost = "Epsilon is infinite"
        else:
            before = upward(float(budget.spent(number - 1))) if number > 1 else "0"
            after = upward(float(budget.spent(number)))
            cost = f"It raised epsilon from {before} to {after} of {budget.epsilon:g}"
        return (
            f"Step {number} was charged and not released: it is lost. {cost}; resume "
            "goes on with the next step."
        )

    def record(self, step: int, scores: Sequence[ScoreThen]) -> dict[str, Any]:
        """Returns the public part of a step's log record, without its number."""
        if not self._adapts:
            if self._spent is None:
                self._spent = SpentAhead(self._budget)
            return {"epsilon": self._spent.at(step) if step else 0.0}
        # The guarantee is that of the whole budget, from the first release on.
        record: dict[str, Any] = {"epsilon": self._budget.epsilon}
        if step:
            record["option"] = self.options[step - 1]
        record["left"] = self.now.left
        if scores and scores[-1].release == step:
            record["score"] = scores[-1].value
            record["score_noise"] = scores[-1].deviation
        return record

    def check(self, store: RunStore) -> None:
        """Refuses another run's file, and one in which the run went on elsewhere."""
        self.refuse_other(content := content_of(store))
        if self.mark is not None and not store.contains(self.mark):
            raise LedgerError(
                f"{store.path} is not what the run wrote: it was replaced, or an old "
                "copy was put back"
            )
        found, ours = store.mark.charged, 0 if self.mark is None else self.mark.charged
        # One more than ours may be our own interrupted charge, or another process's.
        is_other = found > ours and store.session_of(found) != self._session
        is_other = is_other or (content.has_ended and not self.has_ended)
        if found > self._begun or is_other:
            raise FileExistsError(
                f"the run has gone on: {_validation.steps_are(found)} charged in its "
                f"file, this run is at step {self.charged}; resume it again"
            )

    def refuse_other(self, content: LedgerContent) -> None:
        """Raises LedgerError if the file has another budget, other steps or choices."""
        budget = self._budget
        if self._adapts:
            number, theirs = min(len(self.options), content.charged), content.adaptive
            same = theirs is not None and theirs.to_dict() == budget.to_dict()
            is_ours = same and content.choices[:number] == self.options[:number]
            why = (
                "it has another budget, or other choices were made (other options, "
                "quotas, prices, noise or sampling)"
            )
        else:
            planned = budget.phases if budget.before else budget.phases[-1:]
            pairs = list(zip(content.groups, planned, strict=False))
            same = len(pairs) == len(content.groups) and all(
                ours == theirs for (ours, _), (theirs, _) in pairs
            )
            full = all(count == most for (_, count), (_, most) in pairs[:-1])
            is_ours = content.adaptive is None and same and full
            is_ours = is_ours and content.planned == budget.planned
            why = (
                "it charges other steps than this one takes (another sampling, noise, "
                "population, privacy unit or number of epochs)"
            )
        if not is_ours:
            raise LedgerError(f"the run's file is of another run: {why}")


def resumed_run(
    store: RunStore,
    budget: Any,
    run: Mapping[str, Any],
    kinds: Mapping[str, str],
    book: str | None,
) -> tuple[Saved, Ledger]:
    """Returns a run's saved state and its ledger; errors as of `Trainer.resume`."""
    content, saved = content_of(store), store.saved()
    if saved is None:
        raise LedgerError(
            f"{store.path} has charges, and no checkpoint: its process ended before it "
            "could write one. They stay charged: begin a run in another folder, and "
            "compose both ledgers"
        )
    refuse_other_run(saved.run, run)
    if saved.last_release or any(store.releases(after=saved.taken)):
        refuse_other_state(saved.kinds, kinds)
    Ledger(budget).refuse_other(content)
    content.refuse_other_book(book)
    if not saved.taken <= content.charged <= budget.permitted_steps:
        raise LedgerError(
            f"{store.path} has {content.charged} charged steps; the checkpoint "
            f"contains {saved.taken}, and the target permits {budget.permitted_steps}"
        )
    how = {"charged": content.charged, "has_ended": content.has_ended}
    return saved, Ledger(budget, content.choices, mark=store.mark, **how)


class RuleError(ValueError):
    """A rule raised, or returned no permitted option; nothing was charged for it."""


def ask_rule(rule: Any, run: Any) -> str | None:
    """Returns the option that a rule chooses, None at the run's end; else RuleError."""
    number, now, before = run.num_steps_taken, run.ledger.now, run.ledger.options
    taken, left = MappingProxyType(now.taken), MappingProxyType(now.left)
    last, where = before[-1] if before else None, f"after {number:,} releases"
    released = Released(number, run.params, run.scores, taken, left, last)
    try:
        choice = rule(released)
    except Exception as error:
        raise RuleError(
            f"rule raised {type(error).__name__} {where}: {error}; nothing was "
            "charged, and the run can go on with another rule"
        ) from error
    if len(before) > number:  # else the next step would be another than is charged
        raise RuleError(f"rule must take no steps of its run, took some {where}")
    if choice is None:
        return None
    if not isinstance(choice, str) or choice not in now.options:
        raise RuleError(
            f"rule must return one of {sorted(now.options)}, or None to end the "
            f"run, got {_validation.shown(choice)} {where}"
        )
    if not now.can(choice):
        raise RuleError(
            f"rule returned {choice!r} {where}, which is used up or not permitted now; "
            f"left are {now.left_in_words()}"
        )
    return choice


def check_rule(budget: Any, rule: Any, checks: Mapping[str, Any]) -> None:
    """Refuses a rule without an adaptive budget, and such a budget without a rule."""
    if not isinstance(budget, AdaptiveBudget):
        kind = PrivacyBudget if rule is None and not checks else AdaptiveBudget
        _validation.instance("budget", budget, kind, f"of type {kind.__name__}")
    elif not callable(rule):
        raise TypeError(f"rule must be a function, got {_validation.shown(rule)}")


def scores_in(
    columns: Any, checks: Mapping[str, PrivateValidation]
) -> tuple[ScoreThen, ...]:
    """Returns the noisy scores in a state's columns, in order."""
    if not checks:
        return ()
    names, found = list(checks), []
    arrays = (np.asarray(columns[name]) for name in ("release", "check", "value"))
    for release, check, value in zip(*arrays, strict=True):
        if release:
            name = names[check]
            found.append(ScoreThen(int(release), name, *checks[name].score(value)))
    return tuple(found)


# --- What a run is ---

# Keys of a run's description that determine its epsilon or its data.
_ACCOUNTED = frozenset(
    "step before target units data seed l2_clip_norm clipping noise adaptive checks"
    "".split()
)
# Depth of nested functions and values that a part's description shows.
_DEPTH = 8
# Most characters of a part's repr.
_MOST_SHOWN = 2000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Packages on which draws and sums depend.
_PACKAGES = ("jaxdp-episodic", "jax", "jaxlib", "numpy", "randomgen", "flax", "optax")


def described_run(
    run: Any, seed: int | None, rule: Any, settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns what a trainer's run is; `refuse_other_run` compares it."""
    budget, clipping = run.budget, run.clipping
    choices = {}
    if isinstance(budget, AdaptiveBudget):
        adaptive = budget.to_dict() | {"runs": len(budget.runs)}
        # Stored runs have the options in the same table as these keys.
        taken = [name for name in budget.options if name in adaptive]
        if taken:
            raise ValueError(
                f"options must not be named {sorted(adaptive)}, which are keys of a "
                f"run's description, got {taken[0]!r}"
            )
        steps = {name: described_step(one) for name, one in budget.options.items()}
        choices = {
            "checks": {name: one.described() for name, one in run.checks.items()},
            "rule": getattr(rule, "to_dict", lambda: getattr(rule, "__name__", "?"))(),
            "adaptive": adaptive | steps,
        }
    return {
        "step": described_step(budget.step),
        "before": [described_step(step) for step in budget.before],
        "target": {
            "epsilon": str(budget.epsilon),
            "delta": budget.delta,
            "num_steps": budget.num_steps,
        },
        "learner": described_learner(run.learner),
        # By level, units without records included: a message can name what is missing.
        "units": run.data.num_units,
        "data": run.data.fingerprint,
        "seed": "from the operating system" if seed is None else seed,
        **({} if clipping.kind == FIXED else {"clipping": clipping.to_dict()}),
        "l2_clip_norm": run.l2_clip_norm,
        "noise": run.noise,
        "normalizer": run.normalizer,
        "shots": run.parts.shots,
        "settings": dict(settings or {}),
        **choices,
    }


def described_step(step: GaussianStep) -> dict[str, Any]:
    """Returns the step without its population, which the data's fingerprint covers."""
    fields = step.to_dict()
    return {k: fields[k] for k in fields if k not in ("version", "type", "population")}


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and its plain fields."""
    plain: dict[str, Any] = {"type": type(learner).__name__}
    if dataclasses.is_dataclass(learner):
        for field in dataclasses.fields(learner):
            value = getattr(learner, field.name)
            if isinstance(value, bool | int | float | str):
                plain[field.name] = value
    return plain


def described_part(value: Any, depth: int = 0) -> Any:
    """Returns a user's own part as plain values that differ between different parts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth == _DEPTH:
        return name
    if isinstance(value, Mapping):
        return {str(k): described_part(v, depth + 1) for k, v in value.items()}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return [described_part(one, depth + 1) for one in value]
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return {"partial": described_part(parts, depth + 1)}
    if code := getattr(value, "__code__", None):
        inside = zip(code.co_freevars, value.__closure__ or (), strict=True)
        given = {k: described_part(cell.cell_contents, depth + 1) for k, cell in inside}
        return {"function": f"{value.__module__}.{value.__qualname__}", **given}
    return {"type": name, "shown": _ADDRESS.sub("", repr(value))[:_MOST_SHOWN]}


class RunMismatchError(ValueError):
    """A checkpoint, or another process, belongs to a run with other settings."""


def refuse_other_run(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to resume if accounted settings differ; warns of other differences."""
    found = differences(saved, wanted, "in the checkpoint", "now")
    accounted = {k: found[k] for k in found if re.split(r"\W", k)[0] in _ACCOUNTED}
    if accounted:
        raise RunMismatchError(
            f"the checkpoint is of another run: {_listed(accounted)}"
        )
    if found:
        warnings.warn(
            f"the run goes on with other settings than before: {_listed(found)}",
            stacklevel=2,
        )


def check_run(processes: Processes, run: Mapping[str, Any]) -> None:
    """Refuses a process whose run or versions differ from the first process's."""
    if processes.count == 1:
        return
    own = json.loads(json.dumps(run))
    first = processes.shared_value(own)
    if found := differences(first, own, "in the first process", "here"):
        raise RunMismatchError(
            f"process {processes.index} of {processes.count} has another run than the "
            f"first: {_listed(found)}"
        )
    processes.meet()


def _listed(found: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {words}" for key, words in found.items())


# Read from files once: what a process has imported stays the same.
_version = functools.cache(version)


def described_versions() -> dict[str, str]:
    """Returns the versions and settings on which draws and sums depend."""
    config: Any = jax.config  # its flags are made at run time
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        **versions,
        "matmul_precision": str(config.jax_default_matmul_precision),
        "x64": str(bool(config.jax_enable_x64)),
    }


def described_opening(
    run: Mapping[str, Any], versions: Mapping[str, str], truncation: Truncation | None
) -> dict[str, str]:
    """Returns the environment of a process that charges, for the run's file."""
    more = {} if truncation is None else {"people": str(truncation)}
    if "clipping" in run:
        more["clipping"] = json.dumps(run["clipping"])
    machine = f"{platform.system()} {platform.machine()}"
    return {"machine": machine, **versions, **more}


def refuse_other_state(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses a checkpoint whose arrays are not those of this run's state."""
    if found := differences(saved, wanted, "in the checkpoint", "now"):
        first = _listed(dict(list(found.items())[:5]))
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunMismatchError(
            "the checkpoint is of another model or optimizer: resume with the run's "
            f"own ({first}{more})"
        )
