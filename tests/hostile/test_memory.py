"""Tiny files that claim or unpack to gigabytes: refused quickly, in little memory.

A separate process with a limited address space reads them all.
"""

import json
import os
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
MORE_MIB = 768  # above the process's memory after its imports
SECONDS = 10.0  # for one file, on a busy machine; most take milliseconds

CHILD = textwrap.dedent(
    """
    import json, resource, sys, time
    import jax.numpy, pyarrow.parquet, PIL.Image
    from pathlib import Path
    from jaxdp_episodic.tools.requests.batch import read_rows
    from jaxdp_episodic.tools.requests.request import EpsilonRequest
    from jaxdp_episodic.tools.requests.request import read_population, read_request
    from jaxdp_episodic.accountant.describe.step import GaussianStep
    from jaxdp_episodic.trainer.data.folders import load_class_folders
    from jaxdp_episodic.trainer.data.user_files import load_npz, load_table
    from jaxdp_episodic.files.toml_file import read_toml
    from jaxdp_episodic.accountant.describe.population import Population
    from jaxdp_episodic.tools.sweep.run import read_manifest
    from jaxdp_episodic.tools.sweep.description import Axis
    from jaxdp_episodic.tools.sweep.run import read_columns

    def table(path):
        return load_table(path, groups=["g"], features=["x"])

    readers = {
        "npz": load_npz,
        "ids": lambda p: read_population({"file": p.name, "levels": ["g"]}, p.parent),
        "table": table,
        "rows": lambda p: list(read_rows(p)),
        "folder": load_class_folders,
        "small": lambda p: load_class_folders(p, size=30_000),
        "toml": read_toml,
        "manifest": read_manifest,
        "columns": lambda p: list(read_columns(p, ["x"], num_rows=3)),
        "axis": lambda p: Axis.from_dict(json.loads(p.read_text())),
        "sizes": lambda p: Population.from_sizes(json.loads(p.read_text())),
    }
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(sys.argv[2]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in Path(sys.argv[1]).read_text().splitlines():
        reader, path = json.loads(line)
        start = time.perf_counter()
        try:
            readers[reader](Path(path))
            said = "accepted"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([reader, path, said, time.perf_counter() - start]), flush=True)
    """
)


def npy(shape: str, kind: str = "<f8") -> bytes:
    """The header of an array that claims to have a shape."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def archive(
    path: Path,
    content: bytes,
    method: int = zipfile.ZIP_DEFLATED,
    name: str = "features",
) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr(f"{name}.npy", content)
    return path


def npz_bombs(folder: Path) -> list[tuple[str, Path]]:
    zeros = bytes(2**26)
    honest = folder / "honest.npz"
    with zipfile.ZipFile(honest, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in range(66):  # 66 times 64 MiB
            header = npy(f"({2**23},)")
            file.writestr(f"{name}.npy", header + zeros)
    long_header = b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b" " * 2**20
    listing = folder / "listing.npz"
    with zipfile.ZipFile(listing, "w") as file:
        for name in range(30_000):
            file.writestr(f"{name}.npy", b"")
    found = [
        honest,
        listing,
        archive(folder / "claims.npz", npy("(999999999999,)")),
        archive(folder / "nothing.npz", npy("(9999999999999999,)", "<U0")),
        archive(folder / "nobody.npz", npy("(99999999999999, 0)")),
        archive(folder / "wide.npz", npy("(1,)", "<U999999999")),
        archive(folder / "axes.npz", npy("(" + "1," * 3000 + ")")),
        archive(folder / "header.npz", long_header),
        archive(folder / "lzma.npz", npy("(3,)") + bytes(24), zipfile.ZIP_LZMA),
        lied_size(folder),
    ]
    return [(reader, path) for path in found for reader in ("npz", "ids")]


def lied_size(folder: Path) -> Path:
    """The archive and its array claim 3 GiB and contain nothing."""
    path = archive(folder / "lied.npz", npy(f"({3 * 2**27},)"), zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    claimed = (128 + 3 * 2**30).to_bytes(4, "little")
    data[entry + 20 : entry + 28] = claimed * 2
    path.write_bytes(data)
    return path


def parquet_bombs(folder: Path) -> list[tuple[str, Path]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(name: str, **columns: object) -> Path:
        path = folder / name
        pq.write_table(pa.table(columns), path, compression="zstd")
        assert path.stat().st_size < 2**20
        return path

    rows = 50_000
    long = pa.array(["x" * 100_000])
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), long)
    text = written("text.parquet", g=many, x=np.zeros(rows))
    nested = pa.StructArray.from_arrays([many], ["type"])
    step = written("step.parquet", step=nested)
    million = np.zeros(2**21, np.int8)
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 2**21 * 5, 2**21, dtype=np.int32)),
        pa.array(np.tile(million, 4)),
    )
    listed = written("lists.parquet", step=lists)
    return [("table", text), ("rows", step), ("rows", listed)]


def csv_bombs(folder: Path) -> list[tuple[str, Path]]:
    wide = folder / "wide.csv"
    # One id of 100,000 letters, and as many of one: 40 GB as an array.
    wide.write_text("g,x\n" + "x" * 100_000 + ",1\n" + "a,1\n" * 100_000)
    line = folder / "line.csv"
    line.write_text("g,x" + "," * 2**25)
    return [("table", wide), ("ids", wide), ("rows", line)]


def image_bombs(folder: Path) -> list[tuple[str, Path]]:
    def held(name: str, content: bytes) -> Path:
        (folder / name / "a").mkdir(parents=True)
        (folder / name / "a" / "x.png").write_bytes(content)
        return folder / name

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    def png(side: int, *extra: bytes) -> bytes:
        header = side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
        pixels = chunk(b"IDAT", zlib.compress(bytes(2**20)))
        body = chunk(b"IHDR", header) + b"".join(extra) + pixels
        return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")

    text = b"a\0\0" + zlib.compress(bytes(2**28))
    (folder / "real" / "a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(folder / "real" / "a" / "x.png")
    return [
        ("folder", held("sides", png(60_000))),
        ("folder", held("text", png(4, *[chunk(b"zTXt", text)] * 20))),
        ("small", folder / "real"),
    ]


def text_bombs(folder: Path) -> list[tuple[str, Path]]:
    million = 10**6
    files = {
        "arrays.toml": b"a = " + b"[" * million,
        "tables.toml": b"a = " + b"{a=" * million,
        "keys.toml": b"a." * million + b"a = 1",
        "spaced.toml": b"a . " * million + b"a = 1",
        "quoted.toml": b'"a".' * million + b"a = 1",
        "headers.toml": b"[" + b"a." * million + b"a]",
        "quotes.toml": b'a = "' + b'\\"' * million,
        "large.toml": b"#" * (2**24 + 1),
        "deep.jsonl": b'{"a": ' + b"[" * million,
        "long.jsonl": b'{"a": "' + b"a" * 2**25,
        "twice.jsonl": json.dumps({str(k): 0 for k in range(500_000)}).encode()[:-1]
        + b', "499999": 0}',
        "columns.csv": b",".join(b"%d" % k for k in range(300_000)) + b",7\n",
        "parts.csv": b"a." * 60_000 + b"a,b\n1,2\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "zero.toml").symlink_to("/dev/zero")
    (folder / "zero.csv").symlink_to("/dev/zero")
    (folder / "zero.npz").symlink_to("/dev/zero")
    (folder / "deep").mkdir()
    (folder / "deep" / "manifest.json").write_bytes(b"[" * million)
    found = [("toml", folder / name) for name in files if name.endswith("toml")]
    found += [("rows", folder / n) for n in files if not n.endswith("toml")]
    return [
        *found,
        ("toml", folder / "zero.toml"),
        ("table", folder / "zero.csv"),
        ("ids", folder / "zero.csv"),
        ("npz", folder / "zero.npz"),
        ("manifest", folder / "deep"),
    ]


def description_bombs(folder: Path) -> list[tuple[str, Path]]:
    axis = {"version": 1, "type": "Axis", "field": "delta"}
    documents = {
        "axis": {**axis, "linspace": [0.1, 0.2, 10**12]},
        "sizes": [10**18, 3],
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    long = archive(folder / "columns.npz", npy("(99999999999,)", "|u1"), name="x")
    return [("columns", long), *((n, folder / f"{n}.json") for n in documents)]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.slow
def test_no_file_takes_much_memory_or_time(tmp_path):
    attacks = [
        *npz_bombs(tmp_path),
        *parquet_bombs(tmp_path),
        *csv_bombs(tmp_path),
        *image_bombs(tmp_path),
        *text_bombs(tmp_path),
        *description_bombs(tmp_path),
    ]
    listed = tmp_path / "attacks"
    listed.write_text("".join(json.dumps([r, str(p)]) + "\n" for r, p in attacks))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(listed), str(MORE_MIB)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(results) == len(attacks), child.stderr[-2000:]
    # In a batch with a bad line the rows are errors, not the file.
    clear = ("ValueError", "TypeError")
    by_row = ("deep.jsonl", "long.jsonl", "twice.jsonl")
    wrong = [
        (reader, Path(path).name, said, round(seconds, 2))
        for reader, path, said, seconds in results
        if not (said.startswith(clear) or Path(path).name in by_row)
        or seconds > SECONDS
    ]
    assert wrong == []
