"""Parquet: nested columns are refused where cells are read; damage is reported."""

import base64

import pytest

from jaxdp_episodic.files.parquet_file import parquet_batches

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def rows_of(path):
    return [columns for _, columns in parquet_batches(path, None, rows=10)]


@pytest.mark.parametrize("column", [[[1, 2], [3]], [{"a": 1}, {"a": 2}]])
def test_nested_columns_are_refused(tmp_path, column):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2], "text": ["x"] * 2}), path)
    assert rows_of(path)[1] == [[1, 2], ["x", "x"]]
    pq.write_table(pa.table({"a": column}), path)
    with pytest.raises(ValueError, match="'a' must contain numbers or text, has"):
        rows_of(path)


def test_lists_are_found_inside_other_types(tmp_path):
    """Arrow's schema in a file may declare a list as a dictionary."""
    path = tmp_path / "x.parquet"
    dressed = pa.schema([("a", pa.dictionary(pa.int32(), pa.list_(pa.int64())))])
    note = base64.b64encode(dressed.serialize().to_pybytes())
    table = pa.table({"a": [[1, 2, 3], [4, 5, 6]]})
    table = table.replace_schema_metadata({"ARROW:schema": note})
    pq.write_table(table, path, store_schema=False)
    with pytest.raises(ValueError, match="must contain numbers or text, has"):
        rows_of(path)


@pytest.mark.parametrize(
    "footer",
    [b"\xff" * 8, b"\x1c" * 40, b"\x49\x1c\x19\x1c\x3c\x00\x00\x00\x00"],
)
def test_damaged_files(tmp_path, footer):
    path = tmp_path / "x.parquet"
    whole = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    for content in (b"", whole):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a Parquet file"):
            rows_of(path)
