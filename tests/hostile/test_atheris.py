"""Fuzzing guided by coverage, where atheris is installed."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)
@pytest.mark.parametrize("reader", ["toml", "npz", "jsonl", "csv"])
def test_guided_fuzzing_finds_nothing(tmp_path, reader):
    from fuzzing import seeds

    files = {
        "toml": seeds.TRAINING,
        "npz": seeds.npz(),
        "jsonl": seeds.JSONL,
        "csv": seeds.CSV_ROWS,
    }
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(files[reader])
    # The peak of resident memory is inherited from the process that starts this one,
    # so single allocations are limited instead.
    memory = ["-rss_limit_mb=0", "-malloc_limit_mb=1024"]
    options = [f"-runs={RUNS}", "-seed=1", "-max_len=4096", "-timeout=20", *memory]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, reader, *options, str(corpus)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-1500:] + child.stderr[-3000:]
    assert f"Done {RUNS}" in child.stderr
