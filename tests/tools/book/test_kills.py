"""Six processes charge one book and are killed at any moment: nothing is lost."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from jaxdp_episodic.tools.book.book import create_book, read_book
from jaxdp_episodic.tools.book.content import Protected

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROTECTED = Protected("example", "add_remove", None, "ab" * 32)


def check_kills(book, folder, *, runs, kills):
    create_book(book, PROTECTED, epsilon=8.0, delta=1e-5)
    command = [sys.executable, HERE / "reserving.py", book, folder, runs, kills]
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    killed, refusal = done.stdout.splitlines()
    content = read_book(book)  # checks the hash chain and the total
    found = [entry.run for entry in content.entries]
    noted = [
        run for log in folder.glob("*.log") for run in log.read_text().splitlines()
    ]
    assert len(found) == runs
    assert max(Counter(found).values()) == 1  # no run was charged twice
    assert set(noted) <= set(found) and len(noted) == runs  # none is missing
    assert "nothing was charged" in refusal  # the total allows exactly this many
    return int(killed)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_a_thousand_charges_and_a_hundred_kills(tmp_path):
    killed = check_kills(str(tmp_path / "b.book"), tmp_path, runs=1000, kills=100)
    assert killed == 100


@pytest.fixture(scope="module")
def postgresql():
    """The URL of a temporary PostgreSQL server on its own socket."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL (Debian's package postgresql) is not installed")
    # The server's user cannot read pytest's folder.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        quiet = {"check": True, "capture_output": True, "timeout": 120, "cwd": "/"}
        if os.getuid() == 0:  # it refuses to run as root
            shutil.chown(folder, "postgres", "postgres")
            quiet |= {"user": "postgres", "group": "postgres"}
        data = f"{folder}/data"
        made = ["-D", data, "-A", "trust", "-U", "postgres"]
        subprocess.run([found[-1], *made], **quiet)
        control = [found[-1].with_name("pg_ctl"), "-D", data, "-w", "-l", f"{data}/log"]
        options = f"-c listen_addresses='' -k {folder}"
        subprocess.run([*control, "-o", options, "start"], **quiet)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


@pytest.mark.slow
def test_a_hundred_kills_with_postgresql(postgresql, tmp_path):
    assert check_kills(postgresql, tmp_path, runs=1000, kills=100) == 100
    with pytest.raises(FileExistsError, match="there is already a book"):
        create_book(postgresql, PROTECTED, epsilon=8.0, delta=1e-5)
