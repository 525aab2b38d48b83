"""A request, small sweeps over it, and checks of their folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from jaxdp_episodic.tools.sweep.run import read_columns

ROOT = Path(__file__).resolve().parents[1]

REQUEST = """
version = 1
num_steps = 300
delta = 1e-5
[step]
type = "GaussianStep"
noise_multiplier = 1.5
[step.sampling]
type = "Poisson"
name = "example"
sampling_probability = 0.01
"""
NOISE, RATE = "noise_multiplier", "example.sampling_probability"


def axis(field, **points):
    """The text of an axis; its points by ``values``, ``linspace`` or ``geomspace``."""
    lines = (f"{key} = {json.dumps(value)}" for key, value in points.items())
    return "\n".join(["[[axes]]", f'field = "{field}"', *lines, ""])


_SWEPT = REQUEST.replace("delta", 'method = "rdp"\nmemory_mib = 1\ndelta')
_RATES = [0.001, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0]
# 520 settings in 2 chunks.
SMALL = _SWEPT + axis(NOISE, geomspace=[0.8, 6.0, 40]) + axis(RATE, values=_RATES)
# 2,880 settings in 6 chunks.
SWEEP = (
    _SWEPT.replace("num_steps = 300\n", "")
    + axis("num_steps", values=[10, 100, 1000])
    + axis(NOISE, geomspace=[0.8, 6.0, 60])
    + axis(RATE, geomspace=[1e-3, 1.0, 16])
)


def columns(path, *names):
    """Columns of a table, each in one array."""
    blocks = list(read_columns(path, names))
    return [np.concatenate([block[name] for block in blocks]) for name in names]


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def no_work(sweep, numbers):
    """An engine that must not be called."""
    raise AssertionError(f"evaluates {numbers}")
    yield


def start(program, *arguments, **changes):
    """Starts Python on a program that imports this checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
