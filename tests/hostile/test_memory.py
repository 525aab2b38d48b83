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
MILLION = 10**6
CHILD = textwrap.dedent(
    """
    import json, resource, sys, time
    import jax.numpy, pyarrow.parquet, PIL.Image
    from pathlib import Path
    from jaxdp_episodic import Population
    from jaxdp_episodic.data import load_class_folders
    from jaxdp_episodic.files.toml_file import read_toml
    from jaxdp_episodic.tools.requests.batch import read_rows
    from jaxdp_episodic.tools.requests.request import read_population
    from jaxdp_episodic.tools.sweep.description import Axis
    from jaxdp_episodic.tools.sweep.run import read_columns, read_manifest
    from jaxdp_episodic.trainer.data.user_files import load_npz, load_table

    readers = {
        "npz": load_npz,
        "ids": lambda p: read_population({"file": p.name, "levels": ["g"]}, p.parent),
        "table": lambda p: load_table(p, groups=["g"], features=["x"]),
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


def npy(shape, kind="<f8"):
    """The header of an array that claims to have a shape."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def zipped(path, contents, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as file:
        for name, content in contents:
            file.writestr(f"{name}.npy", content)
    return path


def npz_bombs(folder):
    long_header = b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b" " * 2**20
    zeros = npy(f"({2**23},)") + bytes(2**26)
    claims = {
        "claims": npy("(999999999999,)"),
        "nothing": npy("(9999999999999999,)", "<U0"),
        "nobody": npy("(99999999999999, 0)"),
        "wide": npy("(1,)", "<U999999999"),
        "axes": npy("(" + "1," * 3000 + ")"),
        "header": long_header,
    }
    found = [zipped(folder / f"{n}.npz", [("features", c)]) for n, c in claims.items()]
    # 66 times 64 MiB; a long listing; another compression.
    found.append(zipped(folder / "honest.npz", ((k, zeros) for k in range(66))))
    found.append(zipped(folder / "names.npz", ((k, b"") for k in range(30_000))))
    small = [("features", npy("(3,)") + bytes(24))]
    found.append(zipped(folder / "lzma.npz", small, zipfile.ZIP_LZMA))
    # The archive and its array claim 3 GiB and contain nothing.
    lied = [("features", npy(f"({3 * 2**27},)"))]
    found.append(zipped(folder / "lied.npz", lied, zipfile.ZIP_STORED))
    data = bytearray(found[-1].read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = (128 + 3 * 2**30).to_bytes(4, "little") * 2
    found[-1].write_bytes(data)
    return [(reader, path) for path in found for reader in ("npz", "ids")]


def parquet_bombs(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(name, **columns):
        path = folder / name
        pq.write_table(pa.table(columns), path, compression="zstd")
        assert path.stat().st_size < 2**20
        return path

    rows, long = 50_000, pa.array(["x" * 100_000])
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), long)
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 2**21 * 5, 2**21, dtype=np.int32)),
        pa.array(np.zeros(2**23, np.int8)),
    )
    nested = pa.StructArray.from_arrays([many], ["type"])
    return [
        ("table", written("text.parquet", g=many, x=np.zeros(rows))),
        ("rows", written("step.parquet", step=nested)),
        ("rows", written("lists.parquet", step=lists)),
    ]


def image_bombs(folder):
    def chunk(kind, data):
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    def png(side, *extra):
        header = side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
        pixels = chunk(b"IDAT", zlib.compress(bytes(2**20)))
        body = chunk(b"IHDR", header) + b"".join(extra) + pixels
        return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")

    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**28)))
    contents = {"sides": png(60_000), "text": png(4, *[text] * 20), "real": b""}
    for name, content in contents.items():
        (folder / name / "a").mkdir(parents=True)
        (folder / name / "a" / "x.png").write_bytes(content)
    Image.new("L", (8, 8)).save(folder / "real" / "a" / "x.png")
    return [
        ("folder", folder / "sides"),
        ("folder", folder / "text"),
        ("small", folder / "real"),
    ]


def text_bombs(folder):
    twice = {str(k): 0 for k in range(500_000)}
    files = {
        "toml arrays.toml": b"a = " + b"[" * MILLION,
        "toml tables.toml": b"a = " + b"{a=" * MILLION,
        "toml keys.toml": b"a." * MILLION + b"a = 1",
        "toml spaced.toml": b"a . " * MILLION + b"a = 1",
        "toml quoted.toml": b'"a".' * MILLION + b"a = 1",
        "toml headers.toml": b"[" + b"a." * MILLION + b"a]",
        "toml quotes.toml": b'a = "' + b'\\"' * MILLION,
        "toml large.toml": b"#" * (2**24 + 1),
        "rows deep.jsonl": b'{"a": ' + b"[" * MILLION,
        "rows long.jsonl": b'{"a": "' + b"a" * 2**25,
        "rows twice.jsonl": json.dumps(twice).encode()[:-1] + b', "499999": 0}',
        "rows columns.csv": b",".join(b"%d" % k for k in range(300_000)) + b",7\n",
        "rows parts.csv": b"a." * 60_000 + b"a,b\n1,2\n",
        "rows line.csv": b"g,x" + b"," * 2**25,
        # One id of 100,000 letters, and as many of one: 40 GB as an array.
        "table wide.csv": b"g,x\n" + b"x" * 100_000 + b",1\n" + b"a,1\n" * 100_000,
        "axis axis.json": b'{"version": 1, "type": "Axis", "field": "delta", '
        b'"linspace": [0.1, 0.2, 1000000000000]}',
        "sizes sizes.json": b"[1000000000000000000, 3]",
        "manifest manifest.json": b"[" * MILLION,
    }
    found = [("ids", folder / "wide.csv")]
    for name, content in files.items():
        reader, _, name = name.partition(" ")
        (folder / name).write_bytes(content)
        found.append((reader, folder if reader == "manifest" else folder / name))
    for reader, name in (("toml", "toml"), ("table", "csv"), ("npz", "npz")):
        (folder / f"zero.{name}").symlink_to("/dev/zero")
        found.append((reader, folder / f"zero.{name}"))
    long = [("x", npy("(99999999999,)", "|u1"))]
    return [*found, ("columns", zipped(folder / "columns.npz", long))]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.slow
def test_no_file_takes_much_memory_or_time(tmp_path):
    bombs = (npz_bombs, parquet_bombs, image_bombs, text_bombs)
    attacks = [attack for made in bombs for attack in made(tmp_path)]
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
