"""A file without a header line is refused, and its records are not shown."""

import re

import numpy as np
import pytest

from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.examples import read_examples
from jaxdp_episodic.trainer.data.user_files import load_table

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


def run(capsys, *arguments):
    """Exit status and output of a command."""
    code = cli.run([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_a_headerless_file_is_refused_by_init(tmp_path, capsys):
    path, out = table(tmp_path / "t.csv", None), tmp_path / "x.toml"
    record = path.read_text().split("\n")[0].split(",")
    for options in ([], ["--label", "class"], ["--features", "a"]):
        code, said = run(capsys, "init", path, "--out", out, *options)
        assert code == 2 and not out.exists()
        assert SAYS in said and str(path) in said and "column 1 " in said
        assert "add a line of names above" in said
        assert not [cell for cell in record if cell in said]


@pytest.mark.slow
def test_a_headerless_file_is_refused_by_train_before_any_charge(tmp_path, capsys):
    """With a config that names columns by the record, and with the right names."""
    path, config = table(tmp_path / "t.csv", "a,b,c,kind"), tmp_path / "x.toml"
    assert run(capsys, "init", path, "--epsilon", "1e3", "--out", config)[0] == 0
    path.write_text(path.read_text().partition("\n")[2])
    record = path.read_text().split("\n")[0].split(",")
    good = config.read_text()
    bad = good
    for name, cell in zip(["a", "b", "c", "kind"], record, strict=True):
        bad = bad.replace(f'"{name}"', f'"{cell}"')
    assert bad != good
    for text in (good, bad):
        config.write_text(text)
        code, said = run(capsys, "train", config, "--out", tmp_path / "run")
        assert code == 2 and SAYS in said and str(path) in said
        assert not [cell for cell in record if cell in said]
        assert not (tmp_path / "run").exists()


def test_a_headerless_file_is_refused_by_predict(tmp_path):
    path = table(tmp_path / "t.csv", None)
    source = {"features": ["a", "b", "c"], "label": "kind"}
    with pytest.raises(ValueError, match=SAYS):
        read_examples([path], shape=(3,), source=source)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "header",
    [
        "0,1,2,3",  # a data frame without column names
        "0,1,2,label",
        "2019,2020,2021,label",
        "2019_2020,2020_2021,2021_2022,label",
        "17,5,99,label",
    ],
)
@pytest.mark.parametrize("names", [None, range(30)])
def test_integers_may_be_column_names(tmp_path, capsys, header, names):
    path, out = table(tmp_path / "t.csv", header, names=names), tmp_path / "x.toml"
    *features, label = header.split(",")
    found = load_table(path, features=features, label=label)
    assert found.num_examples == 180
    code, said = run(capsys, "init", path, "--epsilon", "1e3", "--out", out)
    assert code == 0, said


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("a,1.5,c,kind", 2),
        ("a,b,-7,kind", 3),
        ("1e3,b,c,kind", 1),
        ("a,b, +2 ,kind", 3),
        ("a,nan,c,kind", 2),
        ("a,b,c,0.0", 4),
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


def test_unused_columns_may_have_any_name(tmp_path):
    path = table(tmp_path / "t.csv", ",-1.5,c,kind")
    assert load_table(path, features=["c"], label="kind").num_examples == 180
    with pytest.raises(ValueError, match="column 2 is named by a number"):
        load_table(path, features=["d"], label="kind")
    path = table(tmp_path / "t.csv", ",b,c,kind")  # the unnamed index of a data frame
    with pytest.raises(ValueError, match="no column 'd'"):
        load_table(path, features=["d"], label="kind")


def test_the_error_about_other_encodings_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_bytes("a,kind\n1,\xe9\n".encode("latin-1") * 5)
    wanted = f"{path}: not UTF-8 text: invalid continuation byte; save it as UTF-8"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        load_table(path, features=["a"], label="kind")
    code, said = run(capsys, "init", path, "--out", tmp_path / "x.toml")
    assert code == 2 and wanted in said
