"""What a run writes while it goes: ledger, checkpoints and log, opened as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.training import checks, run_folder
from jaxdp_episodic.training.checkpoint import Checkpoints, Snapshot
from jaxdp_episodic.training.ledger import Ledger
from jaxdp_episodic.training.ledger_writer import LedgerFile
from jaxdp_episodic.training.run_log import RunLog


class StepProgress(NamedTuple):
    """What a progress display is told after every step.

    Attributes:
      step: steps taken and charged.
      num_steps: steps that the run takes.
      epsilon: spent so far, nats.
      record: the log record of the step, private compartments included.
    """

    step: int
    num_steps: int
    epsilon: float
    record: Mapping[str, Any]


class RunRecords:
    """The open files of a run; made by `opened_records`.

    Attributes:
      noted: the log's records that were written since.
    """

    def __init__(
        self, ledger: LedgerFile, checkpoints: Checkpoints, log: RunLog
    ) -> None:
        self._ledger, self._checkpoints, self._log = ledger, checkpoints, log
        self.noted: list[dict[str, Any]] = []

    def note(self, record: dict[str, Any]) -> None:
        """Appends a record to the log."""
        self.noted.append(record)
        self._log.write(record)

    def commit(self, snapshot: Snapshot) -> None:
        """Makes a checkpoint, with the log up to it safe on the disk.

        Raises:
          OSError: the disk is full, or something cannot be written.
          ValueError: parameters that are not finite.
        """
        checks.check_finite(snapshot.state.params, snapshot.charged_steps)
        self._log.sync()
        if self._checkpoints.latest != snapshot.charged_steps:
            self._checkpoints.save(snapshot._replace(ledger=self._ledger.mark))

    def commit_if_possible(self, snapshot: Snapshot, end: BaseException) -> None:
        """Commits on the way out; if that fails, an earlier checkpoint is there."""
        try:
            self.commit(snapshot)
        except Exception as error:  # of the disk, or of Orbax, interrupted in a save
            end.add_note(f"no checkpoint of step {snapshot.charged_steps}: {error}")


@contextmanager
def opened_records(
    folder: Path,
    ledger: Ledger,
    environment: Mapping[str, Any],
    snapshot: Callable[[], Snapshot],
) -> Iterator[RunRecords]:
    """Opens the files of a run in a folder that is locked and has its ledger.

    The ledger comes first, then a checkpoint: whatever has a log can be gone on with.

    Args:
      folder: of the run.
      ledger: which charges to the file meanwhile.
      environment: see `environment.described_environment`.
      snapshot: returns the run as it stands.

    Raises:
      FileExistsError: the folder's run has gone on since this one was taken up.
      LedgerError: the ledger is damaged or another run's.
      OSError: something cannot be read or written.
    """
    with (
        LedgerFile(folder / run_folder.LEDGER, contains=ledger.mark) as file,
        ledger.writing_to(file, environment),
        Checkpoints(folder / run_folder.CHECKPOINTS) as checkpoints,
    ):
        checkpoints.remove_unfinished()
        now = snapshot()
        latest = checkpoints.latest
        if latest is None:
            checkpoints.save(now._replace(ledger=file.mark))
        elif latest > now.charged_steps:
            raise FileExistsError(
                f"{folder} has a checkpoint of step {latest}, this run is at "
                f"step {now.charged_steps}; resume it again"
            )
        path = folder / run_folder.LOG
        with RunLog(path, keep_through=now.charged_steps) as log:
            yield RunRecords(file, checkpoints, log)
