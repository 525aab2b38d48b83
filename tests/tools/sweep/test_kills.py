"""A sweep that is killed again and again ends with the same bytes."""

import json
import os
import random
import signal
import time

import pytest

from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.folder import MANIFEST
from jaxdp_episodic.tools.sweep.run import run_sweep
from sweep_runs import SWEEP, contents, start

pytestmark = [
    pytest.mark.usefixtures("shared_cache"),
    pytest.mark.skipif(os.name == "nt", reason="no SIGKILL"),
]

PROGRAM = """
import sys
from jaxdp_episodic.tools.sweep import engines
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import run_sweep

attempt = engines.attempt
def noted(sweep, number):
    print("chunk", number, flush=True)
    return attempt(sweep, number)
engines.attempt = noted
run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
"""


def killed_until_done(tmp_path, expected, kills, seconds, text=SWEEP, chunks=1):
    """Starts a sweep again and again and kills it at random moments of its work.

    They come at most ``seconds`` behind the beginning of so many chunks.
    """
    (tmp_path / "sweep.toml").write_text(text)
    rng = random.Random(5)
    landed, begun = 0, 0
    for _ in range(kills):
        process = start(PROGRAM, tmp_path / "sweep.toml", tmp_path / "out")
        assert process.stdout is not None
        for _ in range(chunks):
            process.stdout.readline()
        time.sleep(rng.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        begun += chunks + process.communicate()[0].count("chunk")
        landed += process.returncode == -signal.SIGKILL
        if (tmp_path / "out" / MANIFEST).exists():
            assert json.loads((tmp_path / "out" / MANIFEST).read_text())
    process = start(PROGRAM, tmp_path / "sweep.toml", tmp_path / "out")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    # Only what was in work when a kill came is evaluated again: two chunks a device.
    sweep = read_sweep(tmp_path / "sweep.toml")
    num_chunks = -(-sweep.grid.size // sweep.chunk_size)
    assert begun + output.count("chunk") <= num_chunks + 2 * landed
    assert contents(tmp_path / "out") == expected
    return landed


@pytest.mark.slow
def test_killed_halfway(undisturbed, tmp_path):
    """With the third of six chunks begun, so that the first is saved."""
    assert killed_until_done(tmp_path, undisturbed[1], 1, 0.0, chunks=3) == 1


@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path, read):
    """Of a sweep of 120 chunks, which takes some seconds in all."""
    text = SWEEP.replace("60]", "1280]")
    run_sweep(read(text), tmp_path / "expected")
    expected = contents(tmp_path / "expected")
    assert killed_until_done(tmp_path, expected, 20, 0.6, text) >= 15
