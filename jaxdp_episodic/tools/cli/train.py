"""``jaxdp-episodic train`` and ``tune``: a private run; a search that is charged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.tools.cli.messages import (
    USER_ERROR,
    Name,
    Number,
    TomlFile,
    Whole,
    complain,
    option,
    reported,
)
from jaxdp_episodic.tools.cli.process import (
    end_process,
    ended_by_sigterm,
    keep_our_sigterm,
    one_of_several,
    use_all_cores,
)
from jaxdp_episodic.trainer.config.training_config import read_config


@dataclass(frozen=True)
class Train:
    """Train privately on episodes, and stop before the target epsilon is exceeded."""

    file: TomlFile
    """The run: data, step, target, learner, model, optimizer."""
    out: Annotated[Path, option("DIR")]
    """Folder for checkpoints, log, report and release; made if missing."""
    resume: bool = False
    """Go on with the run in DIR."""
    book: Annotated[Name, option("FILE_OR_URL")] = None
    """Charge the run to the book of its data set, before its first draw; see `book`."""
    floor: Number = None
    """Of the run, in a book with mu-GDP prices; default: a hundredth of its delta."""
    distributed: bool = False
    """Be one of several processes that train one run, each started by this command; the
    cluster (Slurm, Open MPI, Kubernetes) or the next three options say which one."""
    coordinator: Annotated[Name, option("HOST:PORT")] = None
    """Where process 0 is, and a free port there."""
    num_processes: Whole = None
    """How many processes there are."""
    process_index: Whole = None
    """Which one this is, from 0; process 0 writes DIR, the others write nothing."""

    def run(self) -> int:
        """Runs a training config; returns the exit code.

        Ctrl-C and SIGTERM leave a checkpoint of the last step that was finished.
        """
        given = self.coordinator, self.num_processes, self.process_index
        if not self.distributed and given != (None, None, None):
            complain(
                "--coordinator, --num-processes and --process-index are for a run with "
                "--distributed"
            )
            return USER_ERROR
        if self.floor is not None and self.book is None:
            complain("--floor is for a run with --book")
            return USER_ERROR
        use_all_cores()
        if self.distributed:
            keep_our_sigterm()
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.tools.train.booked import Booking
        from jaxdp_episodic.tools.train.run import run_training
        from jaxdp_episodic.trainer.gradient.processes import all_processes
        from jaxdp_episodic.trainer.run.run_files import files_of_a_run

        several = one_of_several(*given) if self.distributed else nullcontext()

        def trained() -> list[str]:
            with ended_by_sigterm(), several:
                result = run_training(
                    read_config(self.file),
                    self.out,
                    resume=self.resume,
                    title=self.file.stem,
                    base=self.file.parent,
                    book=None if self.book is None else Booking(self.book, self.floor),
                )
                is_first = all_processes().is_first
            return [str(result)] if is_first else []

        def interrupted() -> str:
            if self.distributed and not all_processes().is_first:
                return ""
            if not files_of_a_run(self.out):
                return "; nothing was trained yet, start again"
            return f"; go on with --resume --out {self.out}"

        code = reported(self.file, trained, interrupted=interrupted)
        if self.distributed and code:
            end_process(code)
        return code


@dataclass(frozen=True)
class Tune:
    """Train a random number of times, release the best run, and charge the choice."""

    file: TomlFile
    """The search: the target, how many runs are drawn, a run, hyperparameters."""
    out: Annotated[Path, option("DIR")]
    """Folder for the runs and the release; made if missing."""
    resume: bool = False
    """Go on with the search in DIR, with the number of runs that was drawn."""
    book: Annotated[Name, option("FILE_OR_URL")] = None
    """Charge the search to the book of its data set, before its first run; see `book`.
    """
    floor: Number = None
    """Of the search in the book; default: a hundredth of its delta."""
    cost_only: bool = False
    """Only say what each run and the search would cost; nothing is drawn."""

    def run(self) -> int:
        """Searches; returns the exit code."""
        if self.floor is not None and self.book is None:
            complain("--floor is for a search with --book")
            return USER_ERROR
        use_all_cores()
        # Imported here: Flax costs a second, which no help should pay.
        from rich.console import Console

        from jaxdp_episodic.tools.train.booked import Booking
        from jaxdp_episodic.tools.train.search import RELEASE, run_search, search_budget
        from jaxdp_episodic.tools.train.search_space import read_search

        base, out = self.file.parent, self.out

        def searched() -> list[str]:
            search = read_search(self.file)
            if self.cost_only:
                budget = search_budget(search, base, Console(stderr=True))
                return [
                    f"each run    epsilon {upward(budget.run_epsilon, 5)}",
                    f"the search  epsilon {upward(budget.epsilon, 5)} (upper bound)",
                ]
            with ended_by_sigterm():
                book = None if self.book is None else Booking(self.book, self.floor)
                how = {"resume": self.resume, "base": base, "book": book}
                result = run_search(search, out, **how)
            delta = f"delta {search.settings.delta:g}"
            epsilon = f"{upward(result.epsilon, 5)} (upper bound, {delta})"
            if result.chosen is None:
                lines = ["no run was drawn: there is nothing to release"]
            else:
                named = result.hyperparameters.items()
                lines = [
                    f"chosen      {', '.join(f'{k} = {v}' for k, v in named)}",
                    f"score       {abs(result.score):.4f} ({search.settings.split})",
                    f"to release  {out / RELEASE}",
                ]
            secret = f"everything else in {out}, the number of runs too"
            return [f"epsilon     {epsilon}", *lines, f"secret      {secret}"]

        how = f"; go on with --resume --out {out}"
        return reported(self.file, searched, interrupted=how)
