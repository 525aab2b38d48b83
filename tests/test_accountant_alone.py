"""The accountant without the packages of the trainer, and by NumPy without JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ("flax", "optax", "orbax", "tensorstore", "randomgen", "rich")
BRIDGES = ("dp_accounting", "jax_privacy", "opacus")


# Without JAX nothing compiles.
@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.slow), ("jax", "jaxlib", "scipy")]
)
def test_every_question_without_the_trainer(more):
    blocked = (*TRAINER, *BRIDGES, *more)
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "experiments/accountant_alone.py"]
        + [*blocked],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXDP_EPISODIC_ENGINE": "auto"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert set(last) >= {*TRAINER, *set(more) & {"jax"}}
    assert ("jax" in last) == bool(more)
