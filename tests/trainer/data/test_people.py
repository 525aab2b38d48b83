"""Owners are kept; bounds on people hold; data that merge or split people are refused.

The rule of bounding sees only one person's places.
"""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.accountant.describe.population import PersonBounds
from jaxdp_episodic.data import load_class_folders, load_mini_imagenet, load_omniglot
from jaxdp_episodic.files.column_folder import write_manifest
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.built_in import load_glyphs
from jaxdp_episodic.trainer.data.owners import Owners, owner_of_name
from jaxdp_episodic.trainer.data.people import Truncation, fitting_bounds, truncated
from jaxdp_episodic.trainer.data.sources import ClassFolders
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table
from jaxdp_episodic.trainer.learners.features import FixedFeatures

RNG = np.random.default_rng(11)
BOUNDS = PersonBounds(classes=3, examples=2)


def records():
    """Columns of 400 records of 12 people, some with far more than others."""
    owner = np.minimum(RNG.geometric(0.25, 400), 12)
    return {"owner": owner, "class": RNG.integers(0, 9, 400)}


def table_of(columns, features=None, **changes):
    number = len(columns["owner"])
    return ExampleTable.from_records(
        np.arange(number)[:, None] * 1.0 if features is None else features,
        units={name: columns[name] for name in columns if name != "owner"},
        owners=columns["owner"],
        **changes,
    )


def places(table):
    """For each person, the number of examples by class."""
    assert table.owners is not None
    found: dict = {}
    names = table.owners.names[table.owners.codes].tolist()
    for name, unit in zip(names, table.unit_column("class").tolist(), strict=True):
        found.setdefault(name, {}).setdefault(unit, 0)
        found[name][unit] += 1
    return found


def test_everybody_keeps_what_the_bounds_allow():
    table = table_of(records(), public_units=range(30))
    bounded, said = truncated(table, BOUNDS)
    before, after = places(table), places(bounded)
    for name, own in before.items():
        assert len(after[name]) == min(len(own), 3)
        assert all(n == min(own[unit], 2) for unit, n in after[name].items())
    assert bounded.num_units["class"] == 30  # units that lost all their examples
    kept = {n: sum(own.values()) for n, own in after.items()}
    assert said == Truncation(
        bounds=BOUNDS,
        people=len(before),
        people_cut=sum(kept[n] < sum(own.values()) for n, own in before.items()),
        examples_kept=bounded.num_examples,
        examples_dropped=table.num_examples - bounded.num_examples,
    )
    assert Truncation.from_dict(said.to_dict()) == said
    # The same again, as for a resumed run; nothing is removed within the bounds.
    assert truncated(table, BOUNDS).table.fingerprint == bounded.fingerprint
    again = truncated(bounded, BOUNDS)
    assert again.table is bounded and again.truncation.examples_dropped == 0


def kept_records(columns, features=None, **changes):
    """The kept records, by the number in their feature or target."""
    number = np.arange(len(columns["owner"]), dtype=float)
    table = table_of(columns, features, targets=number, **changes)
    targets = truncated(table, BOUNDS).table.targets
    return np.sort(np.asarray(targets, int))


def test_the_rule_ignores_the_content_of_examples():
    columns = records()
    kept = kept_records(columns)
    for _ in range(3):
        np.testing.assert_array_equal(kept_records(columns, RNG.random((400, 2))), kept)


@pytest.mark.parametrize("person", [1, 2, 5])
def test_the_rule_ignores_other_people(person):
    """Others keep the same if a person leaves, has more, or the order changes."""
    columns = records()
    mine = columns["owner"] == person
    kept = kept_records(columns)
    others = kept[~mine[kept]]
    fewer = {name: column[~mine] for name, column in columns.items()}
    np.testing.assert_array_equal(np.flatnonzero(~mine)[kept_records(fewer)], others)
    extra = {"owner": np.full(300, person), "class": RNG.integers(-20, 20, 300)}
    more = {name: np.append(extra[name], columns[name]) for name in columns}
    found = kept_records(more) - 300
    found = found[found >= 0]
    np.testing.assert_array_equal(found[~mine[found]], others)
    # People swap places in the file, but each person's own records keep their order.
    order = np.argsort(RNG.permutation(13)[columns["owner"]], kind="stable")
    moved = {name: column[order] for name, column in columns.items()}
    np.testing.assert_array_equal(np.sort(order[kept_records(moved)]), kept)


def test_every_choice_is_equally_likely():
    """4,000 people of 4 classes with 3 examples; chi-squared of 11, 4.4 sigma at 32."""
    owner, unit = np.divmod(np.arange(48_000), 12)
    columns = {"owner": owner, "class": unit // 3}
    table = table_of(columns, unit[:, None] * 1.0)
    bounded = truncated(table, PersonBounds(classes=1, examples=1)).table
    seen = np.bincount(np.asarray(bounded.features[:, 0], int), minlength=12)
    assert seen.sum() == 4_000
    assert np.sum((seen - 4_000 / 12) ** 2) / (4_000 / 12) < 11 + 4.5 * np.sqrt(22)


def test_three_levels():
    rng = np.random.default_rng(3)
    task = rng.integers(0, 6, 900)
    columns = {"owner": rng.integers(0, 8, 900), "task": task}
    columns["class"] = task * 10 + rng.integers(0, 5, 900)
    table = table_of(columns)
    bounds = PersonBounds(tasks=2, classes=3, examples=1)
    bounded = truncated(table, bounds).table
    assert bounded.people == (8, 1, 3, 6.0, 2)
    # Without a bound of tasks, the bound of classes is over all tasks.
    loose = truncated(table, PersonBounds(classes=3, examples=1)).table
    assert all(len(own) == 3 for own in places(loose).values())
    only = truncated(table, PersonBounds(examples=1)).table
    kept, before = (
        {n: len(own) for n, own in places(t).items()} for t in (only, table)
    )
    assert kept == before


def test_statistics_of_people_equal_a_direct_count():
    rng = np.random.default_rng(5)
    task = rng.integers(0, 4, 150)
    columns = {"owner": rng.integers(0, 9, 150), "task": task}
    columns["class"] = task * 10 + rng.integers(0, 5, 150)
    table = table_of(columns)
    rows = list(zip(*(columns[n].tolist() for n in columns), strict=True))
    everybody = {row[0] for row in rows}
    tasks = [len({t for p, t, _ in rows if p == one}) for one in everybody]
    in_all = [len({c for p, _, c in rows if p == one}) for one in everybody]
    within = max(
        len({c for p, t, c in rows if (p, t) == pair}) for pair in {r[:2] for r in rows}
    )
    most = max(rows.count(row) for row in set(rows))
    assert table.people == (9, most, within, np.mean(in_all), max(tasks))
    assert str(table.people).startswith(
        f"9 people, each in at most {max(tasks)} tasks,"
    )
    fitting = fitting_bounds(table)
    assert fitting == PersonBounds(examples=most, classes=within, tasks=max(tasks))
    assert truncated(table, fitting, truncate=False).table is table
    flat = table.without_level("task")
    assert flat.people == (9, most, max(in_all), np.mean(in_all), None)
    assert dataclasses.replace(flat, owners=None).people is None


THREE_PEOPLE = {"owner": np.repeat([1, 2, 3], [4, 6, 1]), "class": np.arange(11)}
NOBODYS = dataclasses.replace(table_of(records()), owners=None)
STRICT = {"truncate": False}
DEEP = {"owner": np.arange(4), **{name: np.zeros(4, int) for name in "abc"}}


@pytest.mark.parametrize(
    ("table", "bounds", "changes", "error", "message"),
    [
        (table_of(THREE_PEOPLE), BOUNDS, STRICT, ValueError, "2 of 3 .*with 6: the"),
        (None, BOUNDS, {"truncate": 1}, TypeError, "truncate must be true or false"),
        (None, PersonBounds(tasks=1), {}, ValueError, "bounds.tasks is for data with"),
        (None, PersonBounds(classes=[1, 2]), {}, ValueError, "bounds.classes must be"),
        (None, {"classes": 1}, {}, TypeError, "bounds must be PersonBounds"),
        (NOBODYS, BOUNDS, {}, ValueError, "data must name the owner of each"),
        (table_of(DEEP), BOUNDS, {}, NotImplementedError, "up to 3 levels"),
    ],
)
def test_bounds_that_do_not_fit(table, bounds, changes, error, message):
    table = table_of(records()) if table is None else table
    with pytest.raises(error, match=message):
        truncated(table, bounds, **changes)


# --- Owners of examples ---


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


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        (["a", None, "b", None], ValueError, "2 of 4 have none, .* record 2"),
        (["a", "b", "c", " NaN "], ValueError, "1 of 4 have none, .* record 4"),
        (["N/A", "b", "c", "d"], ValueError, "1 of 4 have none, .* record 1"),
        ([True, False, True, True], TypeError, "integer or string ids"),
        (np.array([3, np.nan, 2, 1]), ValueError, "1 of 4 have none, .* record 2"),
        (["a", ["b", "c"], "d", "e"], ValueError, r"\['b', 'c'\] in record 2.*several"),
        (np.zeros((4, 2), int), ValueError, "one id per example"),
        (["a", "a ", "b", "b"], ValueError, "spelled the same .* 'a' and 'a '"),
        (["\u00e9", "e\u0301", "b", "b"], ValueError, "spelled the same"),
        (["a", 1, "b", "c"], ValueError, "ids of one type"),
        (np.array(["1", 1, 2, 2], object), ValueError, "ids of one type"),
        (np.array([1.0, 2.0, 2.0, 1.0]), TypeError, "integer or string ids"),
        ("user", TypeError, "one id per example, got 'user'"),
    ],
)
def test_owners_that_would_merge_or_split_people_are_refused(owners, error, message):
    with pytest.raises(error, match=message):
        ExampleTable.from_records(np.ones(4), units={"class": [0] * 4}, owners=owners)


@pytest.mark.parametrize(
    ("codes", "names", "error"),
    [
        ([0, 2], ["a", "b"], ValueError),
        ([0, 1], ["a", "a"], ValueError),
        ([0.0, 1.0], ["a", "b"], TypeError),
        ([[0, 1]], ["a", "b"], TypeError),
    ],
)
def test_invalid_owner_codes_are_refused(codes, names, error):
    with pytest.raises(error, match="of owners must"):
        Owners(np.array(codes), np.array(names))
    table = told_by_features()
    with pytest.raises(ValueError, match="owners must be those of the 40 examples"):
        ExampleTable(table.features, None, table.population, table.owners.take([0]))


# --- Where they come from ---


def test_owners_from_file_names():
    assert owner_of_name(r"^(\d+)_")("cats/17_3.png") == "17"
    assert owner_of_name(r"^(\d+)_")("17_cats/3.png") is None
    assert owner_of_name("drawer")("Greek/character01/0001_12.png") == "12"
    assert owner_of_name(r"^[^(+)_]*_(?:by|of)_([\w ]+?)\.")("x_by_ann b.c.png") == (
        "ann b"
    )


@pytest.mark.parametrize("pattern", [r"^\d+_", r"(\d)(\d)", "(a", ""])
def test_patterns_without_an_owner_are_refused(pattern):
    with pytest.raises(ValueError, match="owner must be a regular expression with one"):
        owner_of_name(pattern)
    with pytest.raises((ValueError, TypeError), match="owner must be a"):
        ClassFolders(path="x", owner=pattern)


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
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow.csv import read_csv

    (tmp_path / "t.csv").write_text("user,cls,x\nu1,b,1\nu2,a,2\nu1,a,3\n")
    columns = {"groups": ["cls"], "features": ["x"], "owner": "user"}
    assert owned_by(load_table(tmp_path / "t.csv", **columns)) == ["u2", "u1", "u1"]
    parquet.write_table(read_csv(tmp_path / "t.csv"), tmp_path / "t.parquet")
    command = ["data", "import", str(tmp_path / "t.parquet"), str(tmp_path / "out")]
    options = ["--groups", "cls", "--features", "x", "--owner", "user"]
    assert cli.run([*command, *options]) == 0
    assert owned_by(load_stored(tmp_path / "out")) == ["u2", "u1", "u1"]
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
    assert f"train       {said}" in capsys.readouterr().out
    # A folder with valid checksums and contradictory content.
    owners, levels = tmp_path / "out/train/owners.npy", ("class", "example")
    np.save(owners, np.array([0, 1, 2, 2, 1, 3]))
    write_manifest(tmp_path / "out", {"train": (levels, None)}, made_from={})
    with pytest.raises(ValueError, match=r"out: codes of owners must lie in 0 \.\. 2"):
        load_stored(tmp_path / "out")
    owners.unlink()
    write_manifest(tmp_path / "out", {"train": (levels, None)}, made_from={})
    with pytest.raises(ValueError, match="must have both owners and people"):
        load_stored(tmp_path / "out")
