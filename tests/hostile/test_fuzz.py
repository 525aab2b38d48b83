"""Every reader gives a clear error for broken files, by Hypothesis and by coverage.

``experiments/trust/fuzz.py`` runs the full number of cases.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fuzzing import seeds
from fuzzing.children import fuzzed
from fuzzing.targets import targets

TARGETS = {target.name: target for target in targets()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TARGETS)
def test_no_reader_fails_otherwise(name, tmp_path):
    target = TARGETS[name]
    assert fuzzed(target, int(200 * target.weight), tmp_path)["failure"] is None


TESTS = Path(__file__).resolve().parents[1]
RUNS = 2_000
CHILD = textwrap.dedent(
    """
    import sys, tempfile
    from pathlib import Path
    import atheris
    import jax, numpy, pyarrow.parquet  # not instrumented
    with atheris.instrument_imports(
        include=["jaxdp_episodic.files", "jaxdp_episodic.tools.requests", "tomllib"]
    ):
        from fuzzing.targets import outcome, targets

    name, folder = sys.argv.pop(1), Path(tempfile.mkdtemp())
    (target,) = (target for target in targets() if target.name == name)
    atheris.Setup(sys.argv, lambda data: outcome(target, data, folder) and None)
    atheris.Fuzz()
    """
)


# Readers that are Python of ours all the way, or nearly.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("request", seeds.REQUEST),
        ("npz", seeds.npz()),
        ("batch jsonl", seeds.JSONL),
        ("batch csv", seeds.CSV_ROWS),
    ],
)
def test_guided_fuzzing_finds_nothing(tmp_path, name, seed):
    pytest.importorskip("atheris")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "seed").write_bytes(seed)
    # The peak of resident memory is inherited from the process that starts this one,
    # so single allocations are limited instead.
    options = f"-runs={RUNS} -seed=1 -max_len=4096 -timeout=20 -rss_limit_mb=0"
    words = [name, *options.split(), "-malloc_limit_mb=1024", "corpus"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-1500:] + child.stderr[-3000:]
    assert f"Done {RUNS}" in child.stderr
