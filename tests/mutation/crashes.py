"""The check of the ledger and of keys: a run that is killed and resumed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from crash_rigs import Witness, ending, gone_on
from jaxdp_episodic.trainer.run.ledger_file import LedgerError
from jaxdp_episodic.trainer.run.store import RunStore
from mutation.verdicts import Effort, Verdict
from training_runs import plain_trainer

# Killed with the fourth gradient computed; the last state is that after two steps.
STEPS, EVERY, KILLED_AT = 6, 2, 4


def killed_and_resumed(effort: Effort) -> Verdict:
    """Released steps <= charged steps <= released steps + one; no noise is used twice.

    Before a release is stored the run's folder is copied, which is what a killed
    process leaves, and an unseeded run goes on from the copy.
    """
    del effort  # one run suffices
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder, left = Path(name) / "run", Path(name) / "left"
        witness = Witness(patch)
        try:
            with ending(RunStore, "release", KILLED_AT, folder, left):
                run = plain_trainer(num_steps=STEPS, seed=None)
                run.train(folder, checkpoint_every=EVERY)
            gone_on(plain_trainer(num_steps=STEPS, seed=None), left)
        except (LedgerError, FileExistsError) as error:
            reason = str(error).replace(name, "the folder")
            return Verdict(True, f"the run is refused: {reason}")
        wrong = witness.complaints([left], STEPS)
    kept = f"{witness.released} steps released, {witness.charged} charged"
    return Verdict(bool(wrong), "; ".join(wrong) or kept)
