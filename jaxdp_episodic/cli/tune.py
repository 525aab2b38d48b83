"""``jaxdp-episodic tune``: a random search whose choice is charged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxdp_episodic.cli.messages import (
    INTERRUPTED,
    TERMINATED,
    USER_ERROR,
    USER_ERRORS,
    TomlFile,
    complain,
    printable,
    reason,
)
from jaxdp_episodic.cli.process import Terminated, ended_by_sigterm, use_all_cores
from jaxdp_episodic.cli.rounding import upward


@dataclass(frozen=True)
class Tune:
    """Train a random number of times, release the best run, and charge the choice."""

    file: TomlFile
    """The search: the target, the law of the number of runs, a run, hyperparameters."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for the runs and the release; made if missing."""
    resume: bool = False
    """Go on with the search in DIR, with the number of runs that was drawn."""
    cost_only: bool = False
    """Only say what each run and the search would cost; nothing is drawn."""

    def run(self) -> int:
        """Searches; returns the exit code."""
        use_all_cores()
        # Imported here: Flax costs a second, which no question to the accountant
        # should pay.
        from jaxdp_episodic.training.search import RELEASE, run_search, search_budget
        from jaxdp_episodic.training.search_space import read_search

        base = self.file.parent
        try:
            search = read_search(self.file)
            if self.cost_only:
                budget = search_budget(search, base)
                print(f"each run    epsilon {upward(budget.run_epsilon)}")
                print(f"the search  epsilon {upward(budget.epsilon)} (upper bound)")
                return 0
            with ended_by_sigterm():
                result = run_search(search, self.out, resume=self.resume, base=base)
        except USER_ERRORS as error:
            complain(f"{self.file}: {reason(error, self.file)}")
            return USER_ERROR
        except KeyboardInterrupt as end:
            terminated = isinstance(end, Terminated)
            word = "terminated" if terminated else "interrupted"
            complain(f"{word}; go on with --resume --out {self.out}")
            return TERMINATED if terminated else INTERRUPTED
        if result.chosen is None:
            lines = ["no run was drawn: there is nothing to release"]
        else:
            values = ", ".join(f"{k} = {v}" for k, v in result.hyperparameters.items())
            lines = [
                f"chosen      {values}",
                f"score       {abs(result.score):.4f} ({search.settings.split})",
                f"to release  {self.out / RELEASE}",
            ]
        delta = f"delta {search.settings.delta:g}"
        lines.insert(0, f"epsilon     {upward(result.epsilon)} (upper bound, {delta})")
        lines.append(
            f"secret      everything else in {self.out}, the number of runs too"
        )
        print(printable("\n".join(lines), keep="\n"))
        return 0
