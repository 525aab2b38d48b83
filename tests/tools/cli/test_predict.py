"""``predict``: from a release and some files to classes or numbers."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.folders import load_class_folders
from jaxdp_episodic.trainer.run.release import DESCRIPTION

SHAPE = (6, 6, 1)
RIDGE = {"type": "Ridge"}
NEAREST = {
    "type": "ProtoNet",
    "apply": "as_they_are",
    "ways": 5,
    "distance": "euclidean",
    "temperature": 1.0,
    "resplits": False,
}


def released(folder, *, learner=NEAREST, shape=SHAPE, source=None, calibration=None):
    """A release whose features are the inputs, so that nothing is trained."""
    description = {
        "format": "jaxdp-episodic release",
        "version": 1,
        "stage": "features",
        "calibration": calibration,
        "learner": learner,
        "has_own_learner": False,
        "model": {"input_shape": list(shape)},
        "features": None,
        "feature_shape": list(shape),
        "example_shape": list(shape),
        "dtype": "float32",
        "source": source or {},
        "parameters": {},
    }
    (folder / "log.jsonl").write_text("")
    (folder / "release").mkdir()
    np.savez(folder / "release/parameters.npz")
    (folder / "release/privacy.md").write_text("# Privacy of this run\n")
    (folder / "release/run.json").write_text('{"steps": 0}')
    (folder / "release" / DESCRIPTION).write_text(json.dumps(description))
    return folder / "release"


def picture(path, bright, seed=0):
    """A small image whose left part has this brightness."""
    noise = np.random.default_rng(seed).integers(0, 30, (8, 8), np.uint8)
    pixels = noise + np.where(np.arange(8) < 4, bright, 10).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Class folders for the support and the queries."""
    for i in range(3):
        picture(tmp_path / "support" / "dark" / f"{i}.png", 20, i)
        picture(tmp_path / "support" / "light" / f"{i}.png", 200, i)
        picture(tmp_path / "queries" / "dark" / f"{i}.png", 30, 9 + i)
        picture(tmp_path / "queries" / "light" / f"{i}.png", 190, 9 + i)
    return tmp_path


@pytest.fixture
def predict(capsys):
    def run(release, support, *queries, out=None, code=0):
        more = [] if out is None else ["--out", str(out)]
        found = cli.run(
            [
                *("predict", str(release), "--support", str(support), "--queries"),
                *(str(query) for query in queries),
                *more,
            ]
        )
        printed = capsys.readouterr()
        assert found == code
        return printed.out + printed.err

    return run


def test_folders_of_classes(folder, predict):
    release = released(folder)
    out = folder / "results" / "found.csv"
    said = predict(release, folder / "support", folder / "queries", out=out)
    assert "accuracy  1.0000 (6 of 6)" in said
    assert said.splitlines()[0].split() == ["query", "class", "predicted", "score"]
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["query"] for row in rows][:2] == ["dark/0.png", "dark/1.png"]
    assert all(row["class"] == row["predicted"] for row in rows)
    assert all(0.5 < float(row["score"]) <= 1 for row in rows)
    # A class without support is never predicted, and a message says so.
    (folder / "queries" / "light").rename(folder / "queries" / "other")
    (folder / "support" / "void").mkdir()
    said = predict(release, folder / "support", folder / "queries")
    assert "accuracy  0.5000" in said and "3 queries are of classes that" in said
    assert "skipping folders without images: 'void'" in " ".join(said.split())


@pytest.mark.parametrize(
    ("shots", "name", "said_why"),
    [
        ([1, 4], "probability", ""),
        ([1], "score", "calibrated for episodes of 2 classes with 1 labelled example "),
        (None, "score", "and is no probability: the release is not calibrated"),
    ],
)
def test_only_calibrated_probabilities_are_shown(
    folder, predict, shots, name, said_why
):
    calibration = shots and {"ways": 2, "shots": shots, "temperatures": [50.0]}
    if shots:
        calibration["temperatures"] *= len(shots)
    release = released(folder, calibration=calibration)
    out = folder / "found.csv"
    said = predict(release, folder / "support", folder / "queries", out=out)
    assert said.splitlines()[0].split()[-1] == name
    assert said_why in said and ("is no probability" in said) == bool(said_why)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert all((float(row[name]) < 0.7) == bool(shots) for row in rows)


def test_images_and_folders_of_them(folder, predict):
    release, asked = released(folder), folder / "queries" / "light"
    said = predict(release, folder / "support", asked)
    assert said.count("light") == 3 and "accuracy" not in said
    said = predict(release, folder / "support", asked / "0.png", asked / "1.png")
    assert str(asked / "1.png") in said
    (asked / "0.png").rename(asked / "0\naccuracy  1.png")  # one line a name
    said = predict(release, folder / "support", asked)
    assert said.count("\n") == 6 and r"0\naccuracy" in said


def test_arrays_with_labels_and_without(folder, predict):
    release, known, asked, grid = (
        released(folder),
        *(folder / f"{name}.npz" for name in ("known", "asked", "grid")),
    )
    found = load_class_folders(folder / "support", size=6, grey=True)
    np.savez(known, images=found.features, labels=found.unit_column("class"))
    np.savez(asked, images=found.features[..., 0])
    codes = np.rint(255 * found.features.reshape(2, 3, 6, 6)).astype(np.uint8)
    np.savez(grid, images=codes)  # [class, example, ...], numbered
    for labelled in (known, grid):
        assert "accuracy  1.0000" in predict(release, labelled, labelled)
    said = predict(release, known, asked)
    assert "accuracy" not in said and said.count("light") == 3
    said = predict(release, asked, asked, code=2)
    assert "--support must give the class of each example" in said


TABLE = {"groups": ["task"], "features": ["x"], "target": "y"}


def table(path, rows, names="task,x,y"):
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


@pytest.mark.slow
def test_tables_of_tasks(tmp_path, predict):
    release = released(tmp_path, learner=RIDGE, shape=(1,), source=TABLE)
    known = [f"{t},{x},{t * 10 + x}" for t in (1, 2) for x in range(5)]
    support = table(tmp_path / "known.csv", known)
    asked = [f"2,{x},{20 + x}" for x in (1, 3)] + ["1,2,12"]
    out = tmp_path / "found.jsonl"
    said = predict(release, support, table(tmp_path / "a.csv", asked), out=out)
    assert "rmse  " in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["query"], row["task"]) for row in rows] == [
        ("1", "2"),
        ("2", "2"),
        ("3", "1"),
    ]
    for row in rows:  # the support's regression line, shrunk towards its mean
        assert row["predicted"] == pytest.approx(row["target"], abs=1.0)
    no_target = table(tmp_path / "b.csv", ["2,1", "2,3"], "task,x")
    assert "rmse" not in predict(release, support, no_target)
    said = predict(release, support, table(tmp_path / "c.csv", ["7,1,1"]), code=2)
    assert "--support must have examples of the task '7'" in said
    said = predict(release, no_target, no_target, code=2)
    assert "--support must have a target for each example" in said
    said = predict(release, support, table(tmp_path / "d.csv", ["1"], "x"), code=2)
    assert "--queries must give the task of each example" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"release": "."}, "release\n"),  # the archive contains a folder
        ({"support": "nothing"}, "nothing does not exist"),
        ({"support": "log.jsonl"}, "must be an image, a folder, or a file .npz"),
        ({"queries": "queries/light queries/dark"}, "must be the only folder"),
        ({"queries": "t.csv"}, "was not trained on a table"),
        ({"queries": "odd.npz"}, "must be examples of shape (6, 6, 1)"),
        ({"queries": "bad"}, "must be a readable image"),
        ({"out": "found.txt"}, "must end in .jsonl"),
        ({"release": "flat"}, "must come in one .npz, .csv or .parquet file"),
    ],
)
def test_invalid_inputs_are_refused(folder, predict, given, said):
    release = released(folder)
    table(folder / "t.csv", ["1,2,3"])
    np.savez(folder / "odd.npz", images=np.zeros((3, 7, 7), np.float32))
    (folder / "bad").mkdir()
    (folder / "bad" / "0.png").write_bytes(b"no image")
    flat = json.loads(
        (shutil.copytree(release, folder / "flat") / DESCRIPTION).read_text()
    )
    flat |= dict.fromkeys(("example_shape", "feature_shape"), [4])
    (folder / "flat" / DESCRIPTION).write_text(json.dumps(flat))
    names = {"release": "release", "support": "support", "queries": "queries"} | given
    queries = [folder / name for name in names["queries"].split()]
    out = folder / names["out"] if "out" in names else None
    inputs = (folder / names[name] for name in ("release", "support"))
    found = predict(*inputs, *queries, out=out, code=2)
    assert said in found and found.count("\n") == 1
