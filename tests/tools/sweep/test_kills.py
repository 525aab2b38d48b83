"""A sweep that is killed again and again ends with the same bytes."""

import json
import os
import random
import signal
import time

import pytest

from jaxdp_episodic.tools.sweep.run import MANIFEST, run_sweep
from sweep_runs import SWEEP, contents, start

pytestmark = [
    pytest.mark.usefixtures("shared_cache"),
    pytest.mark.skipif(os.name == "nt", reason="no SIGKILL"),
]

PROGRAM = """
import sys
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import run_sweep

attempt = engines.attempt
def noted(sweep, number):
    print("chunk", number, flush=True)
    return attempt(sweep, number)
engines.attempt = noted
run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path, read):
    """A sweep of 120 chunks, which takes some seconds."""
    text, out = SWEEP.replace("60]", "1280]"), tmp_path / "out"
    sweep = read(text)
    run_sweep(sweep, tmp_path / "expected")
    rng, landed, begun = random.Random(5), 0, 0
    for _ in range(20):
        process = start(PROGRAM, tmp_path / "sweep.toml", out)
        process.stdout.readline()  # the process has begun its first chunk
        time.sleep(rng.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        begun += 1 + process.communicate()[0].count("chunk")
        landed += process.returncode == -signal.SIGKILL
        if (out / MANIFEST).exists():
            assert json.loads((out / MANIFEST).read_text())
    process = start(PROGRAM, tmp_path / "sweep.toml", out)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    # A kill loses at most the chunks in progress: two a device.
    num_chunks = -(-sweep.grid.size // sweep.chunk_size)
    assert begun + output.count("chunk") <= num_chunks + 2 * landed
    assert contents(out) == contents(tmp_path / "expected")
    assert landed >= 15
