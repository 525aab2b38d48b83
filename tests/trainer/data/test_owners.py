"""Owners of examples are kept; data that merge or split people are refused."""

import unicodedata

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files.column_folder import write_manifest
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.built_in import load_glyphs
from jaxdp_episodic.trainer.data.folders import (
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
)
from jaxdp_episodic.trainer.data.owners import Owners, owner_of_name
from jaxdp_episodic.trainer.data.sources import ClassFolders, Glyphs, Npz, Table
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table
from jaxdp_episodic.trainer.learners.features import FixedFeatures

RNG = np.random.default_rng(7)


def owned_by(table):
    """(R,) the names of the owners."""
    assert table.owners is not None
    return table.owners.names[table.owners.codes].tolist()


def told_by_features(number=40, **changes):
    """A table of records whose feature tells the owner: f % 5."""
    rows = RNG.permutation(number)
    units = {"task": rows % 2, "class": rows % 6 // 2 * 2 + rows % 2}
    arguments = {"units": units, "owners": [f"p{row % 5}" for row in rows], **changes}
    return ExampleTable.from_records(rows[:, None].astype(float), **arguments)


def test_owners_stay_with_their_examples(tmp_path):
    table = told_by_features(targets=np.zeros(40))
    features = FixedFeatures(lambda rows: rows, "as they are", unit_norm=False)
    kept = np.arange(0, 40, 3)
    tables = [
        table,
        table.select("class", [0, 3]),
        table.without_level("task"),
        table.take(kept),
        table.with_features(table.features[:], np.ones(40, np.float32)),
        features.table(table),
        features.table(table, cache=tmp_path / "cache"),
        features.table(table, cache=tmp_path / "cache"),
    ]
    for one in tables:
        owners = [f"p{int(value) % 5}" for value in np.ravel(one.features[:])]
        assert owned_by(one) == owners
        assert one.owners.names.tolist() == ["p0", "p1", "p2", "p3", "p4"]
    assert tables[3].num_units == {**table.num_units, "example": len(kept)}


def test_emptied_units_stay_and_keep_their_names():
    units = {"class": np.array(["a", "b", "b", "c"])}
    table = ExampleTable.from_records(np.arange(4.0), units=units, owners=[1, 1, 2, 3])
    cut = table.take(np.array([0, 3]))
    assert cut.population.children_counts[1].tolist() == [1, 0, 1]
    assert cut.unit_column("class").tolist() == ["a", "c"]
    with pytest.raises(ValueError, match="ascending"):
        table.take(np.array([3, 0]))
    assert owned_by(cut) == [1, 3] and cut.owners.names.tolist() == [1, 2, 3]


def test_the_fingerprint_has_owners_only_where_they_are_given():
    """Without owners it equals version 0.1's, so its runs and caches stay valid."""

    def print_of(owners=None):
        units = {"class": np.array(["b", "a", "b", "a", "a"])}
        return ExampleTable.from_records(
            np.arange(5.0)[:, None], units=units, owners=owners
        ).fingerprint

    before = "d5ff57d5985ed6f0636d35c969314d9364bdd167c1babaca6f8c20ca218b91f4"
    assert print_of() == before
    others = [[1, 1, 2, 2, 2], [1, 1, 2, 2, 1], [1, 1, 3, 3, 3], list("11222")]
    assert len({before, *map(print_of, others)}) == 1 + len(others)


COMPOSED = unicodedata.normalize("NFC", "é")


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        (["a", None, "b", None], ValueError, "2 of 4 have none, .* record 2"),
        (["a", "b", "", "c"], ValueError, "1 of 4 have none, .* record 3"),
        (["a", "b", "c", " NaN "], ValueError, "1 of 4 have none, .* record 4"),
        (["N/A", "b", "c", "d"], ValueError, "1 of 4 have none, .* record 1"),
        (np.array([3, -1, 2, -1]), ValueError, "2 of 4 have none, .* record 2"),
        (np.array([3, np.nan, 2, 1]), ValueError, "1 of 4 have none, .* record 2"),
        (np.array(["", "a", "a", ""]), ValueError, "2 of 4 have none, .* record 1"),
        (["a", ["b", "c"], "d", "e"], ValueError, r"\['b', 'c'\] in record 2.*several"),
        ([1, (2,), 3, 4], ValueError, "one id per example, .* record 2"),
        (np.zeros((4, 2), int), ValueError, "one id per example"),
        (["a", "a ", "b", "b"], ValueError, "spelled the same .* 'a' and 'a '"),
        (
            [COMPOSED, unicodedata.normalize("NFD", COMPOSED), "b", "b"],
            ValueError,
            "spelled the same",
        ),
        (["a", 1, "b", "c"], ValueError, "ids of one type"),
        (["a", "a\0", "b", "c"], ValueError, "NUL"),
        (np.array([1.0, 2.0, 2.0, 1.0]), TypeError, "integer or string ids"),
        ([True, False, True, True], TypeError, "integer or string ids"),
        ([b"a", b"b", b"a", b"a"], TypeError, "integer or string ids"),
        ([1, 2, 3], ValueError, "same length"),
        ("user", TypeError, "one id per example, got 'user'"),
    ],
)
def test_owners_that_would_merge_or_split_people_are_refused(owners, error, message):
    with pytest.raises(error, match=message):
        ExampleTable.from_records(
            np.zeros((4, 1)), units={"class": np.zeros(4, int)}, owners=owners
        )


@pytest.mark.parametrize(
    ("codes", "names", "error"),
    [
        ([0, 2], ["a", "b"], ValueError),
        ([0, -1], ["a", "b"], ValueError),
        ([0, 1], ["a", "a"], ValueError),
        ([0.0, 1.0], ["a", "b"], TypeError),
        ([[0, 1]], ["a", "b"], TypeError),
        ([0, 1], [0.5, 1.5], TypeError),
        ([True, False], ["a", "b"], TypeError),
    ],
)
def test_invalid_owner_codes_are_refused(codes, names, error):
    with pytest.raises(error, match="of owners must"):
        Owners(np.array(codes), np.array(names))


def test_owners_must_match_the_table():
    table = told_by_features()
    assert table.owners is not None
    with pytest.raises(ValueError, match="owners must be those of the 40 examples"):
        ExampleTable(table.features, None, table.population, table.owners.take([0]))
    with pytest.raises(ValueError, match="read-only"):
        table.owners.codes[0] = 1


# --- Where they come from ---


def test_owners_from_file_names():
    assert owner_of_name(r"^(\d+)_")("cats/17_3.png") == "17"
    assert owner_of_name(r"^(\d+)_")("17_cats/3.png") is None
    assert owner_of_name("drawer")("Greek/character01/0001_12.png") == "12"
    assert owner_of_name(r"^[^(+)_]*_(?:by|of)_([\w ]+?)\.")("x_by_ann b.c.png") == (
        "ann b"
    )


@pytest.mark.parametrize("pattern", [r"^\d+_", r"(\d)(\d)", "(a", r"[[a](b)", ""])
def test_patterns_without_an_owner_are_refused(pattern):
    with pytest.raises(ValueError, match="owner must be a regular expression with one"):
        owner_of_name(pattern)


def pictures(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def test_owners_of_image_folders(tmp_path):
    pictures(tmp_path / "c", "b/7_1.png", "b/8_1.png", "a/7_1.png", "a/9_x.png")
    by_name = load_class_folders(tmp_path / "c", owner=r"^(\d+)_")
    assert owned_by(by_name) == ["7", "9", "7", "8"]
    by_path = load_class_folders(tmp_path / "c", owner=lambda path: path[0])
    assert owned_by(by_path) == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match=r"1 of 4 have none, the first is .*9_x\.png"):
        load_class_folders(tmp_path / "c", owner=r"^(\d+)_\d")
    pictures(tmp_path / "m", "val/n1/2_a.png")
    assert owned_by(load_mini_imagenet(tmp_path / "m", "validation", owner="^(.)")) == [
        "2"
    ]
    pictures(
        tmp_path / "o", *(f"G/{c}/000{c}_{d:02}.png" for c in "12" for d in (1, 2))
    )
    drawn = load_omniglot(tmp_path / "o", alphabets=True, owner="drawer")
    assert owned_by(drawn) == ["01", "02", "01", "02"]
    assert load_omniglot(tmp_path / "o").owners is None


def test_owners_from_columns_arrays_and_rows(tmp_path):
    (tmp_path / "t.csv").write_text("user,cls,x\nu1,b,1\nu2,a,2\nu1,a,3\n")
    columns = {"groups": ["cls"], "features": ["x"], "owner": "user"}
    assert owned_by(load_table(tmp_path / "t.csv", **columns)) == ["u2", "u1", "u1"]
    (tmp_path / "gap.csv").write_text("user,cls,x\nu1,b,1\n,a,2\n")
    with pytest.raises(ValueError, match=r"'user' .* 1 of 2 .* record 2 \(row 3\)"):
        load_table(tmp_path / "gap.csv", **columns)
    with pytest.raises(ValueError, match="used only once"):
        load_table(tmp_path / "t.csv", **{**columns, "owner": "cls"})
    arrays = {"features": np.arange(12.0).reshape(2, 3, 2)}
    np.savez(tmp_path / "d.npz", **arrays, who=[[1, 2, 3], [1, 2, 4]], split=[0, 1])
    assert owned_by(load_npz(tmp_path / "d.npz", owner="who")) == [1, 2, 3, 1, 2, 4]
    assert load_npz(tmp_path / "d.npz").owners is None
    with pytest.raises(ValueError, match="must hold nobody, has"):
        load_npz(tmp_path / "d.npz", owner="nobody")
    np.savez(tmp_path / "s.npz", **arrays, who=[5, 6], split=["train", "test"])
    assert owned_by(load_npz(tmp_path / "s.npz", owner="who", split="test")) == [6] * 3
    rows = [
        {"image": np.full((2, 2), i), "label": i % 2, "by": i // 2} for i in (0, 1, 2)
    ]
    assert owned_by(from_tfds(rows, owner="by")) == [0, 1, 0]
    rows[1]["by"] = np.array([0, 1])
    with pytest.raises(ValueError, match=r"'by' .*\[0, 1\] in record 2.*several"):
        from_huggingface(rows, features="image", label="label", owner="by")


def test_owners_of_glyphs_are_typefaces():
    table = load_glyphs("train", small=True, size=14, owner="typeface")
    assert table.owners is not None and len(table.owners.names) == 41
    plain = load_glyphs("train", small=True, size=14)
    np.testing.assert_array_equal(table.features, plain.features)
    assert table.owners.names[0] == "BM DoHyeon"
    per_class = np.reshape(table.owners.codes, (40, 20))
    assert np.all(np.diff(per_class) > 0)  # most different first, each once


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Glyphs(owner="font"), ValueError, "owner must be one of"),
        (lambda: ClassFolders(path="x", owner="a+"), ValueError, "with one group"),
        (lambda: ClassFolders(path="x", owner=3), TypeError, "non-empty string"),
        (lambda: Npz(path="x", owner=["a"]), TypeError, "non-empty string, got"),
        (
            lambda: Table(path="x", groups=["a"], features=["b"], owner=""),
            TypeError,
            "owner must be a non-empty",
        ),
    ],
)
def test_sources_check_owners_before_anything_is_read(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- On the disk ---


def test_imported_owners_are_those_in_memory(tmp_path, capsys):
    pictures(tmp_path / "in", *(f"{c}/{d}_1.png" for c in "ba" for d in (3, 1, 20)))
    command = ["data", "import", str(tmp_path / "in"), str(tmp_path / "out")]
    assert cli.run([*command, "--owner", r"^(\d+)_"]) == 0
    said = "3 people, each in at most 2 classes (2.0 in the mean), at most 1 example in"
    assert said in capsys.readouterr().out
    stored = load_stored(tmp_path / "out")
    assert owned_by(stored) == owned_by(
        load_class_folders(tmp_path / "in", owner="^(.+)_")
    )
    assert cli.run(["data", "check", str(tmp_path / "out")]) == 0
    assert f"train      {said}" in capsys.readouterr().out
    np.savez(
        tmp_path / "d.npz", features=np.ones((2, 3, 2)), who=[[1, 2, 3], [3, 2, 1]]
    )
    command = ["data", "import", str(tmp_path / "d.npz"), str(tmp_path / "npz")]
    assert cli.run([*command, "--owner", "who"]) == 0
    assert owned_by(load_stored(tmp_path / "npz")) == [1, 2, 3, 3, 2, 1]
    # A folder with valid checksums and contradictory content.
    np.save(tmp_path / "npz/train/owners.npy", np.array([0, 1, 2, 2, 1, 3]))
    write_manifest(
        tmp_path / "npz", {"train": (("class", "example"), None)}, made_from={}
    )
    with pytest.raises(ValueError, match=r"npz: codes of owners must lie in 0 \.\. 2"):
        load_stored(tmp_path / "npz")
    (tmp_path / "npz/train/owners.npy").unlink()
    write_manifest(
        tmp_path / "npz", {"train": (("class", "example"), None)}, made_from={}
    )
    with pytest.raises(ValueError, match="must have both owners and people"):
        load_stored(tmp_path / "npz")


def test_owners_in_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"u": ["b", "a", "a"], "x": [1.0, 2.0, 3.0], "who": ["p", "q", "p"]}
    parquet.write_table(arrow.table(columns), tmp_path / "in.parquet")
    command = ["data", "import", str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    options = ["--groups", "u", "--features", "x", "--owner", "who"]
    assert cli.run([*command, *options]) == 0
    wanted = load_table(
        tmp_path / "in.parquet", groups=["u"], features=["x"], owner="who"
    )
    assert owned_by(load_stored(tmp_path / "out")) == owned_by(wanted) == list("qpp")
