"""Runs that end at any moment, a rig that kills processes, and folders of 0.2."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import pytest

from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.mechanisms import GradientStep, RunDraws, array_types
from jaxdp_episodic.trainer.run.run_files import files_of_a_run
from jaxdp_episodic.trainer.run.store import RunStore

ROOT = Path(__file__).resolve().parents[1]

# Where a run of seven steps ends, with a state every three: before which call of which
# function.
EVERY = 3
MOMENTS = {
    "before the first charge": (RunStore, "charge", 1),
    "before a charge": (RunStore, "charge", 5),
    "after a charge": (PrivateGradient, "__call__", 5),
    "before the release": (RunStore, "release", 5),
    "before it is applied": (GradientStep, "apply", 6),  # once in the dry run
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


def killed_to_the_end(make, folder, every):
    """Kills a run and then its resumed ones, ``every`` time, until one ends.

    Returns the last run, its folder, and the number of kills.
    """
    for died in range(40):
        run, left = make(), folder.with_name(f"left {died}")
        with killed_around_a_commit(every, folder, left) as ends:
            gone_on(run, folder)
        if not ends:
            return run, folder, died
        folder = left
    raise AssertionError("it does not end")


class Witness:
    """Records noise, charges and releases independently of the run."""

    def __init__(self, patch):
        self.noise, self.charged, self.released = [], 0, 0
        call = PrivateGradient.__call__
        charge, release = RunStore.charge, RunStore.release

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


# --- Ledgers and runs as version 0.2 wrote them ---


def old_ledger(path, step, processes, *, delta=1e-5, tail=b"", **header):
    """Writes one; of each process its name (None: it had none) and its charges."""
    text = b""

    def line(record):
        body = json.dumps(record, separators=(",", ":")).encode()[:-1]
        digest = hashlib.sha256(text + body).hexdigest()
        return body + f',"hash":"{digest}"}}\n'.encode()

    first = {"format": "jaxdp-episodic ledger", "version": 1, "run": "ab" * 16}
    first |= {"epsilon": 8.0, "delta": delta, "seeded": False, **header}
    text += line(first)
    text += line({"step": step.to_dict()})
    charged = 0
    for name, number in processes:
        process = {} if name is None else {"process": name}
        text += line({"opened": {"machine": "x", **process}, "charged": charged})
        text += b"1\n" * number
        charged += number
    text += line({"charged": charged})
    path.write_bytes(text + (tail if isinstance(tail, bytes) else line(tail)))
    return path


# What the version before kept of a run that does not choose.
OldState = namedtuple("OldState", ("params", "optimizer_state", "start", "clip_norm"))


def old_run(folder, run, step, *, charged):
    """Writes a folder of a trainer's run, as a kill left it after steps by hand.

    Args:
      folder: that is made.
      run: the trainer, whose state is in the checkpoint.
      step: that its ledger describes.
      charged: steps in the ledger.
    """
    import orbax.checkpoint as ocp  # it takes a second

    taken, processes = run.num_steps_taken, [("a" * 32, charged)]
    folder.mkdir()
    planned = {} if run.budget.planned is None else {"planned": run.budget.planned}
    ledger = old_ledger(folder / "ledger.jsonl", step, processes, **planned)
    content = ledger.read_bytes()
    state = OldState(*run.state[:4])
    mark = ["ab" * 16, taken, len(content), hashlib.sha256(content).hexdigest()]
    meta = {"format": 5, "charged_steps": taken, "ledger": mark, "run": run.run}
    meta = json.loads(json.dumps(meta | {"state": array_types(state)}))
    text = json.dumps(meta, sort_keys=True)
    meta["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    with contextlib.closing(ocp.CheckpointManager(folder / "checkpoints")) as manager:
        saved = ocp.args.StandardSave(state)
        kinds = {"state": saved, "meta": ocp.args.JsonSave(meta)}
        manager.save(taken, args=ocp.args.Composite(**kinds))
    (folder / "journal").write_bytes(b"releases")
    for number, epoch in run._main.draws._epochs.items():  # the running one
        own = {"epoch": number, "units": np.concatenate(epoch)}
        np.savez(file := io.BytesIO(), run=mark[0], lengths=[*map(len, epoch)], **own)
        digest = hashlib.sha256(file.getvalue()).digest()
        (folder / "epoch").write_bytes(digest + file.getvalue())
