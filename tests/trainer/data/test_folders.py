"""Folders of images: read as documented; what cannot be used is refused."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.trainer.data.folders import (
    listed_classes,
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
    recognized,
)
from jaxdp_episodic.trainer.data.sources import MiniImageNet
from jaxdp_episodic.trainer.data.user_files import load_npz, read_examples

RNG = np.random.default_rng(0)


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
    assert load_class_folders(tmp_path, size=4).features.shape == (3, 4, 4, 3)


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
    source = MiniImageNet(path=tmp_path.name, size=8)
    found = source.load("validation", tmp_path.parent)
    assert found.fingerprint == table.fingerprint
    with pytest.raises(ValueError, match="split must be one of"):
        load_mini_imagenet(tmp_path, "val")


def test_system_files_and_folders_are_ignored(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / name / "1.png")
        (tmp_path / name / "Thumbs.db").write_bytes(b"\0")
        (tmp_path / name / "desktop.ini").write_text("[.ShellClassInfo]")
        picture(tmp_path / name / "@eaDir" / "1.png" / "thumbnail.png")
    picture(tmp_path / "__MACOSX" / "a" / "._1.png")
    picture(tmp_path / "@eaDir" / "1.png")
    (tmp_path / "Desktop.ini").write_text("")
    assert load_class_folders(tmp_path).unit_column("class").tolist() == ["a", "b"]
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
def test_pictures_are_turned_upright(tmp_path, suffix):
    """By the tag's definition: where stored rows and columns are displayed."""
    seen = np.zeros((16, 24), np.uint8)  # as displayed
    seen[:8, :8] = 255
    seen[8:, 12:] = 128
    # For each orientation, the stored form of the displayed picture.
    stored = {None: seen, 0: seen, 1: seen} | {
        2: seen[:, ::-1],
        3: seen[::-1, ::-1],
        4: seen[::-1],
        5: seen.T,
        6: seen.T[::-1],
        7: seen.T[::-1, ::-1],
        8: seen.T[:, ::-1],
    }
    how = {"quality": 100} if suffix == "jpg" else {"lossless": True}
    (tmp_path / "a").mkdir()
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        if orientation is not None:
            exif[274] = orientation
        file = tmp_path / "a" / f"{orientation}.{suffix}"
        Image.fromarray(pixels).save(file, exif=exif, **how)
    images = load_class_folders(tmp_path, grey=True).features[..., 0]
    np.testing.assert_allclose(images, np.stack([seen / 255] * 10), atol=0.02)


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_animations_are_refused(tmp_path, suffix):
    frames = [Image.new("L", (6, 6), value) for value in (0, 255)]
    file = tmp_path / "a" / f"1.{suffix}"
    file.parent.mkdir()
    frames[0].save(file, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=f"1.{suffix} .*an animation, not one pic"):
        load_class_folders(tmp_path)
    frames[1].save(file)
    # A photograph with an embedded preview is read.
    frames[1].save(
        tmp_path / "a" / "2.jpg", "MPO", save_all=True, append_images=frames[:1]
    )
    assert load_class_folders(tmp_path, grey=True).features.min() == 1


def test_files_that_cannot_be_used_are_listed(tmp_path):
    inside = tmp_path / "data"
    for name in ("a/1.png", "a/2.png", "b/3.tif"):
        picture(inside / name)
    assert load_class_folders(inside, grey=True).num_examples == 3
    (inside / "a" / "notes.txt").write_text("")
    (inside / "b" / "link.png").symlink_to(inside / "a" / "1.png")
    with pytest.raises(ValueError, match="^2 files cannot be used, mend") as found:
        load_class_folders(inside)
    lines = str(found.value).split("; ")
    assert "notes.txt must be an image" in lines[0]
    assert "link.png must not be a link" in lines[1]
    (inside / "c").symlink_to(inside / "a")
    with pytest.raises(ValueError, match="c must not be a link"):
        load_class_folders(inside)
    cut = (inside / "a" / "1.png").read_bytes()[:40]
    (tmp_path / "many" / "a").mkdir(parents=True)
    for number in range(22):
        (tmp_path / "many" / "a" / f"{number:02}.png").write_bytes(cut)
    with pytest.raises(ValueError, match="^22 files cannot be used") as found:
        load_class_folders(tmp_path / "many")
    lines = str(found.value).split("; ")
    assert len(lines) == 21 and lines[-1] == "and 2 more"
    assert all("must be a readable image: " in line for line in lines[:20])
    for wrong, error in (("data/a/1.png", NotADirectoryError), ("no", OSError)):
        with pytest.raises(error):
            load_class_folders(tmp_path / wrong)


def test_images_have_one_size_within_the_bound(tmp_path):
    picture(tmp_path / "a" / "1.png")
    picture(tmp_path / "b" / "wide.png", size=(9, 6))
    with pytest.raises(ValueError, match="give a size.*wide.png"):
        load_class_folders(tmp_path)
    with pytest.raises(ValueError, match="max_bytes=10"):
        load_class_folders(tmp_path, size=4, max_bytes=10)


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
    (tmp_path / "hub" / "metadata.csv").write_text("file_name,label\ntrain/c.jpg,n1\n")
    assert recognized(tmp_path / "hub") == "class-folders"
    assert load_class_folders(tmp_path / "hub").num_examples == 1
    (tmp_path / "hub" / "metadata.csv").write_text("file_name,label\ntrain/c.jpg,\n")
    with pytest.raises(ValueError, match=r"train/c.jpg in .* must have a label"):
        load_class_folders(tmp_path / "hub")
    wanted = load_mini_imagenet(tmp_path / "folders", "train", size=6)
    found = load_mini_imagenet(tmp_path / "lists", "train", size=6)
    assert found.fingerprint == wanted.fingerprint
    assert load_class_folders(listed.parent, size=6).fingerprint == wanted.fingerprint
    assert load_mini_imagenet(tmp_path / "lists", "test", size=6).num_examples == 1
    bad = [{"file_name": "../x.png", "label": "a"}, {"file_name": "b.jpg"}, {}]
    listed.write_text("\n".join([text, *map(json.dumps, bad), '{"a":']))
    with pytest.raises(ValueError, match="^4 files cannot be used") as error:
        load_class_folders(listed.parent)
    for part in ("must be in", "line 5: must have file_name and label", "from_records"):
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
def test_transparent_images_are_composed_onto_white(tmp_path, kind):
    """In loaders, in imports, and in queries of a release."""
    file = tmp_path / "data" / "a" / "1.png"
    file.parent.mkdir(parents=True)
    for ink, grey in ((255, False), (102, False), (102, True)):
        transparent(kind, ink).save(file)
        with Image.open(file) as again:
            assert again.mode == kind
        expected = np.ones((6, 6))
        expected[2:4, 2:4] = 1 - ink / 255
        found = load_class_folders(tmp_path / "data", grey=grey).features[0]
        for channel in np.moveaxis(found, -1, 0):
            np.testing.assert_allclose(channel, expected, atol=1e-6)
        records = listed_classes(tmp_path / "data", grey=grey)
        ((_, codes),) = records.placed()
        np.testing.assert_array_equal(codes[0] / np.float32(255), found)
        asked = read_examples([file], shape=found.shape, source={})
        np.testing.assert_array_equal(asked.features[0], found)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_white_on_a_clear_ground_is_refused(tmp_path, mode):
    """A white ground would hide the drawing; other images are accepted."""
    file = tmp_path / "a" / "1.png"
    file.parent.mkdir()

    def saved(pixels, alpha):
        image = Image.fromarray(pixels).convert(mode[:-1])
        image.putalpha(Image.fromarray(np.uint8(alpha)))
        image.save(file)
        return image.convert(mode[:-1])

    def loaded():
        return load_class_folders(tmp_path, grey=mode == "LA").features[0]

    white, alpha = np.full((6, 6, 3), 255, np.uint8), np.zeros((6, 6))
    saved(white, alpha)  # an empty image
    assert np.all(loaded() == 1)
    alpha[2:4, 2:4] = 255
    saved(white, alpha)
    with pytest.raises(ValueError, match="1.png .*is white on transparent"):
        loaded()
    plain = saved(RNG.integers(0, 256, (6, 6, 3), np.uint8), np.full((6, 6), 255))
    shown = np.atleast_3d(np.asarray(plain)) / np.float32(255)
    np.testing.assert_allclose(loaded(), shown, rtol=1e-6)
