"""One training run: from a config to a run's file, a report and a release.

A run of a book is charged to it before it samples anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import optax
from rich.console import Console

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant._kernel_cache import keeping_kernels
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.report.in_words import GUARANTEE, budget_in_words
from jaxdp_episodic.accountant.report.sentences import protected_unit, upward
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.optional import installing
from jaxdp_episodic.tools.book import book as books
from jaxdp_episodic.tools.book.content import TRAIN, TUNE, Protected
from jaxdp_episodic.tools.plots.run import draw_reliability, draw_run
from jaxdp_episodic.trainer.config.training_adaptive import Rule
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.splits import TRAIN as TRAINING_DATA
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.run import report as reports, run_files
from jaxdp_episodic.trainer.run.assemble import OwnParts, Tables, assembled, budget_of
from jaxdp_episodic.trainer.run.checks import contributions_in_words
from jaxdp_episodic.trainer.run.evaluation import Score, digits
from jaxdp_episodic.trainer.run.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.run.loop import Selection, choosing_split
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, StepProgress
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
    paid: books.Paid | None = None,
) -> Result:
    """Writes report, picture and release of a run that has completed its steps."""
    records = run_files.read_log(folder)
    more = [] if paid is None else [_words_of_book(paid)]
    account, selection = reports.run_statement(trainer, *more), trainer.selection
    private_facts, found = account.facts, run_files.contributions_in_log(records)
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
    own, wanted = OwnParts(model, learner, optimizer, rule), config.evaluation
    processes = all_processes()
    is_first = processes.is_first
    if not is_first:
        console = Console(quiet=True)
    elif console is None:
        console = standard_error()
    with processes.together(), keeping_kernels(), contextlib.ExitStack() as stack:
        # A run of which nothing was charged starts again: nothing is repeated.
        begun = resume and processes.shared_value(run_files.was_only_begun(folder))
        resume = resume and not begun
        if begun:
            console.print("nothing was charged yet: the run starts again")
        if is_first and resume:
            run_files.refuse_without_run(folder)
        elif is_first:
            run_files.refuse_other_files(folder)
        else:
            stack.enter_context(_shown_warnings(console))
        cache = folder if is_first else None
        tables = Tables(
            config, base, folder=cache, features=features, keeps_features=is_first
        )
        with _shown_warnings(console):
            trainer, evaluations, size = assembled(
                config, tables, own, evaluates=is_first
            )
        pays, paid = isinstance(book, Booking), None
        if is_first:
            stack.enter_context(run_files.locked(folder, lends=True))
            _refuse_other_way(folder, resume=resume, is_booked=pays)
        if resume:
            name = book.book if is_first and book is not None else None
            with _shown_warnings(console):
                trainer.resume(folder, book=name)
        select = None if wanted is None else wanted.select
        if is_first:
            _announce(console, trainer, size, is_resumed=resume)
        if is_first and isinstance(book, PartOfSearch):
            paid = book.paid
            trainer.begin(folder, book=book.book, search=book.name)
        elif is_first and isinstance(book, Booking):
            choosing_split(trainer, evaluations, select)  # an error costs nothing yet
            trainer.dry_run(evaluations)
            paid = _check_in(book, trainer, config, base, folder, title)
            entry = f"book: entry {paid.entry.number}, {paid.price}; it has paid"
            console.print(f"{entry}; nothing is paid back", highlight=False)
        with _progress(console, trainer, on_step) as shown:
            trainer.train(
                folder,
                evaluations=evaluations,
                evaluate_every=None if wanted is None else wanted.every,
                select=select,
                checkpoint_every=config.checkpoint_every,
                on_step=shown,
            )
        if isinstance(book, Booking) and paid is not None:
            books.check_out(book.where, folder, paid, steps=trainer.num_steps_taken)
        without: dict[str, dict[str, Any]] = {}
        if wanted is not None and wanted.without_noise:
            if pays or paid is not None:
                console.print(
                    "not trained without noise: the next run of a book may be chosen "
                    "only by what was released"
                )
            else:
                console.print("once more without noise, to compare (not private)")
                without = _scores_without_noise(
                    config, trainer.budget, tables, folder, own
                )
        if is_first:
            result = finished(trainer, folder, title, console, without, paid)
        else:
            account = reports.run_statement(trainer)
            result = Result(trainer, account.epsilon, account.uncounted, {}, folder)
        processes.meet()  # the first process has written everything
        return result


@contextlib.contextmanager
def _progress(
    console: Console, trainer: Trainer, on_step: Callable[[StepProgress], None] | None
) -> Iterator[Callable[[StepProgress], None]]:
    """Shows a run's steps; yields what is called after each."""
    budget, taken = trainer.budget, trainer.num_steps_taken
    adapts, first = isinstance(budget, AdaptiveBudget), len(budget.before)
    # A step of an adaptive run may also be a noisy score.
    what = "steps" if adapts else "gradient steps"
    # Number of steps before those of a kind, their number, and the kind.
    kinds = [
        (0, first, "private statistics"),
        (first, budget.num_steps - first, what),
    ]
    begun, total, what = kinds[taken >= first]
    with ProgressBar(console, what, total, taken - begun) as bar:

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

        yield shown


@contextlib.contextmanager
def _shown_warnings(console: Console) -> Iterator[None]:
    """Prints the library's warnings, each once, without those of JAX."""
    with _validation.recorded_warnings() as texts:
        yield
    for text in texts:
        console.print(f"warning: {text}", highlight=False, markup=False)


def _scores_without_noise(
    config: TrainingConfig,
    budget: PrivacyBudget,
    tables: Tables,
    folder: Path,
    own: OwnParts,
) -> dict[str, dict[str, Any]]:
    """Trains without noise, in a folder that is removed; returns the last scores."""
    steps, is_first = config.num_steps, all_processes().is_first
    if steps is None and config.model is not None:
        steps = budget.num_steps
    bare = dataclasses.replace(
        config,
        epsilon=float("inf"),
        num_steps=steps,
        step=dataclasses.replace(config.step, noise_multiplier=None),
        noise="gaussian",
    )
    trainer, evaluations, _ = assembled(bare, tables, own, evaluates=is_first)
    temporary = folder / "without-noise"
    if not is_first:  # it writes and evaluates nothing
        trainer.train(temporary)
        return {}
    shutil.rmtree(temporary, ignore_errors=True)  # a killed run may have left it
    try:
        trainer.train(temporary, checkpoint_every=trainer.budget.num_steps)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _, learner, params = trainer.released
    return {n: score(learner, params)._asdict() for n, score in evaluations.items()}


def _announce(
    console: Console, trainer: Trainer, size: int, *, is_resumed: bool
) -> None:
    """Prints what the run will do, whom it protects, and the expected contributions."""
    budget, lines, taken = trainer.budget, list[str](), trainer.num_steps_taken
    step, number, limit = budget.step, 0, ""
    if is_resumed:
        lines.append(f"resumed after step {taken:,}")
        if not isinstance(trainer.budget, AdaptiveBudget):
            charged = int(budget.owed(taken))
            if charged != taken:
                lines[0] += (
                    f", within an epoch: {_validation.steps_are(charged)} charged"
                )
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


# --- Runs that are charged to a book ---


@dataclasses.dataclass(frozen=True)
class Booking:
    """The book that a run is charged to.

    Attributes:
      where: path or URL.
      floor: the run's, in a book without a menu; None: a hundredth of the book's delta.
    """

    where: str
    floor: float | None = None

    @property
    def book(self) -> str:
        """The book's name."""
        return books.read_book(self.where).terms.name


class PartOfSearch(NamedTuple):
    """The search that a run belongs to; it is charged as a whole."""

    name: str  # of the search, in its state
    paid: books.Paid | None  # the search's entry in a book; None: there is no book

    @property
    def book(self) -> str | None:
        """The book's name, or None."""
        return None if self.paid is None else self.paid.terms.name


def protected_by(config: TrainingConfig, base: Path | None) -> Protected:
    """Returns whom a run protects, and in which data: as loaded, before truncation."""
    data = config.data.load(TRAINING_DATA, base)
    step = config.step_on(data.population)
    unit, relation = str(step.privacy_unit), step.neighboring_relation
    return Protected(unit, relation, step.people, data.fingerprint)


def run_of_config(config: TrainingConfig, base: Path | None) -> ComposedSteps:
    """Returns a run's composition, accounted by public facts alone."""

    def load(split: str) -> ExampleTable:
        if split == TRAINING_DATA:
            return config.training_data(base)[0]
        return config.data.load(split, base)

    run, *others = _parts_of(config, budget_of(config, load)[0])
    if others or isinstance(run, AdaptiveRun):
        raise NotImplementedError(
            "adaptive: a run on a menu must be a composition, or adapt within quotas "
            "on one part of the data"
        )
    return run


def _refuse_other_way(folder: Path, *, resume: bool, is_booked: bool) -> None:
    """Refuses to resume a run with a book if it began without one, or the reverse."""
    receipt = books.read_receipt(folder)
    if is_booked and resume and receipt is None:
        if read_ledger(folder).book is not None:
            raise ValueError(
                f"{folder / books.RECEIPT} is missing: the run is charged to a book, "
                "and only a folder with this receipt can be resumed"
            )
        raise ValueError(
            f"book must be left out: the run in {folder} began without one, and a run "
            "pays before it samples anything"
        )
    if not is_booked and receipt is not None:
        if resume or receipt.has_paid:
            raise ValueError(
                f"book must be given: the run in {folder} is charged to one, "
                f"{receipt.book[:12]}…"
            )
        (folder / books.RECEIPT).unlink()  # its run never paid and never began


def _check_in(
    booking: Booking,
    trainer: Trainer,
    config: TrainingConfig,
    base: Path | None,
    folder: Path,
    title: str,
) -> books.Paid:
    """Charges a trainer's run before it samples anything, unless it has paid."""
    order = books.order_of(
        *_parts_of(config, trainer.budget),
        what=TRAIN,
        name=title,
        protected=protected_by(config, base),
        floor=booking.floor,
    )
    receipt, name = books.read_receipt(folder), None
    if receipt is not None and run_files.was_only_begun(folder):  # it may have paid
        # A killed process may have left an incomplete file: nothing was drawn.
        with contextlib.suppress(LedgerError):
            name = receipt.run if read_ledger(folder).run == receipt.run else None
    name = trainer.begin(folder, name=name, book=booking.book)
    at_end = trainer.num_steps_taken if trainer.has_ended else None
    return books.check_in(booking.where, folder, order, run=name, at_end=at_end)


def _words_of_book(paid: books.Paid) -> tuple[dict[str, str], str]:
    """Returns facts on the book for ``run.json``, and its part of the statement."""
    terms, entry = paid
    own, own_epsilon, whole = "is", "run", ""
    if entry.what == TUNE:
        own = "is one run of a search, which as a whole is"
        own_epsilon, whole = "run, or of its search,", " for a whole search"
    epsilon, delta = f"{terms.epsilon:.15g}", f"{terms.delta:.15g}"  # not rounded
    facts = {
        "book": f"{terms.name}, entry {entry.number}: {paid.price}{whole}",
        "guarantee of the book": f"epsilon {epsilon}, delta {delta}, all of its runs "
        "together, each chosen by what was released",
    }
    return facts, (
        "\n## One budget for the data set\n\n"
        f"This run {own} entry {entry.number} of the book `{terms.name}`, and paid "
        f"{paid.price} before it sampled anything. The guarantee of the book: "
        "**all runs of this book together, however each was chosen in view of what "
        f"others had released, are ({epsilon}, {delta})-differentially private for "
        f"{terms.protected.words}**. It holds if several of these runs are released. "
        f"The epsilon above is of this {own_epsilon} alone. The sum or composition of "
        "such epsilons is no guarantee if one run was chosen in view of another. Runs "
        "that are chosen by losses, norms or other numbers that are not released have "
        "no guarantee together.\n"
    )


def _parts_of(
    config: TrainingConfig, budget: PrivacyBudget | AdaptiveBudget
) -> tuple[ComposedSteps | AdaptiveRun, ...]:
    """A run, or its worst composition, for each part of the data, by public facts."""
    if config.seed is not None:
        raise ValueError(
            f"seed must be left out of a run with a book, got {config.seed}: anyone "
            "who knows it can subtract the noise"
        )
    if not budget.is_private:
        raise ValueError("epsilon must be finite for a run in a book, got inf")
    if isinstance(budget, AdaptiveBudget):
        return tuple(run.composition() or run for run in budget.runs)
    public = public_budget(budget)
    if public is None:
        raise ValueError(
            "step.sampling must have a public lower bound, population, in every "
            "sampling without replacement: the book's prices are public, but this "
            "run's depends on private sizes"
        )
    run = public.run(public.num_steps)
    pairs = zip(run.steps, run.counts, strict=True)
    return (compose(*((step, count) for step, count in pairs if int(count))),)
