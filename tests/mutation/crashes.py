"""The check of the ledger: a run that is killed and resumed."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from crash_rigs import Killed
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.run import run_files
from mutation.verdicts import Effort, Verdict
from training_runs import plain_trainer

# Killed with the fourth gradient computed; the last checkpoint was after two steps.
STEPS, EVERY, KILLED_AT = 6, 2, 4


def killed_and_resumed(effort: Effort) -> Verdict:
    """Released steps <= charged steps <= released steps + one per crash.

    At the moment of a release the run's folder is copied, which is what a killed
    process leaves, and the run goes on from the copy.
    """
    del effort  # one run suffices
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder, left = Path(name) / "run", Path(name) / "left"
        releases = _watched(patch, folder, left)
        try:
            with pytest.raises(Killed):
                _run(folder)
        except LedgerError as error:
            return _refused(error, folder)
        released = len(set(releases))
        charged = read_ledger(left / run_files.STORE).charged
        if not released <= charged <= released + 1:
            return _verdict(True, released, charged, "when it was killed")
        try:
            _run(left, resume=True)
        except (LedgerError, FileExistsError) as error:
            return _refused(error, left)
        released = len(set(releases))
        charged = read_ledger(left / run_files.STORE).charged
    is_broken = not released <= charged <= released + 1
    return _verdict(is_broken, released, charged, "at the end")


def _refused(error: Exception, folder: Path) -> Verdict:
    reason = str(error).replace(str(folder), "the folder")
    return Verdict(True, f"the run is refused: {reason}")


def _run(folder: Path, *, resume: bool = False) -> None:
    """Trains an unseeded run."""
    trainer = plain_trainer(num_steps=STEPS, seed=None)
    if resume:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interrupted step is dropped
            trainer.resume(folder)
    trainer.train(folder, checkpoint_every=EVERY)


def _watched(patch: pytest.MonkeyPatch, folder: Path, left: Path) -> list[bytes]:
    """Collects all released gradients, and ends the run after one of them."""
    releases: list[bytes] = []
    plain = PrivateGradient.__call__

    def call(self: PrivateGradient, *args: Any, **named: Any) -> Any:
        gradient, diagnostics = plain(self, *args, **named)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
        releases.append(b"".join(leaf.tobytes() for leaf in leaves))
        if len(releases) == KILLED_AT:
            shutil.copytree(folder, left)
            raise Killed
        return gradient, diagnostics

    patch.setattr(PrivateGradient, "__call__", call)
    return releases


def _verdict(is_caught: bool, released: int, charged: int, when: str) -> Verdict:
    return Verdict(is_caught, f"{released} steps released, {charged} charged, {when}")
