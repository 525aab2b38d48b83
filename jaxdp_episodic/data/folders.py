"""Folders of images: one folder a class, Omniglot, mini-ImageNet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.files.optional import require

MAX_BYTES = 4 * 2**30  # of the float32 features
MAX_PIXELS = 2**26  # of one image, before it is resized

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# What may be behind them: left to itself Pillow goes by the content, and runs other
# programs for some of it (PostScript).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits at most
_FOLDER_OF_SPLIT = {"train": "train", "validation": "val", "test": "test"}

Entry = tuple[str, Path]  # a unit's id, and its folder or file


def load_class_folders(
    path: str | os.PathLike[str],
    *,
    size: int | None = None,
    grey: bool = False,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a folder that has one folder of images a class.

    Every image is kept and every folder is a class, an empty one too. Links are
    refused: they may lead outside, or hold one image in two classes. Names that begin
    with a dot are passed over.

    Args:
      path: the folder; those in it are the classes, their names the ids.
      size: side to which images are brought, whatever their shape; None: all are alike.
      grey: one channel in place of three.
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" and "example", examples by file name; features
      (R, H, W, channels) float32 in [0, 1].

    Raises:
      ImportError: without the extra ``[data]``.
      FileNotFoundError, NotADirectoryError: no such folder.
      ValueError: a link, a file that is no readable image, images of different shapes,
        or too many; the message has the path.
    """
    classes = _folders(Path(path))
    return _table(classes, None, size, grey, max_bytes)


def load_omniglot(
    path: str | os.PathLike[str],
    *,
    size: int = 28,
    alphabets: bool = False,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of ``alphabet/character/CCCC_DD.png``; ink is 1.

    Args:
      path: the folder of the alphabets, such as ``images_background``.
      size: side to which images are brought.
      alphabets: keep the alphabets as the top level.
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" (ids "alphabet/character") and "example", below "alphabet" if
      wanted; features (R, size, size, 1) float32 in [0, 1].

    Raises:
      As `load_class_folders`.
    """
    classes: list[Entry] = []
    parents: list[str] = []
    for alphabet, folder in _folders(Path(path)):
        characters = _folders(folder)
        classes += [(f"{alphabet}/{name}", inside) for name, inside in characters]
        parents += [alphabet] * len(characters)
    above = parents if alphabets else None
    return _table(classes, above, size, True, max_bytes, invert=True)


def load_mini_imagenet(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: int = 84,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns one split of ``train|val|test/<class>/*.jpg``.

    Args:
      path: the folder that holds the three.
      split: "train", "validation" (the folder ``val``) or "test".
      size: side to which images are brought.
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" and "example"; features (R, size, size, 3) float32 in [0, 1].

    Raises:
      As `load_class_folders`.
    """
    folder = _FOLDER_OF_SPLIT[_validation.choice("split", split, _FOLDER_OF_SPLIT)]
    return load_class_folders(Path(path) / folder, size=size, max_bytes=max_bytes)


def _table(
    classes: Sequence[Entry],
    above: Sequence[str] | None,
    size: int | None,
    grey: bool,
    max_bytes: int,
    invert: bool = False,
) -> ExampleTable:
    """The table of all images of the classes."""
    files = [_images_in(folder) for _, folder in classes]
    paths = [path for inside in files for path in inside]
    if not paths:
        raise ValueError(
            f"the folder must hold images, {len(classes)} classes have none"
        )
    counts = [len(inside) for inside in files]
    names = [name for name, _ in classes]
    units = {"class": np.repeat(names, counts)}
    if above is not None:
        if 0 in counts:
            raise NotImplementedError(
                f"class {names[counts.index(0)]!r} has no images: covered are empty "
                "classes without a level above them"
            )
        units = {"alphabet": np.repeat(above, counts), **units}
    return ExampleTable.from_records(
        _pixels(paths, size, grey, max_bytes, invert),
        units=units,
        public_units=names if above is None else None,
    )


def _folders(path: Path) -> list[Entry]:
    """The folders in a folder, by name."""
    return _entries(path, "a folder", lambda e: e.is_dir(follow_symlinks=False))


def _images_in(path: Path) -> list[Path]:
    """The images in a folder, by name."""

    def is_image(entry: os.DirEntry[str]) -> bool:
        named = entry.name.lower().endswith(_SUFFIXES)
        return named and entry.is_file(follow_symlinks=False)

    return [
        file for _, file in _entries(path, f"an image, one of {_SUFFIXES}", is_image)
    ]


def _entries(
    path: Path, kind: str, is_kind: Callable[[os.DirEntry[str]], bool]
) -> list[Entry]:
    """What is in a folder, by name: all of a kind; no links, nothing hidden."""
    with os.scandir(path) as listing:
        entries = [entry for entry in listing if not entry.name.startswith(".")]
    for entry in entries:
        is_junction = getattr(entry, "is_junction", lambda: False)  # Python 3.12
        if entry.is_symlink() or is_junction():
            raise ValueError(f"{entry.path} must not be a link")
        try:
            entry.name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{entry.path!r} must have a name in UTF-8") from None
        if not is_kind(entry):
            raise ValueError(f"{entry.path} must be {kind}")
    return sorted((entry.name, Path(entry.path)) for entry in entries)


def _pixels(
    paths: Sequence[Path], size: int | None, grey: bool, max_bytes: int, invert: bool
) -> np.ndarray:
    """(R, H, W, channels) float32 in [0, 1]."""
    if size is not None:
        side = _validation.integer_array("size", size, minimum=1)
        if side.ndim:
            raise ValueError(f"size must be one whole number, got {size!r}")
        size = int(side)
        channels = 1 if grey else 3
        _check_bytes(len(paths), 4 * size * size * channels, max_bytes)
    images: Any = None
    for row, path in enumerate(paths):
        image = _pixels_of(path, size, grey)
        if images is None:
            _check_bytes(len(paths), 4 * image.size, max_bytes)
            images = np.empty((len(paths), *image.shape), np.float32)
        elif image.shape != images.shape[1:]:
            raise ValueError(
                f"images must be alike or brought to a size; {path} is "
                f"{image.shape[:2]}, {paths[0]} is {images.shape[1:3]} (give size=)"
            )
        images[row] = image
    images /= 255
    return 1 - images if invert else images


def _check_bytes(number: int, bytes_each: int, max_bytes: int) -> None:
    if number * bytes_each > max_bytes:
        raise ValueError(
            f"the features must take at most max_bytes={max_bytes} bytes, "
            f"{number} images take {number * bytes_each}"
        )


def _pixels_of(path: Path, size: int | None, grey: bool) -> np.ndarray:
    """(H, W, channels) uint8 of one file."""
    pillow = require("PIL.Image", purpose="reading images")
    try:
        with warnings.catch_warnings():
            # Of large images Pillow warns; ours is the smaller limit, and an error.
            warnings.simplefilter("ignore")
            with pillow.open(path, formats=_FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise ValueError(f"{width} x {height} pixels, over {MAX_PIXELS}")
                if image.mode not in _MODES:
                    raise ValueError(f"mode {image.mode!r}, not 8 bits a channel")
                converted = image.convert("L" if grey else "RGB")
        if size is not None and converted.size != (size, size):
            converted = converted.resize((size, size), pillow.Resampling.BILINEAR)
    except Exception as error:  # a broken file raises nearly anything in Pillow
        raise ValueError(f"{path} must be a readable image: {error}") from error
    pixels = np.asarray(converted)
    return pixels[..., None] if grey else pixels
