"""``init``: from data of each kind to a config that the trainer accepts."""

import functools
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from image_files import image_folders
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.plan.first_config import Wishes, first_config
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.tools.plan.source import described_source
from jaxdp_episodic.tools.train.search import read_search
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.data.splits import SPLITS
from jaxdp_episodic.trainer.run.release import DESCRIPTION

NAMES = [f"class {k}" for k in range(30)]


def features(number=12, names=NAMES, seed=0):
    """Features in clusters, and their classes."""
    rng = np.random.default_rng(seed)
    centers = np.repeat(2 * rng.normal(size=(len(names), 6)), number, axis=0)
    return centers + rng.normal(size=centers.shape), np.repeat(names, number)


def npz(folder, number=12, names=NAMES, repeats=1, **arrays):
    values, labels = features(number, names)
    values = np.tile(values, (1, repeats)).astype(np.float32)
    np.savez(folder / "data.npz", features=values, labels=labels, **arrays)
    return folder / "data.npz"


def table(folder):
    lines = ["sort,a,b,c,d,e,f"]
    for row, label in zip(*features(), strict=True):  # f is large, as a year or a price
        cells = (row * [1, 1, 1, 1, 1, 1e4]).tolist()
        lines.append(",".join([label, *map(str, cells)]))
    (folder / "data.csv").write_text("\n".join(lines))
    return folder / "data.csv"


def tasks(folder):
    rng, lines = np.random.default_rng(0), ["school,x,y"]
    for school in range(60):
        for x in rng.normal(size=rng.integers(9, 15)):
            lines.append(f"s{school},{x},{2000 * x + school}")
    (folder / "tasks.csv").write_text("\n".join(lines))
    return folder / "tasks.csv"


def pictures(folder, sizes=(4,) * 30, colour=False):
    counts = dict(zip(NAMES, sizes, strict=False))
    shape = (12, 12, 3) if colour else (12, 12)
    return image_folders(folder / "pictures", counts, shape)


def stored(folder):
    made = folder / "stored"
    arguments = ["--validation", "0.2", "--test", "0.2"]
    assert cli.run(["data", "import", str(npz(folder)), str(made), *arguments]) == 0
    return made


SOURCES = {
    "ClassFolders": (pictures, []),
    "Npz": (npz, []),
    "Stored": (stored, []),
    "Table": (table, []),
    "Table of tasks": (tasks, ["--target", "y"]),
}


def written(path, **wishes):
    """The config of a source, its text, and the source as read."""
    source = described_source(path, path.parent / "x.toml")
    text, _ = first_config(source, Wishes(**wishes))
    return tomllib.loads(text), text, source


def init(source, out, *options):
    return cli.run(["init", str(source), "--out", str(out), *options])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_written_is_what_the_trainer_reads(kind, tmp_path, capsys):
    make, options = SOURCES[kind]
    source, out = make(tmp_path), tmp_path / "configs" / "first.toml"
    beside = {name: tmp_path / f"{name}.toml" for name in ("plan", "tune")}
    options = [*options, *(f"--{name}={path}" for name, path in beside.items())]
    assert init(source, out, *options) == 0
    printed = capsys.readouterr().out
    assert "pipeline: " in printed and str(out) in printed
    assert out.stat().st_mode & 0o077 == 0  # it contains private counts
    config = read_config(out)
    assert type(config.data).__name__ == kind.split()[0]
    data, _ = config.training_data(out.parent)
    config.step.step(data.population)  # the accounted step is well-formed
    assert config.evaluation is not None
    assert config.evaluation.splits == ("validation", "test")
    for split in SPLITS:
        assert config.data.load(split, out.parent).num_examples
    assert "private unless" in out.read_text()
    if kind == "Table":  # five features of about 2, and one of 2e4
        assert 1e3 < config.features.std[5] / max(config.features.std[:5]) < 1e5
    # The other commands read the config, and init's other files, too.
    for path in (out, beside["plan"]):
        question = read_plan(path)
        assert question.request.epsilon == config.epsilon
        assert question.population == data.population
    for path in (out, beside["tune"]):
        search = read_search(path, held_out_is_public=True)
        assert search.config(search.draw(np.random.default_rng(0)), 1.0)
        if kind in ("Npz", "Stored", "Table"):  # six features
            assert search.hyperparameters["start.dimensions"].values == (1, 3, 6)
    assert "set true if they are public" in beside["tune"].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ClassFolders", "Table of tasks"])
def test_what_is_written_trains_as_it_is(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "use_all_cores", lambda: None)
    make, options = SOURCES[kind]
    out = tmp_path / "first.toml"
    assert init(make(tmp_path), out, *options) == 0
    assert cli.run(["train", str(out), "--out", str(tmp_path / "run")]) == 0
    assert "validation" in capsys.readouterr().out
    assert (tmp_path / "run" / "release" / "privacy.md").is_file()
    description = (tmp_path / "run" / "release" / DESCRIPTION).read_text()
    assert '"source"' in description and str(tmp_path) not in description


@pytest.mark.slow
def test_slots_are_written_if_classes_have_equal_sizes_only(tmp_path):
    config, text, _ = written(pictures(tmp_path / "a"))
    assert config["step"]["neighboring_relation"] == "zero_out"
    assert "it was public that no class has more" in text
    unlike = pictures(tmp_path / "b", sizes=[2 + k % 29 for k in range(30)])
    config, text, source = written(unlike)
    assert config["step"]["neighboring_relation"] == "add_remove"
    assert "it was public that no class has fewer" in text
    text, _ = first_config(source, Wishes(population=40, relation="zero_out"))
    assert "private unless it was public" not in text


def test_control_characters_in_a_column_name_are_escaped(tmp_path):
    path = tmp_path / "odd.csv"
    text = table(tmp_path).read_text().replace("sort", '"so\x01rt\n[evil]"', 1)
    path.write_text(text, newline="")
    assert written(path, unit="class")[0]["data"]["label"] == "so\x01rt\n[evil]"


def test_the_privacy_unit_can_be_chosen(tmp_path):
    config, _, source = written(npz(tmp_path), unit="class", epsilon=2.0)
    assert config["step"]["privacy_unit"] == "class" and config["epsilon"] == 2.0
    for wishes, message in (
        ({"unit": "patient"}, "--unit must be one of"),
        ({"unit": "person"}, "--owner must be given"),
        *(({"ways": number}, "ways must be from 2 to") for number in (0, 29)),
    ):
        with pytest.raises(ValueError, match=message):
            first_config(source, Wishes(**wishes))
    source = described_source(tasks(tmp_path), tmp_path / "x.toml", target="y")
    held = source.parts["validation"]
    large = {**source.parts, "validation": held.with_features(1e3 * held.features)}
    source, wish = source._replace(parts=large), Wishes(epsilon=100.0)
    text, _ = first_config(source, wish)
    whole = r"(?s)std = .\d{3,4}.0.  # of.*_bound = [4-9]000.0  # of this split's valid"
    assert re.search(whole, text)
    text, _ = first_config(source._replace(keeps_duplicates=True), wish)
    assert "validation data" not in text and "scaled" not in text


def test_an_existing_file_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "first.toml"
    out.write_text("mine")
    assert init(npz(tmp_path), out) == 2
    assert "exists" in capsys.readouterr().err and out.read_text() == "mine"


def table_of(text):
    def make(folder):
        (folder / "t.csv").write_text(text)
        return folder / "t.csv"

    return make


def classes_of(*sizes):
    return lambda folder: pictures(folder, sizes)


def broken_pictures(folder):
    made = pictures(folder)
    for place in made.iterdir():
        (place / "bad.png").write_bytes(b"broken")
    return made


def npz_of(**shapes):
    def make(folder):
        np.savez(folder / "t.npz", **{k: np.zeros(v) for k, v in shapes.items()})
        return folder / "t.npz"

    return make


REFUSED = "nothing is written, as training would refuse the config.* "


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: folder / "nothing", [], "does not exist"),
        (table_of("a,b,c\n" + "x,y,1\n" * 9), [], "--label COLUMN must be given"),
        (table_of("a;b;class\n" + "1,5;2;x\n" * 3), [], "2: .* points, got '1,5'"),
        (table_of("a,kind\n" + "1.5,.5\n" * 3), [], "another by --label, of .*'kind'"),
        (npz_of(images=(40, 4, 3, 9, 9)), [], r"as images.transpose\(0, 2, 3, 1\)"),
        (table_of("class,a\nx,1\nx,2\ny,\ny,4\n"), [], "'' in record 3"),
        (npz_of(X=(9, 8, 8), y=(9,)), [], "rename them: np.savez"),
        (broken_pictures, [], r"\d\d files cannot be used.*bad.png .*bad.png "),
        (classes_of(4, 4), [], 'learner.kind = "classifier" in a config'),
        (classes_of(*[1] * 30), [], r"0 of its 30 classes \(or tasks\) have two ex"),
        (npz, ["--target", "y"], "target is for other sources than npz"),
        (npz, ["--shots", "99"], "shots must be less than"),
        (npz, ["--population", "-1"], "population must be a whole number >= 1"),
        (pictures, ["--size", "0"], "size must be a whole number >= 1"),
        (functools.partial(npz, repeats=700), [], f"{REFUSED}support at most 4096 fe"),
        (npz, ["--population", "1000000"], f"{REFUSED}population must be at most"),
    ],
)
def test_unusable_data_are_refused(make, options, message, tmp_path, capsys):
    out = tmp_path / "first.toml"
    assert init(make(tmp_path), out, *options) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(message, said)
    assert not out.exists()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("head", "row", "label"),
    [
        ("id,a,kind", "{0},{1},k{2}", "kind"),  # the only text that repeats
        ("id,a,digit", "{0},{1},{2}", "digit"),  # the only integers that repeat
        ("id,a,land,species", "{0},{1},l{3},s{2}", "species"),  # found by its name
        ("id,a,person,label", "{0},{1},p{3},{2}", "label"),  # not the only text
    ],
)
def test_the_column_of_classes_is_found(head, row, label, tmp_path):
    rows = [row.format(k, k / 7, k % 30, k % 4) for k in range(120)]
    (tmp_path / "t.csv").write_text("\n".join([head, *rows]))
    config, _, source = written(tmp_path / "t.csv", epsilon=1000.0)
    assert (source.table["label"], source.table["features"]) == (label, ("a",))
    assert "guessed" in source.notes["label"] and "id" in source.notes["features"]
    assert source.parts["train"].level_names == ("class", "example")
    assert config["step"]["sampling"]["levels"][0]["name"] == "class"


def test_nested_columns_that_are_not_needed_are_left_out(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, words = tmp_path / "t.parquet", [["a", "b"]] * 120
    columns = {"x": np.arange(120) / 7, "kind": [f"k{k % 30}" for k in range(120)]}
    lists = {"words": words, "vector": [[k / 7, 1.0] for k in range(120)]}
    parquet.write_table(arrow.table(columns | lists), path)
    _, _, source = written(path, epsilon=1000.0)
    table = source.table  # lists of numbers are features
    assert (table["label"], table["features"]) == ("kind", ("x", "vector"))
    for role in ({"features": ("words",)}, {"owner": "vector"}, {"label": "vector"}):
        with pytest.raises(ValueError, match="column '[vw].* must contain num"):
            described_source(path, tmp_path / "x.toml", **role)


@pytest.mark.parametrize(
    ("classes", "parts"),
    [
        (3, ["train"]),
        (4, ["train", "validation"]),
        (7, ["train", "validation", "test"]),
        (47, ["train", "validation", "test"]),
    ],
)
def test_few_classes_hold_out_what_an_episode_needs(classes, parts, tmp_path):
    few = npz(tmp_path, 8, [f"kind {k}" for k in range(classes)])
    config, text, source = written(few, relation="add_remove")
    assert list(source.parts) == parts
    assert ("evaluation" in config) == (len(parts) > 1)
    ways = re.search(r"ways = (\d)|\"class\", size = (\d)", text)
    ways = int(ways[1] or ways[2])
    assert all(part.num_units["class"] >= ways for part in source.parts.values())
    if classes >= 7:  # so that stages can be compared
        assert source.parts["validation"].num_units["class"] > ways
    if classes == 47:
        assert ways == 5 and source.table["validation"] == 0.2


def with_copies(folder):
    """Images, some of them copied into other classes."""
    made = pictures(folder, sizes=(6,) * 30)
    for k in range(29):
        shutil.copy(made / NAMES[k] / "0.png", made / NAMES[k + 1] / "copy.png")
    return made


def test_copies_of_held_out_examples_are_not_trained_on(tmp_path):
    folder, out = with_copies(tmp_path), tmp_path / "x.toml"
    kept = described_source(folder, out, keep_duplicates=True)
    source = described_source(folder, out)
    assert source.duplicates == kept.duplicates and len(source.duplicates) > 3
    assert all(Path(name).is_file() for name in source.duplicates)
    left_out = kept.parts["train"].num_examples - source.parts["train"].num_examples
    assert left_out == len(source.duplicates)
    text, said = first_config(source, Wishes())
    assert "drop_duplicates = true" in text
    assert f"duplicates: {len(source.duplicates)} training examples" in said[-1]
    assert source.duplicates[0] in said[-1]
    out.write_text(text)
    data, _ = read_config(out).training_data(tmp_path)
    assert data.fingerprint == source.parts["train"].fingerprint
    out.write_text(re.sub('"(zero_out|add_remove)"', '"replace_one"', text))
    with pytest.raises(ValueError, match="must be false under replace_one"):
        read_config(out)
    text, _ = first_config(kept, Wishes())
    assert "select = false" in text and "drop_duplicates" not in text


def test_the_command_keeps_duplicates_and_needs_held_out_data(tmp_path, capsys):
    out = tmp_path / "x.toml"
    assert init(with_copies(tmp_path), out, "--keep-duplicates") == 0
    said = capsys.readouterr().out
    assert "training examples are held out, too; they stay" in said
    assert "select = false" in out.read_text()
    few = npz(tmp_path, 9, NAMES[:3])
    assert init(few, tmp_path / "y.toml", f"--tune={tmp_path / 't.toml'}") == 2
    assert "--tune needs held-out data" in capsys.readouterr().err


def test_held_out_data_may_come_from_other_files(tmp_path):
    table(tmp_path)
    others = (tmp_path / "data.csv").read_text().replace("class ", "new ")
    (tmp_path / "other.csv").write_text(others)
    source = described_source(
        tmp_path / "data.csv", tmp_path / "x.toml", validation=tmp_path / "other.csv"
    )
    assert source.table["validation"] == "other.csv" and len(source.parts) == 2
    assert source.parts["train"].num_units["class"] == 30
    text, _ = first_config(source, Wishes())
    assert tomllib.loads(text)["evaluation"]["splits"] == ["validation"]


def test_a_split_called_validation_is_used(tmp_path):
    whole = pictures(tmp_path)
    for name, kept in (("train", NAMES[:20]), ("validation", NAMES[20:])):
        (tmp_path / "parts" / name).mkdir(parents=True)
        for one in kept:
            (whole / one).rename(tmp_path / "parts" / name / one)
    source = described_source(tmp_path / "parts", tmp_path / "x.toml")
    assert [part.num_units["class"] for part in source.parts.values()] == [20, 10]
    (tmp_path / "parts" / "val").mkdir()
    with pytest.raises(ValueError, match="must not both be there"):
        described_source(tmp_path / "parts", tmp_path / "x.toml")


@pytest.mark.slow
def test_colour_is_detected_and_tiny_pictures_have_no_wavelets(tmp_path):
    folder = pictures(tmp_path, colour=True)
    for size, has_features in ((7, False), (8, True)):
        source = described_source(folder, tmp_path / "x.toml", size=size)
        assert (
            source.table["grey"] is False
            and source.parts["train"].features.shape[-1] == 3
        )
        text, _ = first_config(source, Wishes())
        assert ("features" in tomllib.loads(text)) == has_features


def test_empty_classes_are_the_smallest_under_add_remove(tmp_path):
    source = described_source(
        pictures(tmp_path, sizes=(4,) * 27 + (0,) * 3), tmp_path / "x.toml"
    )
    text, said = first_config(source, Wishes(relation="add_remove"))
    assert "no design" not in "".join(said) and "population = 1 }" in text


@pytest.mark.slow
def test_a_split_key_chosen_by_private_sizes_is_reported(tmp_path):
    path = tmp_path / "data.npz"
    for number, has_key in ((1_000, False), (20, True)):
        labels = np.repeat(np.arange(number), 6)
        rows = np.ones((len(labels), 2), np.float32)
        np.savez(path, features=rows, labels=labels)
        source = described_source(path, tmp_path / "x.toml")
        assert ("split_salt" in source.notes) == has_key
        assert ("split_salt" in source.table) == has_key
    assert "private, as it tells which classes" in first_config(source, Wishes())[0]


@pytest.mark.parametrize(
    ("is_listed", "relation", "between"),
    [
        (False, "add_remove", None),
        (True, "add_remove", "means"),
        (False, "zero_out", "means"),
    ],
)
def test_no_class_means_without_a_public_list(is_listed, relation, between, tmp_path):
    """Under add_remove their number reveals an example that is alone in its class."""
    listed = {"classes": np.array(sorted(NAMES[:20]))} if is_listed else {}
    data = npz(tmp_path, 400, NAMES[:20], 3, **listed)
    source = described_source(data, tmp_path / "x.toml")
    text, said = first_config(source, Wishes(relation=relation))
    assert tomllib.loads(text)["start"].get("between") == between
    offer = "option: with --relation zero_out --population N "
    assert (offer in "\n".join(said)) == (between is None)
    if between:
        line = text[text.index("between = ") :].splitlines()[0]
        assert "private unless the list of all class units is public" in line


@pytest.mark.slow
def test_rotations_are_planned_and_protected_with_their_copies(tmp_path, capsys):
    source, out = pictures(tmp_path), tmp_path / "first.toml"
    plan_file = tmp_path / "plan.toml"
    assert init(source, out, "--rotations", "--plan", str(plan_file)) == 0
    capsys.readouterr()
    text = out.read_text()
    assert "with all of its rotations is protected" in text
    config = read_config(out)
    data, _ = config.training_data(tmp_path)
    step = config.step_on(data.population)
    assert step.privacy_unit == "original" and step.people is not None
    assert step.people.numbers["classes"] == 4
    assert data.num_examples == 4 * config.data.read("train", tmp_path).num_examples
    description = read_plan(plan_file)
    assert description.request.copies == 4
    assert description.population == data.population
