"""CSV, JSON and tables of rows: what is read, what is refused, what is written."""

import base64
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from jaxdp_episodic.files import atomic, json_file, table_file
from jaxdp_episodic.files.json_file import json_lines, parse_json, plain
from jaxdp_episodic.files.parquet_file import parquet_batches
from jaxdp_episodic.files.table_file import csv_lines, read_csv_columns, writing


def written(folder, content):
    path = folder / "x.csv"
    path.write_bytes(content)
    return path


def columns(path, names=("a",), max_bytes=1000):
    return read_csv_columns(path, names, max_bytes=max_bytes)


def test_columns_of_csv(tmp_path):
    for content, expected in (
        (b"a,b\n1,2\n", {"a": ["1"], "b": ["2"]}),
        (b"\xef\xbb\xbfb,a\r\n\r\n1,2\r\n\r\n", {"a": ["2"], "b": ["1"]}),
        (b'c,a,b\n,"1\n2",\n', {"a": ["1\n2"], "b": [""]}),
        (b"a,b", {"a": [], "b": []}),
        (b'"a";b\n"1;2";"3,4 m"\n', {"a": ["1;2"], "b": ["3,4 m"]}),
        (b"a\tb\n1\t-2.5\n", {"a": ["1"], "b": ["-2.5"]}),
    ):
        assert columns(written(tmp_path, content), ("a", "b")) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no column 'a'; the columns are"),
        (b"\na\n", "no column 'a'"),
        (b"aa\n1\n", "no column 'a'; did you mean 'aa'"),
        (b"a,b,b\n1,2,3\n", "two columns 'b'"),
        (b"a\n1\n2,3\n", "line 3: 2 fields under 1 column names"),
        (b'a\n"1', "line 2: unexpected end of data"),
        (b'"a" b\n1', "the line of names: ',' expected after '\"'"),
        (b"a\n\xff\n", "not UTF-8 text: invalid start byte"),
        (b"a\n" + b"1" * 50, "line 2: longer than 16 MiB"),
        (b"a\n" + b"1\n" * 500, "must have at most max_bytes=1000 bytes"),
    ],
)
def test_invalid_csv_is_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(table_file, "MAX_LINE_BYTES", 40)
    with pytest.raises(ValueError, match=message):
        columns(written(tmp_path, content))


def test_only_plain_files_are_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        columns(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="must be a plain file"):
        columns(tmp_path)


def test_a_bad_line_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(table_file, "MAX_LINE_BYTES", 10)
    path = written(tmp_path, b"a\n1\n" + b"2" * 30 + b'\n\n3,4\n"5" 6\n\xff\n7\n')
    found = list(csv_lines(path, errors="surrogateescape"))
    said = [
        str(cells) if isinstance(cells, ValueError) else cells for _, cells in found
    ]
    assert said[:2] == [["a"], ["1"]] and said[-2:] == [["\udcff"], ["7"]]
    assert "longer than 16 MiB" in said[2]
    assert "2 fields under 1" in said[3] and "expected after" in said[4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "not UTF-8 text: invalid start byte at byte 0"),
        ("[1,", "not valid JSON: Expecting value at column 4"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' occurs twice"),
        ("9" * 5000, "not valid JSON"),
        ("[" * 10**5, "nested too deeply"),
    ],
)
def test_invalid_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as found:
        parse_json(text)
    assert not isinstance(found.value, UnicodeError | json.JSONDecodeError)


def test_infinity_is_read_only_where_allowed():
    assert parse_json(b'{"a": [Infinity, 1]}') == {"a": [math.inf, 1]}
    for word in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"{word} is not a JSON number"):
            parse_json(word, allow_infinity=False)


def test_lines_of_json(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_LINE_BYTES", 20)
    lines = [b'\xef\xbb\xbf{"a": 1}', b" ", b"[1]", b"2" * 70, b"{", b'{"b": 2}']
    path = written(tmp_path, b"\n".join(lines))
    found = list(json_lines(path))
    assert [number for number, _, _ in found] == [1, 3, 4, 5, 6]
    assert found[0][1:] == ({"a": 1}, 12) and found[-1][1:] == ({"b": 2}, 8)
    words = ("must be an object", "longer than 16 MiB", "not valid JSON")
    for word, (number, error, _) in zip(words, found[1:4], strict=True):
        assert str(error).startswith(f"line {number}: {word}")


def test_plain_values():
    mixed = {1: (np.float64(2), np.array([math.inf, 3.5])), "a": [None, True, math.nan]}
    text = json.dumps(plain(mixed), allow_nan=False)
    assert text == '{"1": [2.0, ["inf", 3.5]], "a": [null, true, "nan"]}'


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_tables_are_written_atomically(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"x{suffix}"
    path.write_text("older")
    rows = [{"n": 1, "s": "\udcff", "x": math.inf}, {"n": 2, "s": None, "x": None}]
    types = {"n": "int64", "s": "string", "x": "float64"}
    with pytest.raises(KeyboardInterrupt), writing(path, types) as write:
        write(rows)
        raise KeyboardInterrupt
    assert path.read_text() == "older" and len(list(tmp_path.iterdir())) == 1
    with writing(path, types) as write:
        for row in rows:
            write([row])
    assert len(list(tmp_path.iterdir())) == 1
    if suffix == ".csv":
        assert path.read_text() == "n,s,x\n1,\\udcff,inf\n2,,\n"
    elif suffix == ".jsonl":
        found = [row for _, row, _ in json_lines(path)]
        assert found == [{**rows[0], "x": "inf"}, rows[1]]
    else:
        import pyarrow.parquet as parquet

        assert parquet.read_table(path).to_pylist() == [
            {**rows[0], "s": "\\udcff"},
            rows[1],
        ]


# --- Parquet ---


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def rows_of(path):
    return [columns for _, columns in parquet_batches(path, None, rows=10)]


def test_columns_of_other_types_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2], "text": ["x"] * 2}), path)
    assert rows_of(path)[1] == [[1, 2], ["x", "x"]]
    # Arrow's schema in a file may declare a list as a dictionary.
    dressed = pa.schema([("a", pa.dictionary(pa.int32(), pa.list_(pa.int64())))])
    note = {"ARROW:schema": base64.b64encode(dressed.serialize().to_pybytes())}
    for table in (
        pa.table({"a": [[1, 2], [3]]}),
        pa.table({"a": [{"a": 1}, {"a": 2}]}),
        pa.table({"a": [b"a", b"b"]}),
        pa.table({"a": pa.array([1, 2], pa.timestamp("ns"))}),
        pa.table({"a": [[1, 2, 3], [4, 5, 6]]}).replace_schema_metadata(note),
    ):
        pq.write_table(table, path, store_schema=False)
        with pytest.raises(ValueError, match="'a' must contain numbers or text, has"):
            rows_of(path)


def test_damaged_files(tmp_path):
    path = tmp_path / "x.parquet"
    for footer in (
        b"\xff" * 8,
        b"\x1c" * 40,
        b"\x49\x1c\x19\x1c\x3c" + b"\0" * 4,
        None,
    ):
        size = len(footer or b"").to_bytes(4, "little")
        path.write_bytes(b"PAR1" + footer + size + b"PAR1" if footer else b"")
        with pytest.raises(ValueError, match="must be a Parquet file"):
            rows_of(path)


def test_content_is_on_the_disk_before_its_name_and_then_the_name(
    tmp_path, monkeypatch
):
    """So that a power failure leaves the old content or the new one."""
    done = []

    def renamed(path, target):
        done.append("renamed")
        os.rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_ino))
    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, renamed)
    file, folder = tmp_path / "file", tmp_path / "folder"
    atomic.write_atomically(file, "x")
    with atomic.atomic_folder(folder) as new:
        (new / "x").touch()
    inodes = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    above = tmp_path.stat().st_ino
    assert done[:3] == [inodes[file], "renamed", above]
    assert done[3:] == [inodes[folder / "x"], inodes[folder], "renamed", above]
