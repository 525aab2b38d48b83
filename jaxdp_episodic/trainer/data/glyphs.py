"""Hangul glyphs: 2,350 syllables drawn by 20 typefaces each, inside the package.

A few-shot data set about as hard as Omniglot, without a download. A class is a syllable
of KS X 1001, an example a typeface ("drawer"). ``glyphs.toml`` says where the shapes
come from; ``experiments/build_glyphs.py`` makes them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.table import ExampleTable

SPLITS = ("train", "validation", "test", "all")
_SIZES = {"train": 1_800, "validation": 200, "test": 350}
_SMALL_SIZES = {"train": 40, "validation": 8, "test": 16}
_SALT = "jaxdp-episodic glyphs 1: "


def load_glyphs(
    split: str = "train", *, size: int = 28, small: bool = False
) -> ExampleTable:
    """Returns the glyphs of a split; levels "class" and "example".

    The split is fixed: classes in the order of a hash of their syllable; 1,800 train,
    200 validation, 350 test.

    Args:
      split: "train", "validation", "test" or "all".
      size: side of the images: 28, or 14 (means of 2 x 2 pixels).
      small: 64 classes at 14 x 14 in place of all, for tests: 40 / 8 / 16.

    Returns:
      Features (R, size, size, 1) float32 in [0, 1], ink 1.

    Raises:
      ValueError: an unknown split or size.
    """
    _validation.choice("split", split, SPLITS)
    if size not in ((14,) if small else (14, 28)):
        allowed = "14 with small=True" if small else "14 or 28"
        raise ValueError(f"size must be {allowed}, got {size!r}")
    name = "glyphs_small.npz" if small else "glyphs.npz"
    with np.load(Path(__file__).with_name(name), allow_pickle=False) as stored:
        bits, side = stored["bits"], int(stored["side"])
        names = stored["syllables"]
    chosen = _in_split(names, split, _SMALL_SIZES if small else _SIZES)
    bits, names = bits[chosen], names[chosen]
    images = np.unpackbits(bits, axis=-1, count=side * side)
    images = images.reshape(*bits.shape[:2], side, side)
    block = side // size
    ink = sum(
        images[..., i::block, j::block] for i in range(block) for j in range(block)
    )
    images = np.asarray(ink, np.float32) / np.float32(block * block)
    return ExampleTable.from_records(
        images.reshape(-1, size, size, 1),
        units={"class": np.repeat(names, images.shape[1])},
    )


def _in_split(names: np.ndarray, split: str, sizes: dict[str, int]) -> np.ndarray:
    """Places of the classes of a split, in the order of the set."""
    keys = [hashlib.sha256((_SALT + name).encode()).hexdigest() for name in names]
    order = np.argsort(keys)
    if split == "all":
        return np.arange(len(names))
    start = 0
    for name, size in sizes.items():
        if name == split:
            return np.sort(order[start : start + size])
        start += size
    raise AssertionError(split)
