"""Users' files: read as documented; hostile ones are refused."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.examples import read_examples
from jaxdp_episodic.trainer.data.folders import (
    image_records,
    listed_classes,
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
    recognized,
)
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table
from pages import ROOT

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


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (0, 2)])
def test_an_empty_npz_is_refused(tmp_path, shape):
    arrays = {"features": np.ones(shape)}
    if len(shape) == 2:
        arrays["labels"] = np.ones(0, int)
    path = saved(tmp_path, **arrays)
    with pytest.raises(ValueError, match="features in .* must not be empty"):
        load_npz(path)


def test_a_zip_bomb_is_refused_by_its_header(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, features=np.zeros((2**20, 64), np.uint8))
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="max_bytes"):
        load_npz(path, max_bytes=2**20)


def test_a_header_that_lies_is_refused(tmp_path):
    """A shape of 10^12 numbers over a few bytes of data."""
    honest = tmp_path / "honest.npy"
    np.save(honest, np.zeros((10, 10, 4)))
    lie = honest.read_bytes().replace(b"(10, 10, 4), ", b"(10**6,1,4), ", 1)
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", lie.replace(b"10**6", b"99999", 1))
    with pytest.raises(ValueError):
        load_npz(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.zeros(3, int)}, "labels and either images or features"),
        ({"images": np.zeros((2, 2)), "features": np.zeros((2, 2))}, "either images"),
        ({"features": np.zeros((3, 2))}, "come with an array labels"),
        ({"features": np.zeros((3, 2)), "labels": np.zeros(2, int)}, "one entry"),
        ({"features": np.full((3, 2), np.nan), "labels": np.zeros(3, int)}, "row 0"),
        ({"images": np.zeros((3, 2, 2), int), "labels": np.zeros(3, int)}, "uint8"),
    ],
)
def test_unsuitable_npz_is_refused(tmp_path, arrays, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load_npz(saved(tmp_path, **arrays))


def test_not_an_npz(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match="must be an npz file"):
        load_npz(tmp_path / "data.npz")


# --- Folders of images ---


def picture(path, value=128, size=(6, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


def test_class_folders(tmp_path):
    for name, value in (("b", 255), ("a", 0), ("a", 51)):
        picture(tmp_path / name / f"{value}.png", value)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    table = load_class_folders(tmp_path, grey=True)
    assert table.features.shape == (3, 6, 6, 1)
    assert table.population.children_counts[1].tolist() == [2, 1, 0]
    np.testing.assert_allclose(table.features[:, 0, 0, 0], [0, 0.2, 1])
    colour = load_class_folders(tmp_path, size=4)
    assert colour.features.shape == (3, 4, 4, 3)


def test_omniglot_folders(tmp_path):
    for alphabet in ("Greek", "Latin"):
        for character in ("character01", "character02"):
            for drawer in (1, 2, 3):
                file = tmp_path / alphabet / character / f"0001_{drawer:02}.png"
                picture(file, 255, (105, 105))
    flat = load_omniglot(tmp_path)
    assert flat.features.shape == (12, 28, 28, 1)
    assert flat.features.max() == 0  # white paper becomes 0
    assert flat.level_names == ("class", "example")
    assert "Greek/character01" in flat.unit_column("class")
    tree = load_omniglot(tmp_path, alphabets=True)
    assert tree.level_names == ("alphabet", "class", "example")


def test_mini_imagenet_folders(tmp_path):
    for split in ("train", "val", "test"):
        picture(tmp_path / split / "n01" / "a.jpg", size=(9, 7))
    table = load_mini_imagenet(tmp_path, "validation", size=8)
    assert table.features.shape == (1, 8, 8, 3)
    with pytest.raises(ValueError, match="split must be one of"):
        load_mini_imagenet(tmp_path, "val")


def test_images_that_cannot_be_read_are_named(tmp_path):
    picture(tmp_path / "a" / "good.png")
    broken = tmp_path / "a" / "broken.png"
    broken.write_bytes((tmp_path / "a" / "good.png").read_bytes()[:40])
    with pytest.raises(ValueError, match="broken.png must be a readable image"):
        load_class_folders(tmp_path)
    broken.unlink()
    picture(tmp_path / "b" / "wide.png", size=(9, 6))
    with pytest.raises(ValueError, match="give size=.*wide.png"):
        load_class_folders(tmp_path)
    with pytest.raises(ValueError, match="max_bytes=10"):
        load_class_folders(tmp_path, size=4, max_bytes=10)


def test_system_files_and_folders_are_ignored(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / name / "1.png")
        (tmp_path / name / "Thumbs.db").write_bytes(b"\0")
        (tmp_path / name / "desktop.ini").write_text("[.ShellClassInfo]")
    picture(tmp_path / "__MACOSX" / "a" / "._1.png")
    (tmp_path / "Desktop.ini").write_text("")
    table = load_class_folders(tmp_path)
    assert table.unit_column("class").tolist() == ["a", "b"]
    for layout in ("class-folders", "omniglot"):
        assert recognized(tmp_path) == layout
        shutil.rmtree(tmp_path / "a")
        picture(tmp_path / "a" / "character01" / "1.png")
    (tmp_path / "a" / "notes.ini").write_text("")
    with pytest.raises(ValueError, match="notes.ini must be"):
        load_class_folders(tmp_path / "a")


def test_an_empty_alphabet_does_not_vanish(tmp_path):
    picture(tmp_path / "Greek" / "character01" / "1.png")
    (tmp_path / "Latin").mkdir()
    for alphabets in (False, True):
        with pytest.raises(ValueError, match="Latin must contain a folder for each"):
            load_omniglot(tmp_path, alphabets=alphabets)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", [*range(9), None])
def test_pictures_are_turned_upright(tmp_path, suffix, orientation):
    """By the tag's definition: where stored rows and columns are displayed."""
    seen = np.zeros((16, 24), np.uint8)  # as displayed
    seen[:8, :8] = 255
    seen[8:, 12:] = 128
    # For each orientation, the stored form of the displayed picture.
    stored = {
        2: seen[:, ::-1],
        3: seen[::-1, ::-1],
        4: seen[::-1],
        5: seen.T,
        6: seen.T[::-1],
        7: seen.T[::-1, ::-1],
        8: seen.T[:, ::-1],
    }.get(orientation, seen)
    exif = Image.Exif()
    if orientation is not None:
        exif[274] = orientation
    file = tmp_path / "a" / f"1.{suffix}"
    file.parent.mkdir()
    how = {"quality": 100} if suffix == "jpg" else {"lossless": True}
    Image.fromarray(stored).save(file, exif=exif, **how)
    image = load_class_folders(tmp_path, grey=True).features[0, ..., 0]
    assert image.shape == seen.shape
    np.testing.assert_allclose(image, seen / 255, atol=0.02)


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_animations_are_refused(tmp_path, suffix):
    frames = [Image.new("L", (6, 6), value) for value in (0, 255)]
    file = tmp_path / "a" / f"1.{suffix}"
    file.parent.mkdir()
    frames[0].save(file, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=f"1.{suffix} .*an animation, not one pic"):
        load_class_folders(tmp_path)
    frames[1].save(file)
    assert load_class_folders(tmp_path, grey=True).features.min() == 1


def test_a_photograph_with_an_embedded_preview_is_read(tmp_path):
    picture(tmp_path / "a" / "1.jpg", 255)
    frames = [Image.new("L", (6, 6), value) for value in (255, 0)]
    file = tmp_path / "a" / "2.jpg"
    frames[0].save(file, format="MPO", save_all=True, append_images=frames[1:])
    assert load_class_folders(tmp_path, grey=True).features.min() == 1


def test_links_and_strange_files_are_refused(tmp_path):
    inside = tmp_path / "data"
    picture(tmp_path / "secret" / "a.png")
    picture(inside / "a" / "a.png")
    (inside / "b").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="must not be a link"):
        load_class_folders(inside)
    (inside / "b").unlink()
    (inside / "a" / "link.png").symlink_to(tmp_path / "secret" / "a.png")
    with pytest.raises(ValueError, match="must not be a link"):
        load_class_folders(inside)
    (inside / "a" / "link.png").unlink()
    (inside / "a" / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="notes.txt must be an image"):
        load_class_folders(inside)
    with pytest.raises(NotADirectoryError):
        load_class_folders(inside / "a" / "a.png")
    with pytest.raises(FileNotFoundError):
        load_class_folders(tmp_path / "none")


def test_all_unreadable_files_are_listed(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/3.tif"):
        picture(tmp_path / name)
    assert load_class_folders(tmp_path, grey=True).num_examples == 3
    (tmp_path / "a" / "notes.txt").write_text("")
    (tmp_path / "b" / "link.png").symlink_to(tmp_path / "a" / "1.png")
    with pytest.raises(ValueError, match="^2 files cannot be used: ") as found:
        load_class_folders(tmp_path)
    lines = str(found.value).split("; ")
    assert "notes.txt must be an image" in lines[0]
    assert "link.png must not be a link" in lines[1]
    (tmp_path / "a" / "notes.txt").unlink()
    (tmp_path / "b" / "link.png").unlink()
    for number in range(25):
        (tmp_path / "a" / f"x{number:02}.png").write_bytes(b"no picture")
    picture(tmp_path / "b" / "wide.png", size=(9, 6))
    with pytest.raises(ValueError, match="^26 files cannot be used") as found:
        load_class_folders(tmp_path)
    lines = str(found.value).split("; ")
    assert len(lines) == 21 and lines[-1] == "and 6 more"
    assert all("must be a readable image: " in line for line in lines[:20])


def test_lists_of_files_are_folders_of_classes(tmp_path):
    """In the layouts of mini-ImageNet and of Hugging Face's image folders."""
    rows = [("n1", "c.jpg"), ("n2", "a.jpg"), ("n1", "b.jpg")]
    for value, (label, name) in enumerate(rows):
        picture(tmp_path / "folders" / "train" / label / name, 40 * value)
        picture(tmp_path / "lists" / "images" / name, 40 * value)
        picture(tmp_path / "hub" / "train" / name, 40 * value)
    for split in ("val", "test"):
        picture(tmp_path / "folders" / split / "n3" / "d.jpg")
        (tmp_path / "lists" / f"{split}.csv").write_text("filename,label\nd.jpg,n3\n")
    picture(tmp_path / "lists" / "images" / "d.jpg")
    lines = "".join(f"{name},{label}\n" for label, name in rows)
    (tmp_path / "lists" / "train.csv").write_text("filename,label\n" + lines)
    objects = [{"file_name": name, "label": label} for label, name in rows]
    text = "\n".join(map(json.dumps, objects))
    listed = tmp_path / "hub" / "train" / "metadata.jsonl"
    listed.write_text(text)
    for name in ("folders", "lists"):
        assert recognized(tmp_path / name) == "mini-imagenet"
    assert recognized(listed.parent) == "class-folders"
    wanted = load_mini_imagenet(tmp_path / "folders", "train", size=6)
    found = load_mini_imagenet(tmp_path / "lists", "train", size=6)
    assert found.fingerprint == wanted.fingerprint
    assert load_class_folders(listed.parent, size=6).fingerprint == wanted.fingerprint
    assert load_mini_imagenet(tmp_path / "lists", "test", size=6).num_examples == 1
    bad = [{"file_name": "../x.png", "label": "a"}, {"file_name": "b.jpg"}, {}]
    listed.write_text("\n".join([text, *map(json.dumps, bad), '{"a":']))
    with pytest.raises(ValueError, match="^4 files cannot be used") as error:
        load_class_folders(listed.parent)
    for part in (
        "must be in",
        "line 5: must have file_name and label",
        "from_records",
    ):
        assert part in str(error.value)
    (tmp_path / "lists" / "train.csv").write_text("file,label\na.jpg,n1\n")
    with pytest.raises(ValueError, match="list of image files: no column 'filename'"):
        load_mini_imagenet(tmp_path / "lists")


def test_errors_about_unsupported_formats_say_what_to_do(tmp_path):
    for name, message in (
        ("cache-train.pkl", r"is a pickle, which can run any(.|\n)*np\.savez"),
        ("data.xlsx", "ExampleTable.from_records"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=message):
            recognized(tmp_path / name)
    with pytest.raises(ValueError, match="cache-train.pkl is a pickle"):
        recognized(tmp_path)


def test_the_advised_conversion_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = RNG.integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    cache = {"image_data": images, "class_dict": {"b": [0, 3], "a": [1, 2, 4]}}
    with open("x.pkl", "wb") as file:
        pickle.dump(cache, file)
    with pytest.raises(ValueError) as found:
        recognized(Path("x.pkl"))
    advised = " ".join(str(found.value).split()).partition("cache): ")[2]
    exec(advised, {})  # commands print an error in one line
    table = load_npz("data.npz")
    assert table.unit_column("class").tolist() == ["a"] * 3 + ["b"] * 2
    np.testing.assert_array_equal(table.features * 255, images[[1, 2, 4, 0, 3]])


# --- Tables ---

CSV = "school,pupil_age,score\nx,11,0.5\ny,12,1.5\nx,13,2.5\n"
COLUMNS = {"groups": ["school"], "features": ["pupil_age"], "target": "score"}
USERS = {"groups": ["user"], "features": ["x"], "target": None}


def test_csv(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    table = load_table(path, **COLUMNS)
    assert table.level_names == ("school", "example")
    assert table.features[:, 0].tolist() == [11, 13, 12]
    assert table.targets is not None and table.targets.tolist() == [0.5, 2.5, 1.5]


def test_parquet_equals_csv(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    columns = {"school": ["x", "y", "x"], "pupil_age": [11, 12, 13]}
    pq.write_table(pa.table({**columns, "score": [0.5, 1.5, 2.5]}), path)
    other = tmp_path / "t.csv"
    other.write_text(CSV)
    assert load_table(path, **COLUMNS).fingerprint == (
        load_table(other, **COLUMNS).fingerprint
    )
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match="must be a Parquet file"):
        load_table(path, **COLUMNS)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (CSV, {"features": ["pupil_ago"]}, "did you mean 'pupil_age'"),
        (CSV, {"features": ["score"]}, "may be used only once"),
        (CSV, {"groups": []}, "at least one column"),
        (CSV.replace("12", "twelve"), {}, r"'twelve' in record 2 \(row 3\)"),
        (CSV.replace("12", "inf"), {}, "must be finite numbers"),
        (CSV.replace("y,", ","), {}, r"must be an id, got nothing in record 2"),
        (CSV.replace("y,12", "y"), {}, "line 3: 2 fields under 3"),
        (CSV, {"max_bytes": 5}, "at most max_bytes=5"),
        ("\udcff", {}, "UTF-8"),
        ("user,x\n", USERS, "must have at least one record, has none"),
        ("user,x\na,1\na\0,2\n", USERS, "NUL"),
        (
            "example,x\n1,2\n",
            USERS | {"groups": ["example"]},
            "name a column 'example'",
        ),
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
    table = load_table(
        path, groups=["user"], features=["x"], public_units=["7", "8", "9"]
    )
    assert table.population.children_counts[1].tolist() == [2, 0, 1]
    with pytest.raises(TypeError, match="public_units must be ids like those"):
        load_table(path, groups=["user"], features=["x"], public_units=[7, 8, 9])


# --- Images with transparency are composed onto white ---


def transparent(kind, ink):
    """A black square with this alpha on a transparent ground stored as black."""
    alpha = np.zeros((6, 6), np.uint8)
    alpha[2:4, 2:4] = ink
    black = Image.new("L", (6, 6), 0)
    if kind in ("LA", "RGBA"):
        image = black.convert(kind)
        image.putalpha(Image.fromarray(alpha))
        return image
    image = Image.frombytes("P", (6, 6), (alpha > 0).astype(np.uint8).tobytes())
    image.putpalette([0, 0, 0] * 2)
    image.info["transparency"] = bytes([0, ink])
    return image


@pytest.mark.parametrize("kind", ["LA", "RGBA", "P"])
@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("ink", [255, 102])
def test_transparent_images_are_composed_onto_white(tmp_path, kind, grey, ink):
    """In loaders, in imports, and in queries of a release."""
    file = tmp_path / "data" / "a" / "1.png"
    file.parent.mkdir(parents=True)
    transparent(kind, ink).save(file)
    with Image.open(file) as again:
        assert again.mode == kind
    expected = np.ones((6, 6))
    expected[2:4, 2:4] = 1 - ink / 255
    found = load_class_folders(tmp_path / "data", grey=grey).features[0]
    for channel in np.moveaxis(found, -1, 0):
        np.testing.assert_allclose(channel, expected, atol=1e-6)
    records = image_records(listed_classes(tmp_path / "data", grey=grey))
    ((_, codes),) = records.placed()
    np.testing.assert_array_equal(codes[0] / np.float32(255), found)
    asked = read_examples([file], shape=found.shape, source={})
    np.testing.assert_array_equal(asked.features[0], found)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_a_full_alpha_channel_changes_nothing(tmp_path, mode):
    plain = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    image = Image.fromarray(plain).convert(mode[:-1])
    for name, one in (("1", image), ("2", image.convert(mode))):
        (tmp_path / "a").mkdir(exist_ok=True)
        one.save(tmp_path / "a" / f"{name}.png")
    first, second = load_class_folders(tmp_path, grey=mode == "LA").features
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_white_on_a_clear_ground_is_refused(tmp_path, mode):
    """A white ground would hide the drawing; an empty image is accepted."""
    file = tmp_path / "a" / "1.png"
    file.parent.mkdir()
    white, alpha = Image.new(mode, (6, 6), "white"), np.zeros((6, 6), np.uint8)
    white.putalpha(Image.fromarray(alpha))
    white.save(file)
    assert np.all(np.asarray(load_class_folders(tmp_path).features) == 1)
    alpha[2:4, 2:4] = 255
    white.putalpha(Image.fromarray(alpha))
    white.save(file)
    with pytest.raises(ValueError, match="1.png .*is white on transparent"):
        load_class_folders(tmp_path)


# --- Folders in the layouts of Omniglot and mini-ImageNet, and the configs for them ---

# Each config's folders and classes, examples per class, slots, classes as shipped.
TINY = {
    "omniglot": ({"images_background": 40, "images_evaluation": 7}, 8, 20, 964),
    "mini_imagenet": ({"train": 6, "val": 5, "test": 5}, 18, 600, 64),
}
CONFIGS = [f"{name}{kind}" for name in TINY for kind in ("", "_maml")]


def generate(name, folder, counts, examples):
    """Random images in the layout of a data set."""
    rng = np.random.default_rng(0)
    places = [(part, i) for part, number in counts.items() for i in range(number)]
    for number, (part, i) in enumerate(places):
        place = folder / part / f"n{i:08d}"
        if name == "omniglot":
            place = folder / part / f"Alphabet_{i // 33}" / f"character{i % 33:02d}"
        place.mkdir(parents=True)
        for example in range(examples):
            if name == "omniglot":
                pixels = rng.integers(0, 2, (105, 105)).astype(bool)
                file = place / f"{number:04d}_{example + 1:02d}.png"
            else:
                pixels = rng.integers(0, 256, (84, 84, 3)).astype(np.uint8)
                file = place / f"{place.name}{example:08d}.jpg"
            Image.fromarray(pixels).save(file)


@pytest.mark.few(1)
@pytest.mark.parametrize("stem", CONFIGS)
def test_the_configs_read_generated_folders(stem, tmp_path):
    name = stem.removesuffix("_maml")
    counts, examples, slots, classes = TINY[name]
    generate(name, tmp_path, counts, examples)
    table = {"type": "TrainingConfig", **read_toml(ROOT / f"configs/train_{stem}.toml")}
    config = TrainingConfig.from_dict(table)
    sampling = config.step.sampling
    assert config.step.neighboring_relation == "zero_out"  # of public slots
    assert (sampling.num_classes, sampling.examples.population) == (classes, slots)
    parts = list(counts)
    if name == "omniglot":
        table["data"] |= {"path": str(tmp_path / parts[0])}
        table["data"] |= {"test": str(tmp_path / parts[1])}
    else:
        table["data"]["path"] = str(tmp_path)
    config = TrainingConfig.from_dict(table)
    for split, part in (("train", parts[0]), ("test", parts[-1])):
        data = config.data.load(split, None)
        sizes = data.population.children_counts[-1].tolist()
        assert sizes == [examples] * counts[part]
        channels = 1 if name == "omniglot" else 3
        assert data.features.shape[1:] == (config.data.size,) * 2 + (channels,)
        assert 0 <= data.features.min() < data.features.max() <= 1
