"""What a run has been charged: counted, and refused beyond the budget.

Within `Ledger.writing_to` every charge is in the run's file before it counts; elsewhere
it is in memory only. A choice of a run that chooses is written with its charge, before
anything is drawn for it: a run that is resumed goes on with the choices that were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
    SpentAhead,
    public_budget,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, content_of
from jaxdp_episodic.trainer.config.rules import ScoreThen
from jaxdp_episodic.trainer.gradient.processes import Processes
from jaxdp_episodic.trainer.run.choosing import can_any
from jaxdp_episodic.trainer.run.description import refuse_other_run
from jaxdp_episodic.trainer.run.state import refuse_other_state
from jaxdp_episodic.trainer.run.store import Mark, RunStore, Saved

Scores = Callable[[], Sequence[ScoreThen]]


class Ledger:
    """Counts the steps that were charged and refuses the one too many.

    Args:
      budget: of the run.
      charged: steps charged before.
      mark: of the file in which they are.

    Attributes:
      charged: number of steps charged.
      mark: of the file that was last written to; None if there was none.
    """

    def __init__(
        self, budget: PrivacyBudget, *, charged: int = 0, mark: Mark | None = None
    ) -> None:
        if not 0 <= charged <= budget.permitted_steps:
            raise ValueError(
                "charged must lie in 0 .. permitted_steps "
                f"({budget.permitted_steps}), got {charged}"
            )
        self._budget = budget
        self.charged = self._begun = charged
        self.mark = mark
        self._store: RunStore | None = None

    @property
    def most(self) -> int:
        """Steps that the target permits."""
        return self._budget.permitted_steps

    def charge(self) -> int:
        """Charges one step, before its result exists; returns the number charged.

        Raises:
          BudgetExhaustedError: the step would exceed the target. Nothing is charged.
          OSError: the file could not be written. The step must not be taken.
        """
        if self.charged >= self.most:
            raise BudgetExhaustedError(
                f"step {self.charged + 1} would exceed epsilon={self._budget.epsilon:g}"
                f" at delta={self._budget.delta:g}: {self.most} steps are permitted"
            )
        self._begun = self.charged + 1
        if self._store is not None:
            self._store.charge(*self._kind(self._begun))
            self.mark = self._store.mark
            if self.mark.charged != self._begun:
                raise LedgerError(
                    f"{self._store.path} was changed while the run used it: it has "
                    f"{self.mark.charged} charges instead of {self._begun}"
                )
        self.charged = self._begun
        return self.charged

    def name_of(self, number: int) -> str:
        """Returns the name of the kind of step that is charged so late."""
        # All phases but the last are taken once.
        return f"phase {min(number, len(self._budget.before) + 1)}"

    def _kind(self, number: int) -> tuple[str, GaussianStep | None]:
        """Name and description of a step, for the file."""
        phases = self._budget.phases
        return self.name_of(number), phases[min(number, len(phases)) - 1][0]

    @contextmanager
    def writing_to(
        self, store: RunStore, environment: Mapping[str, Any]
    ) -> Iterator[None]:
        """Charges to a file; steps that only we know of are charged there first.

        Args:
          store: of this run.
          environment: of this process; see `described_opening`.

        Raises:
          OSError: it cannot be written.
        """
        found = store.mark.charged
        # One more than we count is a charge that was interrupted, or failed.
        self.charged = self._begun = max(self.charged, found)
        store.take_up(environment)
        for number in range(found + 1, self.charged + 1):
            store.charge(*self._kind(number))
        self._store, self.mark = store, store.mark
        try:
            yield
        finally:
            self._store = None

    def is_over(self, taken: int) -> bool:
        """Returns whether a run that has taken so many steps takes no more."""
        return taken >= self._budget.num_steps

    @property
    def is_public(self) -> bool:
        """False if epsilons were computed from private sizes; see `public_budget`."""
        return public_budget(self._budget) is not None

    def accounting(self, scores: Scores) -> Callable[[int], dict[str, Any]]:
        """Returns what says, of a step, what the public log has besides."""
        spent = SpentAhead(self._budget)
        return lambda step: {"epsilon": spent.at(step) if step else 0.0}

    def shared(self, processes: Processes, charged: int) -> Self:
        """Returns the first process's ledger; all call it, with its count."""
        return type(self)(self._budget, charged=charged)

    def check(self, store: RunStore) -> None:
        """Refuses a file that is not this run's, or that has gone on without it.

        Raises:
          FileExistsError: steps are charged there that this run knows nothing of.
          LedgerError: the file describes other steps than the budget's, or is not what
            the run wrote.
        """
        self.refuse_other(content_of(store))
        if self.mark is not None and not store.contains(self.mark):
            raise LedgerError(
                f"{store.path} is not what the run wrote: it was put back, or replaced"
            )
        found = store.mark.charged
        if found > self._begun:
            raise FileExistsError(
                f"the run has gone on: {found} steps are charged in its file, this run "
                f"is at step {self._begun}; resume it again"
            )

    def refuse_other(self, content: LedgerContent) -> None:
        """Refuses a file whose steps are not those of this run, in its order.

        Raises:
          LedgerError: such a one.
        """
        budget, found = self._budget, content.groups
        planned = budget.phases if budget.before else budget.phases[-1:]
        pairs = list(zip(found, planned, strict=False))
        same = len(pairs) == len(found) and all(
            ours == theirs for (ours, _), (theirs, _) in pairs
        )
        full = all(count == most for (_, count), (_, most) in pairs[:-1])
        if not (same and full) or content.planned != budget.planned:
            raise LedgerError(
                "the run's file is of another run: it charges other steps than this "
                "one takes (another sampling, noise, population, privacy unit or "
                "number of epochs)"
            )

    def after(self, content: LedgerContent, mark: Mark) -> Self:
        """Returns the ledger that goes on with a file."""
        return type(self)(self._budget, charged=content.charged, mark=mark)


class AdaptiveLedger(Ledger):
    """Counts choices and their charges; refuses what there is no budget for.

    Args:
      budget: of the run, at its start.
      options: chosen so far; the last one may not be charged yet.
      charged: how many of them are.
      mark: as of `Ledger`.
      has_ended: the run has chosen to end.

    Attributes:
      options: as given, and those chosen since.
      now: the budget after all choices.
      has_ended: as given, or noted since.
    """

    def __init__(
        self,
        budget: AdaptiveBudget,
        options: Sequence[str] = (),
        *,
        charged: int = 0,
        mark: Mark | None = None,
        has_ended: bool = False,
    ) -> None:
        self._start: AdaptiveBudget = budget
        # What the base asks of a planned budget this one answers, too.
        super().__init__(cast(PrivacyBudget, budget), charged=charged, mark=mark)
        self.options, self.now, self.has_ended = list[str](), budget, False
        self._before = budget
        for name in options:
            self.choose(name)
        self.has_ended = self._is_end_noted = has_ended

    @property
    def budget_charged(self) -> AdaptiveBudget:
        """The budget after all that was charged: without a choice that is not yet."""
        return self._before if len(self.options) > self.charged else self.now

    def is_over(self, taken: int) -> bool:
        """Returns whether it has chosen to end, or nothing is left to choose."""
        if taken < len(self.options):
            return False
        is_begun = taken >= len(self.now.first)
        return self.has_ended or (is_begun and not can_any(self.now))

    @property
    def is_public(self) -> bool:
        """True: what may be chosen, and the prices, are public."""
        return True

    def accounting(self, scores: Scores) -> Callable[[int], dict[str, Any]]:
        """Returns what says, of a release, the guarantee, the choice, what is left.

        The guarantee is the same from the first release to the last.
        """

        def facts(step: int) -> dict[str, Any]:
            said: dict[str, Any] = {"epsilon": self._start.epsilon}
            if step:
                said["option"] = self.options[step - 1]
            said["left"] = self.now.left
            last = scores()[-1:]
            if last and last[0].release == step:
                said["score"] = last[0].value
                said["score_noise"] = last[0].deviation
            return said

        return facts

    def shared(self, processes: Processes, charged: int) -> Self:
        """Returns the first process's ledger; all call it, with its count."""
        options, ended = processes.shared_value([self.options, self.has_ended])
        return type(self)(self._start, options, charged=charged, has_ended=ended)

    def choose(self, name: str) -> None:
        """Makes an option the next one to be charged.

        Raises:
          BudgetExhaustedError: more than is left, or against the rules of the budget.
            Nothing is charged.
          ValueError: no such option, or a run that has ended.
        """
        if self.has_ended:
            raise ValueError("the run has chosen to end, and takes no more steps")
        self.now.option(name)
        if not self.now.can(name):
            raise BudgetExhaustedError(
                f"option {name!r} cannot be taken any more, or not now; left are "
                f"{self.now.left_in_words()}"
            )
        self._before, self.now = self.now, self.now.charge(name)
        self.options.append(name)

    def end(self) -> None:
        """Notes that the run has chosen to end; it is on the disk afterwards.

        Raises:
          OSError: it could not be noted.
        """
        if self._store is not None and not self._is_end_noted:
            self._store.end()
            self._is_end_noted = True
        self.has_ended = True

    def refuse_other(self, content: LedgerContent) -> None:
        """Refuses the file of another run, or one with other choices than ours.

        Raises:
          LedgerError: such a one.
        """
        same = content.adaptive is not None and (
            content.adaptive.to_dict() == self._start.to_dict()
        )
        theirs, number = _chosen(content), min(len(self.options), content.charged)
        if not same or theirs[:number] != self.options[:number]:
            raise LedgerError(
                "the run's file is of another run: it has another budget, or other "
                "choices were made (other options, quotas, prices, noise or sampling)"
            )

    def after(self, content: LedgerContent, mark: Mark) -> Self:
        """Returns the ledger that goes on with a file."""
        return type(self)(
            self._start,
            _chosen(content),
            charged=content.charged,
            mark=mark,
            has_ended=content.has_ended,
        )

    def name_of(self, number: int) -> str:
        """Returns the option that was chosen so late."""
        return self.options[number - 1]

    def _kind(self, number: int) -> tuple[str, GaussianStep | None]:
        return self.name_of(number), None


def ledger_of(budget: PrivacyBudget | AdaptiveBudget) -> Ledger:
    """Returns the ledger of a run that is not begun."""
    if isinstance(budget, AdaptiveBudget):
        return AdaptiveLedger(budget)
    return Ledger(budget)


def _chosen(content: LedgerContent) -> list[str]:
    """All choices in a file."""
    groups = zip(content.options, content.groups, strict=True)
    return [name for name, (_, count) in groups for _ in range(count)]


def taken_up(
    store: RunStore,
    ledger: Ledger,
    run: Mapping[str, Any],
    kinds: Mapping[str, str],
    book: str | None,
) -> tuple[Saved, Any]:
    """Returns the state of a run that is resumed, and the ledger that goes on.

    Args:
      store: its file.
      ledger: of the run that wants to go on, with nothing charged.
      run: what it is.
      kinds: types and shapes of its state.
      book: name of the book that it is charged to, if any.

    Raises:
      LedgerError, RunMismatchError, ValueError: as of `Trainer.resume`.
    """
    content, saved = content_of(store), store.saved()
    if saved is None:
        raise LedgerError(f"{store.path} has charges, and no checkpoint")
    refuse_other_run(saved.run, run)
    refuse_other_state(saved.kinds, kinds)
    ledger.refuse_other(content)
    content.refuse_other_book(book)
    if not saved.taken <= content.charged <= ledger.most:
        raise LedgerError(
            f"{store.path} has {content.charged} steps charged, of which the "
            f"checkpoint contains {saved.taken} and the target permits {ledger.most}"
        )
    return saved, ledger.after(content, store.mark)
