"""The items of columns against Arrow's own accessor, on files that are sound."""

import base64

import numpy as np
import pytest

from jaxdp_episodic.files import parquet_file
from jaxdp_episodic.files.parquet_file import column_items

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


@pytest.mark.parametrize("version", ["1.0", "2.6"])
@pytest.mark.parametrize("rows", [1, 2, 3])
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


def test_many_columns_and_row_groups(tmp_path):
    """Lists of more than 14 items have a longer head."""
    table = pa.table({f"column{i}": np.arange(40) for i in range(200)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    items = column_items(tmp_path / "x.parquet")
    assert len(items) == 200 * 20 and {item.num_items for item in items} == {2}


def test_no_rows(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], "int64")}), tmp_path / "x.parquet")
    assert all(item.num_items == 0 for item in column_items(tmp_path / "x.parquet"))


def whole_file(footer):
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"PAR1" * 3, "no footer at its end"),
        (b"PAR1" + b"\xff" * 8 + b"PAR1", "no footer at its end"),
        (whole_file(b""), "ends too early"),
        (whole_file(b"\x15" + b"\xff" * 11), "more than 64 bits"),
        (whole_file(b"\x49\xfc\xff\xff\xff\x0f"), "ends too early"),
        (whole_file(b"\x49\x15\x00\x00"), "list of structs was expected"),
        (whole_file(b"\x45\x02\x00"), "a list was expected"),
        (whole_file(b"\x1e"), "type 14"),
        (whole_file(b"\x1c" * 40), "deeper than 32 levels"),
        # A row group with a column chunk that says nothing.
        (whole_file(b"\x49\x1c\x19\x1c\x00\x00\x00"), "without a description"),
        (
            whole_file(b"\x49\x1c\x19\x1c\x3c\x00\x00\x00\x00"),
            "without a number of items",
        ),
    ],
)
def test_damaged_footers(tmp_path, content, message):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        column_items(path)


def test_a_footer_of_many_megabytes_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(whole_file(bytes(2**24 + 1)))
    with pytest.raises(ValueError, match="at most 16777216 bytes"):
        column_items(path)


def rows_of(path):
    batches = parquet_file.parquet_batches(path, None, rows=10)
    return [columns for _, columns in batches]


def test_lists_of_too_many_items_are_refused(tmp_path, monkeypatch):
    """Flat columns are not counted, however many rows there are."""
    path = tmp_path / "x.parquet"
    monkeypatch.setattr(parquet_file, "_MOST_ITEMS", 5)
    pq.write_table(pa.table({"a": np.arange(40), "text": ["x"] * 40}), path)
    assert rows_of(path)
    pq.write_table(pa.table({"a": [[1, 2, 3], [4, 5]]}), path)
    assert rows_of(path)
    pq.write_table(pa.table({"a": [[1, 2, 3], [4, 5, 6]]}), path)
    with pytest.raises(ValueError, match="'a.list.element' must have at most 5 items"):
        rows_of(path)


def test_lists_are_found_behind_other_types(tmp_path, monkeypatch):
    """Arrow's schema, which a file may bring along, can call a list a dictionary."""
    path = tmp_path / "x.parquet"
    monkeypatch.setattr(parquet_file, "_MOST_ITEMS", 5)
    dressed = pa.schema([("a", pa.dictionary(pa.int32(), pa.list_(pa.int64())))])
    note = base64.b64encode(dressed.serialize().to_pybytes())
    table = pa.table({"a": [[1, 2, 3], [4, 5, 6]]})
    table = table.replace_schema_metadata({"ARROW:schema": note})
    pq.write_table(table, path, store_schema=False)
    with pytest.raises(ValueError, match="must have at most 5 items"):
        rows_of(path)
