"""Kills: a run ended at a call, and the rig that kills whole processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Killed(BaseException):
    """Ends a run; nothing catches it."""


def kill_at(patch, owner, name, call, folder, left):
    """Copies the folder at the beginning of a call and kills the run there."""
    function, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            shutil.copytree(folder, left)
            raise Killed
        return function(*args, **kwargs)

    patch.setattr(owner, name, counted)


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
