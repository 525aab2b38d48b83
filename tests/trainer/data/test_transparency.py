"""Pictures with transparency: as on white paper, wherever their files are read."""

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.trainer.data.examples import read_examples
from jaxdp_episodic.trainer.data.folders import (
    image_records,
    listed_classes,
    load_class_folders,
)


def transparent(kind, ink):
    """A black square, of that alpha, on a clear ground, which is stored as black."""
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
def test_what_is_transparent_lies_on_white(tmp_path, kind, grey, ink):
    """Here, in what is imported, and in what a release is asked of."""
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
def test_an_opaque_picture_with_alpha_is_what_it_is_without(tmp_path, mode):
    plain = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    image = Image.fromarray(plain).convert(mode[:-1])
    for name, one in (("1", image), ("2", image.convert(mode))):
        (tmp_path / "a").mkdir(exist_ok=True)
        one.save(tmp_path / "a" / f"{name}.png")
    first, second = load_class_folders(tmp_path, grey=mode == "LA").features
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_white_on_a_clear_ground_is_refused(tmp_path, mode):
    """White below it would hide it; a picture without anything is one."""
    file = tmp_path / "a" / "1.png"
    file.parent.mkdir()
    white, alpha = Image.new(mode, (6, 6), "white"), np.zeros((6, 6), np.uint8)
    white.putalpha(Image.fromarray(alpha))
    white.save(file)
    assert np.all(np.asarray(load_class_folders(tmp_path).features) == 1)
    alpha[2:4, 2:4] = 255
    white.putalpha(Image.fromarray(alpha))
    white.save(file)
    with pytest.raises(ValueError, match="1.png .*white on a clear ground"):
        load_class_folders(tmp_path)
