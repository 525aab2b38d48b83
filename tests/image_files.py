"""Folders of random images."""

import numpy as np
from PIL import Image


def image_folders(folder, counts, shape=(4, 4), seed=0, name="{}.png"):
    """Writes images for each class, ``{class: number}``; returns the folder."""
    rng = np.random.default_rng(seed)
    for one, number in counts.items():
        (folder / one).mkdir(parents=True, exist_ok=True)
        for k in range(number):
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / one / name.format(k))
    return folder
