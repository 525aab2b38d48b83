"""One training run: from a config to a run's file, a report and a release."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant._kernel_cache import keeping_kernels
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.accountant.report.in_words import GUARANTEE, budget_in_words
from jaxdp_episodic.accountant.report.sentences import protected_unit, upward
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.optional import installing
from jaxdp_episodic.tools.book.book import Paid, check_out
from jaxdp_episodic.tools.plots.run import draw_reliability, draw_run
from jaxdp_episodic.tools.train import booked
from jaxdp_episodic.tools.train.booked import Booking, PartOfSearch
from jaxdp_episodic.trainer.config.training_adaptive import Rule
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.run import report as reports, run_files
from jaxdp_episodic.trainer.run.assemble import OwnParts, Tables, assembled
from jaxdp_episodic.trainer.run.checks import (
    contributions_in_log,
    contributions_in_words,
)
from jaxdp_episodic.trainer.run.evaluation import Score, digits
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, StepProgress
from jaxdp_episodic.trainer.run.selection import Selection, choosing_split
from jaxdp_episodic.trainer.run.trainer import Trainer

REPORT = "report.md"
PICTURE = "report.png"
RELIABILITY = "reliability.png"
RELEASE = "release"


class Result(NamedTuple):
    """The outcome of a run."""

    trainer: Trainer  # ``trainer.released`` is the released model
    epsilon: float  # spent, nats; *upper bound*
    # Epsilon of the same noise and steps without the sampling of the examples.
    epsilon_without_last_stage: float
    # Of the released model on every held-out part; only in the first process.
    scores: Mapping[str, Score]
    folder: Path  # the run's folder
    # As ``scores``, of the same run without noise, if the config has `without_noise`.
    without_noise: Mapping[str, Score] = MappingProxyType({})
    selection: Selection | None = None  # of the stage; only in the first process

    def __str__(self) -> str:
        budget, lines = self.trainer.budget, []
        for name, score in self.scores.items():
            lines.append(f"{name:<12}{score}")
            if name in self.without_noise:
                bare = self.without_noise[name].mean
                lines.append(f"{'':<12}{digits(bare)} without noise, not private")
        if self.selection is not None:
            lines += _stages_in_lines(self.selection)
        spent = upward(self.epsilon, 5) if budget.is_private else "inf (not private)"
        if self.trainer.is_seeded and budget.is_private:
            spent += f" if it were not seeded; not private: {reports.SEEDED}"
        trainer, what = self.trainer, f"target {budget.epsilon:.15g}"
        if isinstance(trainer.budget, AdaptiveBudget):
            what = "guarantee"
        unit = budget.step.privacy_unit
        lines.append(
            f"{'epsilon':<12}{spent}   ({what}, delta {budget.delta:.15g}, one {unit})"
        )
        if isinstance(trainer.budget, AdaptiveBudget) and budget.is_private:
            words = budget_in_words(trainer.ledger.budget_charged)
            lines += [f"{name:<12}{text}" for name, text in words if name != GUARANTEE]
        if self.epsilon_without_last_stage > 1.001 * self.epsilon:
            lines.append(
                f"{'':<12}{upward(self.epsilon_without_last_stage, 5)} for the same "
                "noise if the sampling of the examples were not counted"
            )
        lines += [
            f"{'report':<12}{self.folder / REPORT}",
            f"{'to release':<12}{self.folder / RELEASE}",
        ]
        return "\n".join(lines)


def _stages_in_lines(selection: Selection) -> list[str]:
    """The scores of each stage and the reason for the released one, as lines."""
    lines, released = [], selection.stage.name
    for name, scores in selection.scores.items():
        if scores and not lines:
            head = "".join(f"{split:>12}" for split in scores)
            lines.append(f"{'stages':<12}{'':<12}{head}")
        means = "".join(f"{digits(score.mean):>12}" for score in scores.values())
        mark = "   is released" if name == released else ""
        lines.append(f"{'':<12}{name:<12}{means}{mark}")
    if selection.split is None:
        why = f"the last stage, {released}; no choice was made: {selection.reason}"
    else:
        compared, number = list(selection.behind), selection.num_classes
        first = selection.scores[released][selection.split]
        units = "tasks" if first.name == "rmse" else "classes"
        on = f"{number} {units} of {selection.split!r}, which is not protected"
        if len(compared) < len(selection.scores):
            why = (
                f"{released}; {' and '.join(compared)} alone were compared, on all "
                f"{on}: hold out more {units} to compare every stage"
            )
        else:
            why = f"{released}, the best on {on}; compared: {', '.join(compared)}"
    lines.append(f"{'released':<12}{why}")
    whole = [name for name in selection.scores if not {"@", "/"} & set(name)]
    for before, name in itertools.pairwise(whole) if selection.split else ():
        pair = (selection.scores[one][str(selection.split)] for one in (before, name))
        (_, old, *_), (kind, new, *_) = pair
        if not (new < old if kind == "rmse" else new > old):
            lines.append(
                f"{'':<12}{name!r} gained nothing over {before!r} ({digits(new)} "
                f"after {digits(old)}): its share of the budget had no effect"
            )
    return lines


def finished(
    trainer: Trainer,
    folder: Path,
    title: str,
    console: Console,
    without_noise: Mapping[str, Mapping[str, Any]],
    paid: Paid | None = None,
) -> Result:
    """Writes report, picture and release of a run that has completed its steps."""
    records = run_files.read_log(folder)
    more = [] if paid is None else [booked.words_of_book(paid)]
    account, selection = reports.run_statement(trainer, *more), trainer.selection
    private_facts, found = account.facts, contributions_in_log(records)
    if found is not None:
        drawn, complete = found
        words = f"{complete:,} of {drawn:,} that took part were complete"
        console.print(f"contributions (private): {words}", highlight=False)
        private_facts = {**private_facts, "contributions": words}
    for split, score in without_noise.items():
        value = f"{score['name']} {digits(score['mean'])}, not private"
        private_facts = {**private_facts, f"{split} without noise": value}
    picture, stages = None, []
    if selection is not None:
        stages = [*selection.table(), *selection.reliability_table()]
    if importlib.util.find_spec("matplotlib") is None:
        said = f"no picture: {installing('plot')} installs matplotlib"
        console.print(said, highlight=False, markup=False)
    else:
        picture = PICTURE
        draw_run(
            folder / PICTURE,
            epsilons=[(r["step"], float(r["epsilon"])) for r in records],
            stages={} if selection is None else selection.scores,
            released=trainer.released.name,
            losses=[
                (r["step"], r[PRIVATE]["mean_loss"])
                for r in records
                if r.get(PRIVATE, {}).get("num_units")  # an empty sample has none
            ],
            scores=[(r["step"], r[HELD_OUT]) for r in records if HELD_OUT in r],
            target_epsilon=trainer.budget.epsilon,
            without_noise=without_noise,
            meaning=reports.meaning_of(trainer),
            is_guarantee=isinstance(trainer.budget, AdaptiveBudget),
        )
        if selection is not None and selection.reliability:
            draw_reliability(folder / RELIABILITY, selection.reliability)
            stages += ["", f"![accuracy against probability]({RELIABILITY})"]
    shown = {"title": title, "facts": private_facts, "statement": account.statement}
    page = reports.markdown_report(records, picture=picture, stages=stages, **shown)
    write_atomically(folder / REPORT, page, is_private=True)
    write_release(folder / RELEASE, trainer, folder, account)
    scores = {} if selection is None else selection.scores.get(selection.stage.name, {})
    bare = {name: Score(**score) for name, score in without_noise.items()}
    numbers = account.epsilon, account.uncounted
    return Result(trainer, *numbers, scores, folder, bare, selection)


def run_training(
    config: TrainingConfig,
    folder: Path,
    *,
    resume: bool = False,
    title: str = "Training run",
    base: Path | None = None,
    console: Console | None = None,
    features: FixedFeatures | None = None,
    book: Booking | PartOfSearch | None = None,
    rule: Rule | None = None,
    model: Any = None,
    learner: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> Result:
    """Trains as the config describes and writes everything into ``folder``.

    ``release/`` may be published; everything else there is private.

    Compiled kernels are kept in the user's cache folder, unless JAX has one already.

    After ``jax.distributed.initialize`` every process calls this function with the same
    arguments. The first process alone writes into ``folder``.

    Args:
      config: the run.
      folder: made if missing; it must not hold another run.
      resume: continue the run in ``folder``; a run of which nothing was charged starts
        again.
      title: of the report.
      base: folder that paths in the config are relative to.
      console: shows progress; None: standard error.
      features: a fixed function of your own in place of the config's ``features``.
      book: the book that the run is charged to before it samples anything. A run that
        has paid does not pay again, and is resumed with the same book. Or the search
        that the run belongs to, which pays for all of its runs.
      rule: a function of your own, for a config with ``adaptive`` that names none; see
        `Released`.
      model: your own, in place of the config's: a module of flax's nnx or linen, or a
        pair ``(apply, params)``. Initial parameters are public.
      learner: your own: a function of ``apply`` that returns a learner, such as
        ``lambda apply: ProtoNet(apply, ways=5)``.
      optimizer: your own, of optax. Resuming a run with other parts gives a warning, as
        other settings do.
      on_step: called in the first process after every step with a `StepProgress`; its
        ``public`` record may go to a tracker.

    Raises:
      OSError: a file cannot be read or written, or there is no run to resume.
      ValueError: bad data, a target that permits no step, a folder that holds a run
        (without ``resume``) or another one (with it), or a refusal by the book.
      TypeError: an argument of the wrong type.
      RunEndedError: another process has ended.
    """
    own = OwnParts(model, learner, optimizer, rule)
    processes = all_processes()
    with processes.together(), keeping_kernels():
        # A run of which nothing was charged starts again: nothing is repeated.
        begun = resume and processes.shared_value(run_files.was_only_begun(folder))
        resume = resume and not begun
        if processes.is_first:
            console = console or standard_error()
            if begun:
                console.print("nothing was charged yet: the run starts again")
            tables = Tables(config, base, folder=folder, features=features)
            result = _run(
                config, folder, resume, title, base, console, tables, own, book, on_step
            )
        else:
            tables = Tables(config, base, features=features, keeps_features=False)
            result = _run_elsewhere(config, folder, resume, tables, own, book)
        processes.meet()  # the first process has written everything
        return result


def _run(
    config: TrainingConfig,
    folder: Path,
    resume: bool,
    title: str,
    base: Path | None,
    console: Console,
    tables: Tables,
    own: OwnParts,
    book: Booking | PartOfSearch | None,
    on_step: Callable[[StepProgress], None] | None,
) -> Result:
    """`run_training` in the first process."""
    adapts = config.adaptive is not None
    if resume:
        run_files.refuse_without_run(folder)
    else:
        run_files.refuse_other_files(folder)
    with _shown_warnings(console):
        trainer, evaluations, size = assembled(config, tables, own)
    with run_files.locked(folder):
        pays = isinstance(book, Booking)
        booked.refuse_other_way(folder, resume=resume, is_booked=pays)
        if resume:
            with _shown_warnings(console):
                name = None if book is None else book.book
                step = trainer.resume(folder, book=name)
            said = f"resumed after step {step:,}"
            charged = step if adapts else int(trainer.budget.owed(step))
            if charged != step:
                said += f", within an epoch: {charged:,} steps are charged"
            console.print(said)
        _announce(console, trainer, size)
        wanted, paid = config.evaluation, None
        select = None if wanted is None else wanted.select
        if isinstance(book, PartOfSearch):
            paid = book.paid
            trainer.begin(folder, book=book.book, search=book.name)
        elif book is not None:
            choosing_split(trainer, evaluations, select)  # an error costs nothing yet
            trainer.dry_run(evaluations)
            paid = booked.check_in_run(book, trainer, config, base, folder, title)
            entry = f"book: entry {paid.entry.number}, {paid.price}; it has paid"
            console.print(f"{entry}; nothing is paid back", highlight=False)
        budget, taken = trainer.budget, trainer.num_steps_taken

        def shown(progress: StepProgress) -> None:
            if adapts:
                left = f"; left {trainer.ledger.now.left_in_words()}"
            else:
                left = f" of {budget.epsilon:.15g}"
            spent = upward(progress.private_record["epsilon"])
            begun, *kind = kinds[progress.step > first]
            bar.show(progress.step - begun, *kind, text=f"epsilon {spent}{left}")
            if on_step is not None:
                on_step(progress)

        # A step of an adaptive run may also be a noisy score.
        what = "steps" if adapts else "gradient steps"
        first = len(budget.before)
        # Number of steps before those of a kind, their number, and the kind.
        kinds = [
            (0, first, "private statistics"),
            (first, budget.num_steps - first, what),
        ]
        begun, total, what = kinds[taken >= first]
        with ProgressBar(console, what, total, taken - begun) as bar:
            trainer.train(
                folder,
                evaluations=evaluations,
                evaluate_every=None if wanted is None else wanted.every,
                select=select,
                checkpoint_every=config.checkpoint_every,
                on_step=shown,
            )
        if isinstance(book, Booking) and paid is not None:
            check_out(book.where, folder, paid, steps=trainer.num_steps_taken)
        without = {}
        bare = wanted is not None and wanted.without_noise
        if bare and paid is not None:
            console.print(
                "not trained without noise: the next run of a book may be chosen only "
                "by what was released"
            )
        elif bare:
            console.print("once more without noise, to compare (not private)")
            bare_config = _bare(config, budget)
            without = _scores_without_noise(bare_config, tables, folder, own)
        return finished(trainer, folder, title, console, without, paid)


def _run_elsewhere(
    config: TrainingConfig,
    folder: Path,
    resume: bool,
    tables: Tables,
    own: OwnParts,
    book: Booking | PartOfSearch | None,
) -> Result:
    """`run_training` in the other processes, which write and evaluate nothing."""
    wanted = config.evaluation
    with _shown_warnings(Console(quiet=True)):
        trainer, *_ = assembled(config, tables, own, evaluates=False)
        if resume:
            trainer.resume(folder)
        trainer.train(folder)
        if wanted is not None and wanted.without_noise and book is None:
            bare_config = _bare(config, trainer.budget)
            bare, *_ = assembled(bare_config, tables, own, evaluates=False)
            bare.train(folder)
    budget, taken = trainer.budget, trainer.num_steps_charged
    if isinstance(trainer.budget, AdaptiveBudget):
        return Result(trainer, budget.epsilon, budget.epsilon, {}, folder)
    uncounted = reports.epsilon_without_last_stage(budget, taken)
    return Result(trainer, float(budget.spent(taken)), uncounted, {}, folder)


@contextmanager
def _shown_warnings(console: Console) -> Iterator[None]:
    """Prints the library's warnings, each once, without those of JAX."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    home = Path(jax.__file__).parent
    ours = [w for w in caught if not Path(w.filename).is_relative_to(home)]
    for text in dict.fromkeys(str(w.message) for w in ours):
        console.print(f"warning: {text}", highlight=False, markup=False)


def _scores_without_noise(
    bare: TrainingConfig, tables: Tables, folder: Path, own: OwnParts
) -> dict[str, dict[str, Any]]:
    """Trains without noise, in a folder that is removed; returns the last scores."""
    trainer, evaluations, _ = assembled(bare, tables, own)
    temporary = folder / "without-noise"
    shutil.rmtree(temporary, ignore_errors=True)  # a killed run may have left it
    try:
        trainer.train(temporary, checkpoint_every=trainer.budget.num_steps)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _, learner, params = trainer.released
    return {n: score(learner, params)._asdict() for n, score in evaluations.items()}


def _bare(config: TrainingConfig, budget: PrivacyBudget) -> TrainingConfig:
    """The config without noise."""
    steps = config.num_steps
    if steps is None and config.model is not None:
        steps = budget.num_steps
    return dataclasses.replace(
        config,
        epsilon=float("inf"),
        num_steps=steps,
        step=dataclasses.replace(config.step, noise_multiplier=None),
        noise="gaussian",
    )


def _announce(console: Console, trainer: Trainer, size: int) -> None:
    """Prints what the run will do, whom it protects, and the expected contributions."""
    budget, lines = trainer.budget, list[str]()
    step, number, limit = budget.step, 0, ""
    if isinstance(trainer.budget, AdaptiveBudget):
        now = trainer.ledger.now
        lines.append(f"{size:,} parameters; the run chooses among")
        for name, option in now.options.items():
            noise = float(option.noise_multiplier)
            lines.append(f"  {name}: {now.most(name):,} at most, noise {noise:.5g}")
        number, epsilon = now.most(now.training[0]), upward(now.epsilon, 5)
        limit = ", whatever is chosen and whenever the run ends"
    else:
        first, epsilon = len(budget.before), f"{budget.epsilon:.15g}"
        number = budget.num_steps - first
        if first:
            lines.append(f"{first} private statistics")
        if number:
            lines.append(
                f"{size:,} parameters; {number:,} steps with "
                f"{trainer.sampler.expected_units:.1f} clip units ({step.clip_unit}) "
                f"on average; noise multiplier {step.noise_multiplier:.5g}"
            )
        if budget.is_private:
            limit = f"; step {budget.permitted_steps:,} is the last that this permits"
    if number and trainer.complete_units is not None:
        unit, units = str(step.clip_unit), trainer.complete_units
        words = contributions_in_words(units, unit, number)
        lines.append(f"expected (private): {words}")
    if budget.is_private:
        lines.append(
            f"protected: {protected_unit(step)} ({step.neighboring_relation}), "
            f"epsilon <= {epsilon} at delta {budget.delta:.15g}{limit}"
        )
        if budget.planned is not None:
            lines.append(
                "a run that ends earlier than planned, within an epoch, is charged for "
                "the whole epoch"
            )
    else:
        lines.append("[bold]not private[/bold]: epsilon is infinite, there is no noise")
    if trainer.is_seeded:
        lines.append(f"[bold]not private[/bold]: {reports.SEEDED}")
    for line in lines:
        console.print(line, highlight=False)
