"""Runs that end at any moment, and the rig that kills whole processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from jaxdp_episodic.trainer.run.run_files import files_of_a_run
from jaxdp_episodic.trainer.run.store import RunStore

ROOT = Path(__file__).resolve().parents[1]

# Where a run of seven steps ends, with a state every three: before which call of which
# function.
EVERY = 3
MOMENTS = {
    "before a charge": (RunStore, "charge", 5),
    "after a charge": (PrivateGradient, "__call__", 5),
    "before the release": (RunStore, "release", 5),
    "after the release": (RunDraws, "erase_secrets", 6),
    "before the log": (RunStore, "note", 6),
    "before a state": (RunStore, "save", 2),
    "after a state": (RunStore, "charge", 4),
    "at the last step": (RunStore, "release", 7),
    "at the last state": (RunStore, "save", 4),
}


class Killed(BaseException):
    """Ends a run; nothing catches it."""


@contextlib.contextmanager
def ending(owner, name, call, folder=None, left=None):
    """Ends a run before a call: interrupted, or killed, which leaves ``left``."""
    function, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            if left is None:
                raise KeyboardInterrupt
            shutil.copytree(folder, left)
            raise Killed
        return function(*args, **kwargs)

    end = KeyboardInterrupt if left is None else Killed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(end):
        patch.setattr(owner, name, counted)
        yield


@contextlib.contextmanager
def killed_around_a_commit(number, folder, left):
    """Kills a run before its commits (even numbers) or after them (odd numbers).

    Yields a list; it is empty if the run ended before.
    """
    commit, calls, ends = RunStore._commit, [], []

    def kill_if_due():
        if len(calls) == number:
            shutil.copytree(folder, left)
            ends.append(number)
            raise Killed
        calls.append(1)

    @contextlib.contextmanager
    def committed(store):
        kill_if_due()
        with commit(store) as db:
            yield db
        kill_if_due()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(RunStore, "_commit", committed)
        yield ends


def train_until(step, run, folder, *, end=RuntimeError, **options):
    """Trains a run and ends it after a step; returns the run."""

    def stop(progress):
        if progress.step >= step:
            raise end("killed")

    with pytest.raises(end):
        run.train(folder, on_step=stop, **options)
    return run


def gone_on(run, folder):
    """Resumes a run and trains to its end; returns the steps that it had taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for a step given up
        taken = run.resume(folder) if files_of_a_run(folder) else 0
        run.train(folder, checkpoint_every=EVERY)
    return taken


class Witness:
    """Records noise, charges and releases independently of the run."""

    def __init__(self, patch):
        self.noise, self.charged, self.released = [], 0, 0
        call, charge, release = (
            PrivateGradient.__call__,
            RunStore.charge,
            RunStore.release,
        )

        def noised(gradient, params, blocks, noise, **settings):
            own = [np.array(leaf) for leaf in noise._unused[0]]
            result = call(gradient, params, blocks, noise, **settings)
            self.noise.append(b"".join(leaf.tobytes() for leaf in own))
            return result

        def charged(store, *kind):
            charge(store, *kind)
            self.charged += 1

        def released(store, *release_of):
            release(store, *release_of)
            self.released += 1

        patch.setattr(PrivateGradient, "__call__", noised)
        patch.setattr(RunStore, "charge", charged)
        patch.setattr(RunStore, "release", released)

    def complaints(self, folders, steps, crashes=1):
        """Returns violations: noise used twice, releases without a charge."""
        wrong = []
        if max(Counter(self.noise).values()) > 1:
            wrong.append("noise was used twice")
        is_kept = self.released <= self.charged <= self.released + crashes
        if not is_kept or len(self.noise) > self.charged:
            wrong.append(f"{self.released} released, {self.charged} charged")
        if any(read_ledger(folder).charged != steps for folder in folders):
            wrong.append("another number of steps")
        return wrong


def run_rig(rig, folder, *options):
    """Runs a rig; returns its exit code and its summary."""
    done = subprocess.run(
        [sys.executable, str(rig), "--out", str(folder), *options],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads((folder / "summary.json").read_text())
