"""Sweeps on Ray, on a local cluster.

Slow, because Ray takes long to start; skipped where it is not installed, because
the tests do not depend on it.
"""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxdp_episodic.files import optional
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.run import RayEngine, run_sweep
from sweep_runs import start

ROOT = Path(__file__).resolve().parents[3]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed (the extra [ray])",
)

PROGRAM = """
import sys
from jaxdp_episodic.tools.cli import run
sys.exit(run(["sweep", sys.argv[1], "--out", sys.argv[2], "--engine", "ray"]))
"""


def test_options_are_checked():
    for name in ("num_cpus", "num_gpus", "max_retries"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            RayEngine(**{name: -1})


def test_without_ray_the_error_says_how_to_get_it(monkeypatch, read, sweep_text):
    def missing(name):
        raise ImportError(name)

    engines._ray.cache_clear()
    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install .\.\[ray\]"):
        next(RayEngine()(read(sweep_text), [0]))


def descendants(process):
    """Ids of a process's descendants with their command lines; Linux only."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            names[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue
        parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, todo = {}, [process]
    while todo:
        parent = todo.pop()
        children = [child for child, above in parents.items() if above == parent]
        found |= {child: names[child] for child in children}
        todo += children
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_a_lost_worker_costs_nothing(tmp_path, read, sweep_text):
    """A worker is killed while it evaluates; the table has the same bytes."""
    text = sweep_text.replace("6.0, 40]", "6.0, 2000]")  # 51 chunks
    expected = run_sweep(read(text), tmp_path / "expected").table
    assert expected is not None
    process = start(PROGRAM, tmp_path / "sweep.toml", tmp_path / "out")
    shards, killed = tmp_path / "out" / "shards", None
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        some_are_done = shards.is_dir() and len(list(shards.iterdir())) >= 2
        busy = [
            number
            for number, command in descendants(process.pid).items()
            if command.startswith("ray::attempt")
        ]
        if some_are_done and busy:
            killed = busy[0]
            os.kill(killed, signal.SIGKILL)
            break
        time.sleep(0.02)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert killed is not None
    assert (tmp_path / "out" / expected.name).read_bytes() == expected.read_bytes()
    assert "26,000" in output
