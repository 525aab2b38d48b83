"""``jaxdp-episodic train``: a private training run."""

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
    reason,
)
from jaxdp_episodic.cli.process import Terminated, ended_by_sigterm, use_all_cores


@dataclass(frozen=True)
class Train:
    """Train privately on episodes, and stop before the target epsilon is exceeded."""

    file: TomlFile
    """The run: data, step, target, learner, model, optimizer."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for checkpoints, log, report and release; made if missing."""
    resume: bool = False
    """Go on with the run in DIR."""

    def run(self) -> int:
        """Runs a training config; returns the exit code.

        Ctrl-C and SIGTERM leave a checkpoint of the last step that was finished.
        """
        use_all_cores()
        # Imported here: Flax costs a second, which no question to the accountant
        # should pay.
        from jaxdp_episodic.training.config import read_config
        from jaxdp_episodic.training.run import run_training
        from jaxdp_episodic.training.run_files import files_of_a_run

        try:
            with ended_by_sigterm():
                result = run_training(
                    read_config(self.file),
                    self.out,
                    resume=self.resume,
                    title=self.file.stem,
                    base=self.file.parent,
                )
        except USER_ERRORS as error:
            complain(f"{self.file}: {reason(error, self.file)}")
            return USER_ERROR
        except KeyboardInterrupt as end:
            how = f"go on with --resume --out {self.out}"
            if not files_of_a_run(self.out):
                how = "nothing was trained yet, start again"
            terminated = isinstance(end, Terminated)
            complain(f"{'terminated' if terminated else 'interrupted'}; {how}")
            return TERMINATED if terminated else INTERRUPTED
        print(result)
        return 0
