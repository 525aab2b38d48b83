"""Fuzzing guided by coverage, where atheris is installed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fuzzing import seeds

ROOT = Path(__file__).resolve().parents[2]
RUNS = 20_000
# Readers that are Python of ours all the way, or nearly.
CHILD = textwrap.dedent(
    """
    import sys, tempfile
    from pathlib import Path
    import atheris
    import jax, numpy, pyarrow.parquet  # not instrumented
    with atheris.instrument_imports(
        include=["jaxdp_episodic.files", "jaxdp_episodic.tools.requests", "tomllib"]
    ):
        from jaxdp_episodic.files import archive, toml_file
        from jaxdp_episodic.tools.requests import batch

    def arrays(path):
        archive.read_arrays(path, max_bytes=2**20)

    def rows(path):
        for _, row, _ in batch.read_rows(path):
            assert isinstance(row, (dict, TypeError, ValueError))

    readers = {
        "toml": (toml_file.read_toml, "x.toml"),
        "npz": (arrays, "x.npz"),
        "jsonl": (rows, "x.jsonl"),
        "csv": (rows, "x.csv"),
    }
    read, name = readers[sys.argv.pop(1)]
    path = Path(tempfile.mkdtemp()) / name

    def one(data):
        path.write_bytes(data)
        try:
            read(path)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert str(error)
            assert not isinstance(error, UnicodeError)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["toml", "npz", "jsonl", "csv"])
def test_guided_fuzzing_finds_nothing(tmp_path, reader):
    pytest.importorskip("atheris")
    files = {
        "toml": seeds.TRAINING,
        "npz": seeds.npz(),
        "jsonl": seeds.JSONL,
        "csv": seeds.CSV_ROWS,
    }
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "seed").write_bytes(files[reader])
    # The peak of resident memory is inherited from the process that starts this one,
    # so single allocations are limited instead.
    options = f"-runs={RUNS} -seed=1 -max_len=4096 -timeout=20 -rss_limit_mb=0"
    words = [reader, *options.split(), "-malloc_limit_mb=1024", "corpus"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-1500:] + child.stderr[-3000:]
    assert f"Done {RUNS}" in child.stderr
