"""Charging runs to the book of their data set."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.tools.book import book
from jaxdp_episodic.tools.book.content import TRAIN, TUNE, Protected
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.splits import TRAIN as TRAINING_DATA
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.assemble import budget_of
from jaxdp_episodic.trainer.run.trainer import Trainer


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
        return book.read_book(self.where).terms.name


class PartOfSearch(NamedTuple):
    """The search that a run belongs to; it is charged as a whole."""

    name: str  # of the search, in its state
    paid: book.Paid | None  # the search's entry in a book; None: there is no book

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

    run, *others = _parts(config, budget_of(config, load)[0])
    if others or isinstance(run, AdaptiveRun):
        raise NotImplementedError(
            "adaptive: a run on a menu must be a composition, or adapt within quotas "
            "on one part of the data"
        )
    return run


def refuse_other_way(folder: Path, *, resume: bool, is_booked: bool) -> None:
    """Refuses to resume a run with a book if it began without one, or the reverse."""
    receipt = book.read_receipt(folder)
    if is_booked and resume and receipt is None:
        if read_ledger(folder).book is not None:
            raise ValueError(
                f"{folder / book.RECEIPT} is missing: the run is charged to a book, "
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
        (folder / book.RECEIPT).unlink()  # its run never paid and never began


def check_in_run(
    booking: Booking,
    trainer: Trainer,
    config: TrainingConfig,
    base: Path | None,
    folder: Path,
    title: str,
) -> book.Paid:
    """Charges a trainer's run before it samples anything, unless it has paid."""
    order = book.order_of(
        *_parts(config, trainer.budget),
        what=TRAIN,
        name=title,
        protected=protected_by(config, base),
        floor=booking.floor,
    )
    receipt, name = book.read_receipt(folder), None
    if receipt is not None and run_files.was_only_begun(folder):  # it may have paid
        # A killed process may have left an incomplete file: nothing was drawn.
        with contextlib.suppress(LedgerError):
            name = receipt.run if read_ledger(folder).run == receipt.run else None
    name = trainer.begin(folder, name=name, book=booking.book)
    at_end = trainer.num_steps_taken if trainer.has_ended else None
    return book.check_in(booking.where, folder, order, run=name, at_end=at_end)


def words_of_book(paid: book.Paid) -> tuple[dict[str, str], str]:
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


def _parts(
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
