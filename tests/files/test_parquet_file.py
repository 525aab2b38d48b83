"""The items of columns against Arrow's own accessor, on files that are sound."""

import base64
import itertools

import pytest

from jaxdp_episodic.files import parquet_file
from jaxdp_episodic.files.parquet_file import column_items
from rows import fast_and_slow

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = {
    "number": [1.0, 2.0, None],
    "flag": [True, False, True],
    "text": ["a", "bé", ""],
    "list": [[1, 2, 3], [], None],
    "struct": [{"a": 1, "b": {"c": [True] * 20}}] * 3,
    "lists": [[[1], [2, 3]], [[]], []],
}


@pytest.mark.parametrize(
    ("version", "rows"),
    fast_and_slow(
        itertools.product(["1.0", "2.6"], [1, 2, 3]),
        lambda version, rows: rows == (1 if version == "1.0" else 2),
    ),
)
def test_items_are_those_that_arrow_reads(tmp_path, version, rows):
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table(COLUMNS),
        path,
        version=version,
        row_group_size=rows,
        write_page_index=True,
        sorting_columns=[pq.SortingColumn(0)],
        store_schema=version == "1.0",
    )
    meta = pq.ParquetFile(path).metadata
    expected = [
        (chunk.path_in_schema, group.num_rows, chunk.num_values)
        for group in map(meta.row_group, range(meta.num_row_groups))
        for chunk in map(group.column, range(group.num_columns))
    ]
    assert [tuple(item) for item in column_items(path)] == expected


def test_no_rows(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], "int64")}), tmp_path / "x.parquet")
    assert all(item.num_items == 0 for item in column_items(tmp_path / "x.parquet"))


def whole_file(footer):
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PAR1" + b"\xff" * 8 + b"PAR1",
        whole_file(b"\x1c" * 40),
        # A row group with a column chunk that says nothing.
        whole_file(b"\x49\x1c\x19\x1c\x3c\x00\x00\x00\x00"),
    ],
)
def test_damaged_footers(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must be a Parquet file: damaged footer"):
        column_items(path)


def test_a_footer_at_which_arrow_ends_its_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "_PRINT_ITEMS", "import os; os.abort()")
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [[1], [2]]}), path)
    with pytest.raises(ValueError, match="must be a Parquet file: damaged footer"):
        column_items(path)


def rows_of(path):
    batches = parquet_file.parquet_batches(path, None, rows=10)
    return [columns for _, columns in batches]


@pytest.mark.parametrize("column", [[[1, 2], [3]], [{"a": 1}, {"a": 2}]])
def test_nested_columns_are_refused(tmp_path, column):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2], "text": ["x"] * 2}), path)
    assert rows_of(path)[1] == [[1, 2], ["x", "x"]]
    pq.write_table(pa.table({"a": column}), path)
    with pytest.raises(ValueError, match="'a' must hold numbers or text, holds"):
        rows_of(path)


def test_lists_are_found_behind_other_types(tmp_path):
    """Arrow's schema, which a file may bring along, can call a list a dictionary."""
    path = tmp_path / "x.parquet"
    dressed = pa.schema([("a", pa.dictionary(pa.int32(), pa.list_(pa.int64())))])
    note = base64.b64encode(dressed.serialize().to_pybytes())
    table = pa.table({"a": [[1, 2, 3], [4, 5, 6]]})
    table = table.replace_schema_metadata({"ARROW:schema": note})
    pq.write_table(table, path, store_schema=False)
    with pytest.raises(ValueError, match="must hold numbers or text, holds"):
        rows_of(path)
