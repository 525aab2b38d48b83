"""Users' files: read as documented; tests/hostile has the hostile ones."""

import re

import numpy as np
import pytest

from jaxdp_episodic.files import parquet_file
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data import user_files
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table, read_examples

RNG = np.random.default_rng(0)


# --- npz ---


def saved(folder, **arrays):
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def test_npz_by_class(tmp_path):
    images = RNG.integers(0, 256, (3, 4, 5, 5), dtype=np.uint8)
    path = saved(tmp_path, images=images, classes=np.array(["c", "a", "b"]))
    table = load_npz(path)
    assert table.features.shape == (12, 5, 5, 1)
    assert np.unique(table.unit_column("class")).tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(table.features[:4, ..., 0], images[1] / 255, rtol=1e-6)


def test_npz_of_records_with_levels_targets_and_split(tmp_path):
    path = saved(
        tmp_path,
        features=np.arange(12.0).reshape(6, 2),
        labels=np.array([1, 0, 1, 0, 2, 2]),
        user=np.array([9, 8, 9, 8, 8, 8]),
        targets=np.arange(6) / 10,
        split=np.array(["train"] * 5 + ["test"]),
    )
    table = load_npz(path, levels=["user"], split="train")
    assert table.level_names == ("user", "class", "example")
    assert table.num_examples == 5
    assert table.targets is not None
    for row, target in zip(table.features, table.targets, strict=True):
        assert target == np.float32(row[0] / 20)
    with pytest.raises(ValueError, match="split must be one that"):
        load_npz(path, split="dev")
    with pytest.raises(ValueError, match="must hold school"):
        load_npz(path, levels=["school"])


def test_npz_with_a_public_list_of_classes(tmp_path):
    """A class without examples stays."""
    values, labels = np.ones((5, 2)), np.array(["a", "a", "b", "b", "c"])
    classes = np.array(["c", "a", "b", "d"])
    for number, counts in ((5, [2, 2, 1, 0]), (4, [2, 2, 0, 0])):
        path = saved(
            tmp_path, features=values[:number], labels=labels[:number], classes=classes
        )
        tree = load_npz(path).population
        assert tree.children_counts[1].tolist() == counts
    with pytest.raises(ValueError, match="classes next to labels .* is a public list"):
        load_npz(path, levels=["labels"])
    short = saved(tmp_path, features=values, labels=labels, classes=classes[1:])
    with pytest.raises(ValueError, match="every unit that has records, 'c' is missing"):
        load_npz(short)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.zeros(3, int)}, "labels and either images or features"),
        ({"images": np.zeros((2, 2)), "features": np.zeros((2, 2))}, "either images"),
        ({"features": np.zeros((3, 2))}, "come with an array labels"),
        ({"features": np.zeros((3, 2)), "labels": np.zeros((3, 2))}, "one-hot rows"),
        ({"features": np.zeros((3, 2)), "labels": np.zeros(2, int)}, "one entry"),
        ({"features": np.full((3, 2), np.nan), "labels": np.zeros(3, int)}, "row 0"),
        ({"images": np.zeros((3, 2, 2), int), "labels": np.zeros(3, int)}, "uint8"),
        ({"features": np.ones((0, 3, 2))}, "features in .* must not be empty"),
    ],
)
def test_unsuitable_npz_is_refused(tmp_path, arrays, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load_npz(saved(tmp_path, **arrays))


# --- Tables ---

CSV = "school,pupil_age,score\nx,11,0.5\ny,12,1.5\nx,13,2.5\n"
COLUMNS = {"groups": ["school"], "features": ["pupil_age"], "target": "score"}
USERS = {"groups": ["user"], "features": ["x"], "target": None}


def test_csv_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, other = tmp_path / "t.csv", tmp_path / "t.parquet"
    path.write_text(CSV)
    table = load_table(path, **COLUMNS)
    assert table.level_names == ("school", "example")
    assert table.features[:, 0].tolist() == [11, 13, 12]
    assert table.targets is not None and table.targets.tolist() == [0.5, 2.5, 1.5]
    columns = {"school": ["x", "y", "x"], "pupil_age": [11, 12, 13]}
    pq.write_table(pa.table({**columns, "score": [0.5, 1.5, 2.5]}), other)
    assert load_table(other, **COLUMNS).fingerprint == table.fingerprint
    other.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match="must be a Parquet file"):
        load_table(other, **COLUMNS)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (CSV, {"features": ["pupil_ago"]}, "did you mean 'pupil_age'"),
        (CSV, {"features": ["score"]}, "may be used only once"),
        (CSV, {"groups": []}, "at least one column"),
        (CSV.replace("12", "twelve"), {}, r"'twelve' in record 2 \(row 3\)"),
        (CSV.replace("y,", ","), {}, r"must be an id, got nothing in record 2"),
        (CSV.replace("y,12", "y"), {}, "line 3: 2 fields under 3"),
        (CSV, {"max_bytes": 5}, "at most max_bytes=5"),
        ("\udcff", {}, "t.csv: not UTF-8 text: invalid start byte; save it as UTF-8"),
        ("user,x\n", USERS, "must have at least one record, has none"),
        ("user,x\na,1\na\0,2\n", USERS, "NUL"),
        ("example,x\n1,2\n", USERS | {"groups": ["example"]}, "a column 'example'"),
    ],
)
def test_unsuitable_csv_is_refused(tmp_path, text, changes, message):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_table(path, **{**COLUMNS, **changes})


def test_missing_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(TypeError, match="groups must be a list"):
        load_table(tmp_path / "t.csv", groups="school", features=["a"])
    with pytest.raises(ValueError, match="must end in .csv or .parquet"):
        load_table(tmp_path / "t.xlsx", **COLUMNS)


def test_a_table_with_a_public_list_of_units(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user,x\n7,1\n7,2\n9,3\n")
    table = load_table(path, **USERS, public_units=["7", "8", "9"])
    assert table.population.children_counts[1].tolist() == [2, 0, 1]
    with pytest.raises(TypeError, match="public_units must be ids like those"):
        load_table(path, **USERS, public_units=[7, 8, 9])
    path = with_lists(tmp_path, vectors=[[1.0]] * 3, user=[7, 7, 9])
    whole = {"groups": ["user"], "features": ["age"]}
    table = load_table(path, **whole, public_units=["7", "8", "9"])
    assert table.population.children_counts[1].tolist() == [2, 0, 1]
    for listed, error in ((["7", "x"], TypeError), ([7.5, 9], ValueError)):
        with pytest.raises(error, match="public_units must"):
            load_table(path, **whole, public_units=listed)
    with pytest.raises(ValueError, match="no column 3"):
        load_table(path, label=3, features=["age"])


# --- Names of columns ---

SAYS = "the first line must name the columns"


def table(path, header, column=lambda number: f"{number:.3f}", *, names=None):
    """A file of 30 classes of 6 records; a header of None writes no header line."""
    rng = np.random.default_rng(0)
    names = names or [f"class {k}" for k in range(30)]
    rows = []
    for name in np.repeat(names, 6):
        cells = [column(number) for number in rng.normal(size=3)]
        rows.append(",".join([*cells, str(name)]))
    path.write_text("\n".join(rows if header is None else [header, *rows]))
    return path


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("0,1,2,3", range(30)),  # a data frame without column names
        ("2019,2020,2021,label", None),
        ("2019_2020,2020_2021,2021_2022,label", None),
        (",-1.5,c,kind", None),  # names of columns that are not used
    ],
)
def test_names_of_columns(tmp_path, header, names):
    path = table(tmp_path / "t.csv", header, names=names)
    *features, label = header.split(",")
    features = features[-1:] if "" in features else features
    assert load_table(path, features=features, label=label).num_examples == 180


def test_a_headerless_file_is_refused_and_not_shown(tmp_path, capsys):
    path, out = table(tmp_path / "t.csv", None), tmp_path / "x.toml"
    record = path.read_text().split("\n")[0].split(",")
    for options in ([], ["--label", "class"], ["--features", "a"]):
        assert cli.run(["init", str(path), "--out", str(out), *options]) == 2
        said = capsys.readouterr().err
        assert SAYS in said and str(path) in said and "column 1 " in said
        assert "add a line of names above" in said and not out.exists()
        assert not [cell for cell in record if cell in said]
    source = {"features": ["a", "b", "c"], "label": "kind"}
    with pytest.raises(ValueError, match=SAYS):
        read_examples([path], shape=(3,), source=source)


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("a,1.5,c,kind", 2),
        ("1e3,b,c,kind", 1),
        ("a,b, +2 ,kind", 3),
        ("a,nan,c,kind", 2),
        ("a,,c,kind", 2),
        ("a,5,5,kind", 2),
        ("1,5,2,class 0", 4),  # integers: told apart by the class
    ],
)
def test_invalid_column_names(tmp_path, header, column):
    path = table(tmp_path / "t.csv", header)
    *features, label = header.split(",")
    if len(set(features)) < 3:
        features = ["a"]
    with pytest.raises(ValueError, match=re.escape(f"{path}: {SAYS}")) as error:
        load_table(path, features=features, label=label)
    assert f"but column {column} " in str(error.value)


def test_a_missing_column_is_named(tmp_path):
    for header, message in (
        (",-1.5,c,kind", "column 2 is named by a number"),
        (",b,c,kind", "no column 'd'"),  # the unnamed index of a data frame
    ):
        path = table(tmp_path / "t.csv", header)
        with pytest.raises(ValueError, match=message):
            load_table(path, features=["d"], label="kind")


def with_lists(folder, name="data.parquet", *, vectors, **more):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"vector": vectors, "age": np.linspace(0, 1, len(vectors))}
    table["word"] = [f"w{i % 6}" for i in range(len(vectors))]
    parquet.write_table(arrow.table(table | more), folder / name, row_group_size=7)
    return folder / name


def test_lists_of_numbers_are_features(tmp_path, monkeypatch):
    """Of a run, of an import and of predictions, beside plain columns."""
    vectors = RNG.normal(size=(30, 5)).astype(np.float32)
    path = with_lists(tmp_path, vectors=list(vectors))
    table = load_table(path, label="word", features=["vector", "age"])
    order = np.argsort([f"w{i % 6}" for i in range(30)], kind="stable")
    wanted = np.column_stack([vectors, np.linspace(0, 1, 30)]).astype(np.float32)
    np.testing.assert_array_equal(table.features, wanted[order], strict=True)
    command = ["data", "import", str(path), str(tmp_path / "out")]
    assert cli.run([*command, "--groups=word", "--features", "vector", "age"]) == 0
    assert cli.run(["init", str(path), "--out", str(tmp_path / "run.toml")]) == 0
    assert 'features = ["age", "vector"]' in (tmp_path / "run.toml").read_text()
    stored = load_stored(tmp_path / "out")
    np.testing.assert_array_equal(stored.features[:], wanted[order], strict=True)
    source = {"features": ["vector", "age"], "label": "word"}
    found = read_examples([path], shape=(6,), source=source)
    np.testing.assert_array_equal(found.features, wanted, strict=True)
    assert found.units is not None and found.units[:2].tolist() == ["w0", "w1"]
    with pytest.raises(ValueError, match=r"must give examples of shape \(5,\)"):
        read_examples([path], shape=(5,), source=source)
    with pytest.raises(ValueError, match="max_bytes=700 bytes|at most max_bytes=700"):
        load_table(path, label="word", features=["vector"], max_bytes=700)
    path = with_lists(tmp_path, vectors=[[0.0] * 500] * 30)  # small while compressed
    monkeypatch.setattr(user_files, "MAX_BYTES", 50_000)
    with pytest.raises(ValueError, match="max_bytes=50000 bytes, 30 .* take 60120"):
        read_examples([path], shape=(501,), source=source | {"label": "x"})


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 2.0]] * 8 + [[1.0]], "of one length"),
        ([[1.0, 2.0]] * 3 + [[1.0]], "equal length"),
        ([[1.0, 2.0], None], "has a missing list in record 2"),
        ([[1.0, 2.0]] * 8 + [[3.0, float("nan")]], "got nan in record 9"),
        ([[[1.0, 2.0]]] * 2, "lists of numbers of one length"),
        ([[]] * 2, "of one length|must contain numbers"),
        ([["a"], ["b"]], "finite numbers, got 'a' in record 1"),
    ],
)
def test_unsuitable_lists_are_refused(vectors, message, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "BATCH_ROWS", 4)
    path = with_lists(tmp_path, vectors=vectors)
    with pytest.raises(ValueError, match=message):
        load_table(path, label="word", features=["vector", "age"])
