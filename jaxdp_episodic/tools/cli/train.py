"""``jaxdp-episodic train`` and ``tune``: a private run; a search that is charged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.tools.cli.command import (
    Command,
    Folder,
    Name,
    Number,
    TomlFile,
    UsageError,
    Whole,
    facts,
    option,
)
from jaxdp_episodic.tools.cli.process import (
    end_process,
    keep_our_sigterm,
    one_of_several,
    use_all_cores,
)
from jaxdp_episodic.trainer.config.training_config import read_config

_Book = Annotated[Name, option("FILE_OR_URL", may_lack=True)]


@dataclass
class Train(Command):
    """The command ``train``."""

    #: Training config, such as `init` writes: data, target, step, model, learner.
    file: TomlFile
    #: Folder for the log, the report and the release. It is created if missing.
    out: Folder
    #: Continue the run in DIR.
    resume: bool = False
    #: Charge the run to the privacy budget of its data set before it
    #: starts (see `book`).
    book: _Book = None
    #: Part of the budget's delta that the run may use, where prices are mu-GDP (see
    #: docs/book.md). Default: 1 % of that delta.
    floor: Number = None
    #: Train one run in several processes. Start this command once per process. Slurm,
    #: Open MPI, Kubernetes or the next three options give each its number.
    distributed: bool = False
    #: Host of process 0 and a free port on it.
    coordinator: Annotated[Name, option("HOST:PORT", may_lack=True)] = None
    #: Number of processes.
    num_processes: Whole = None
    #: Index of this process, from 0. Only process 0 writes into DIR.
    process_index: Whole = None

    _has_warnings = False

    def _lines(self) -> list[str]:
        given = self.coordinator, self.num_processes, self.process_index
        if not self.distributed and given != (None, None, None):
            raise UsageError(
                "--coordinator, --num-processes and --process-index are for a run with "
                "--distributed"
            )
        book = _booking(self, "a run")
        use_all_cores()
        if self.distributed:
            keep_our_sigterm()
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.tools.train.run import run_training

        with one_of_several(*given) if self.distributed else nullcontext():
            result = run_training(
                read_config(self.file),
                self.out,
                resume=self.resume,
                title=self.file.stem,
                base=self.file.parent,
                book=book,
            )
            return [str(result)] if _is_first() else []

    def _left(self) -> str:
        from jaxdp_episodic.trainer.run.run_files import files_of_a_run

        if self.distributed and not _is_first():
            return ""
        if not files_of_a_run(self.out):
            return "; nothing was trained yet, start again"
        return f"; go on with --resume --out {self.out}"

    def run(self) -> int:
        """Trains; returns the exit code."""
        code = super().run()
        if self.distributed and code:
            end_process(code)
        return code


@dataclass
class Tune(Command):
    """The command ``tune``."""

    #: Search config (target, number of runs, run, hyperparameters), or a training
    #: config.
    file: TomlFile
    #: Folder for the runs and the release. It is created if missing.
    out: Folder
    #: Continue the search in DIR. The number of runs is not drawn again.
    resume: bool = False
    #: Charge the search to the privacy budget of its data set before it
    #: starts (see `book`).
    book: _Book = None
    #: Part of the budget's delta that the search may use, where prices are mu-GDP (see
    #: docs/book.md). Default: 1 % of that delta.
    floor: Number = None
    #: Only print the privacy cost of each run and of the search. Nothing is trained.
    cost_only: bool = False
    #: State that the held-out data are public, so that scores on them may choose the
    #: best run. Required if FILE.toml is a training config.
    held_out_is_public: bool = False

    _has_warnings = False

    def _lines(self) -> list[str]:
        book = _booking(self, "a search")
        use_all_cores()
        # Imported here: Flax costs a second, which no help should pay.
        from rich.console import Console

        from jaxdp_episodic.tools.train.search import RELEASE, run_search, search_budget
        from jaxdp_episodic.tools.train.search_space import read_search

        base, is_public = self.file.parent, self.held_out_is_public
        search = read_search(self.file, held_out_is_public=is_public)
        if self.cost_only:
            budget = search_budget(search, base, Console(stderr=True))
            return facts(
                {
                    "each run": f"epsilon {upward(budget.run_epsilon, 5)}",
                    "the search": f"epsilon {upward(budget.epsilon, 5)} (upper bound)",
                }
            )
        found = run_search(search, self.out, resume=self.resume, base=base, book=book)
        delta = f"delta {search.settings.delta:g}"
        rows = {"epsilon": f"{upward(found.epsilon, 5)} (upper bound, {delta})"}
        if found.chosen is None:
            rows["release"] = "none: no run was drawn"
        else:
            named = found.hyperparameters.items()
            rows["chosen"] = ", ".join(f"{k} = {v}" for k, v in named)
            rows["score"] = f"{abs(found.score):.4f} ({search.settings.split})"
            rows["to release"] = str(self.out / RELEASE)
        rows["secret"] = f"everything else in {self.out}, the number of runs too"
        return facts(rows, 10)

    def _left(self) -> str:
        from jaxdp_episodic.tools.train.search import STATE

        if not (self.out / STATE).exists():
            return "; no search was drawn yet, start again"
        return f"; go on with --resume --out {self.out}"


def _booking(command: Any, what: str) -> Any:
    """The book that a run or a search is charged to, if any."""
    if command.book is None:
        if command.floor is not None:
            raise UsageError(f"--floor is for {what} with --book")
        return None
    from jaxdp_episodic.tools.train.booked import Booking

    return Booking(command.book, command.floor)


def _is_first() -> bool:
    """Whether this is the one process that prints and writes."""
    from jaxdp_episodic.trainer.gradient.processes import all_processes

    return all_processes().is_first
