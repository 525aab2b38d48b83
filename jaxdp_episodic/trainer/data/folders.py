"""Folders of images: one folder a class, Omniglot, mini-ImageNet."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.trainer.data.ids import MAX_BYTES
from jaxdp_episodic.trainer.data.owners import Owners, owner_of_name
from jaxdp_episodic.trainer.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from jaxdp_episodic.trainer.data.table import ExampleTable

# Of one image, before it is resized: 200 MB decoded, and where it is transparent some
# 500 MB more for a moment.
_MAX_PIXELS = 2**26

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# What is decoded: left to itself Pillow goes by the content, and runs other programs
# for some of it (PostScript).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
# Pixel modes of Pillow with at most 8 bits a channel.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# What operating systems and archives leave in folders, in lower case.
_LITTER = ("__macosx", "desktop.ini", "thumbs.db")
# What folders of splits are called, the customary name first.
_NAMES_OF_SPLIT = {
    TRAIN: ("train",),
    VALIDATION: ("val", "validation", "valid"),
    TEST: ("test",),
}

# What decoding makes of a file: an import that another version began is not resumed.
DECODING = "transparent on white"

Entry = tuple[str, Path]  # a unit's id, and its folder or file
Keeps = Callable[[Sequence[str]], np.ndarray]  # of names of classes: which stay
Owner = str | Callable[[str], Any]  # of an image, by its path: see `load_class_folders`


def load_class_folders(
    path: str | os.PathLike[str],
    *,
    size: int | None = None,
    grey: bool = False,
    owner: Owner | None = None,
    keeps: Keeps | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a folder that has one folder of images a class.

    Every image is kept and every folder is a class, an empty one too. Links are
    refused: they may lead outside, or hold one image in two classes. Names that begin
    with a dot are ignored, and ``desktop.ini``, ``Thumbs.db`` and ``__MACOSX``.

    Pictures are turned upright, as their EXIF orientation has it: so do viewers and
    Hugging Face's data sets, while torchvision's ``ImageFolder`` leaves them as stored.
    What is transparent lies on white: black ink on a clear ground stays to be seen.
    Animations are refused: which of their pictures is meant is not known.

    Args:
      path: the folder; those in it are the classes, their names the ids.
      size: side to which images are brought, whatever their shape; None: all are alike.
      grey: one channel in place of three.
      owner: whose an image is: a regular expression with one group, searched for in
        the file's name (`owner_of_name`), or a function from "class/file" to an id;
        None: not known.
      keeps: which classes are kept, of their names; see `ClassSplit.mask`. None: all.
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" and "example", examples by file name; features
      (R, H, W, channels) float32 in [0, 1].

    Raises:
      ImportError: without the extra ``[data]``.
      FileNotFoundError, NotADirectoryError: no such folder.
      ValueError: a link, a file that is no readable image or an animation, images of
        different shapes, too many, or one without an owner; the message has the path.
    """
    found = listed_classes(Path(path), size=size, grey=grey, owner=owner, keeps=keeps)
    return _loaded(found, max_bytes)


def load_omniglot(
    path: str | os.PathLike[str],
    *,
    size: int = 28,
    alphabets: bool = False,
    owner: Owner | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of ``alphabet/character/CCCC_DD.png``; ink is 1.

    Args:
      path: the folder of the alphabets, such as ``images_background``.
      size: side to which images are brought.
      alphabets: keep the alphabets as the top level.
      owner: "drawer", who DD is; or as of `load_class_folders`, the function's argument
        "alphabet/character/file".
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" (ids "alphabet/character") and "example", below "alphabet" if
      wanted; features (R, size, size, 1) float32 in [0, 1].

    Raises:
      As `load_class_folders`; ValueError too for an alphabet without characters.
    """
    found = listed_omniglot(Path(path), size=size, alphabets=alphabets, owner=owner)
    return _loaded(found, max_bytes)


def load_mini_imagenet(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: int = 84,
    owner: Owner | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns one split of ``train|val|test/<class>/*.jpg``, or "validation" for "val".

    Args:
      path: the folder that holds the three.
      split: "train", "validation" (the folder ``val``, ``validation`` or ``valid``) or
        "test".
      size: side to which images are brought.
      owner: as of `load_class_folders`.
      max_bytes: most bytes that the features may take.

    Returns:
      Levels "class" and "example"; features (R, size, size, 3) float32 in [0, 1].

    Raises:
      As `load_class_folders`.
    """
    _validation.choice("split", split, SPLITS)
    folder = split_folders(Path(path)).get(split, Path(path, _NAMES_OF_SPLIT[split][0]))
    return load_class_folders(folder, size=size, owner=owner, max_bytes=max_bytes)


def split_folders(path: Path) -> dict[str, Path]:
    """Returns the folders of the splits that are in a folder, by split.

    Raises:
      ValueError: two that are of one split.
    """
    found = {}
    for split, names in _NAMES_OF_SPLIT.items():
        there = [path / name for name in names if (path / name).is_dir()]
        if len(there) > 1:
            raise ValueError(f"{there[0]} and {there[1]} must not both be there")
        if there:
            found[split] = there[0]
    return found


class Images(NamedTuple):
    """Images that were found in folders, and the units that they lie in."""

    paths: list[Path]  # R files
    units: dict[str, np.ndarray]  # level name -> (R,) ids, top level first
    # Ids of the only level, those without images too; else None.
    public_units: list[str] | None
    size: int | None  # side to which images are brought; None: they are all alike
    grey: bool  # one channel in place of three
    invert: bool  # ink, not paper, is 1
    owners: Owners | None = None  # whose they are; None: not known

    def table(self, features: Any) -> ExampleTable:
        """Returns the table of what there is for each image."""
        return ExampleTable.from_records(
            features,
            units=self.units,
            public_units=self.public_units,
            owners=self.owners,
        )

    def pixels_of(self, path: Path) -> np.ndarray:
        """Returns (H, W, channels) uint8 of one file."""
        return decoded_image(path, self.size, self.grey, path)


def listed_classes(
    path: Path,
    *,
    size: int | None = None,
    grey: bool = False,
    owner: Owner | None = None,
    keeps: Keeps | None = None,
) -> Images:
    """Returns the images of `load_class_folders`."""
    classes = _folders(path)
    if keeps is not None:
        kept = keeps([name for name, _ in classes])
        classes = [classes[place] for place in np.flatnonzero(kept)]
    return _images(classes, None, size, grey, False, owner)


def listed_omniglot(
    path: Path, *, size: int = 28, alphabets: bool = False, owner: Owner | None = None
) -> Images:
    """Returns the images of `load_omniglot`."""
    classes: list[Entry] = []
    parents: list[str] = []
    for alphabet, folder in _folders(path):
        characters = _folders(folder)
        if not characters:
            raise ValueError(
                f"{folder} must hold a folder for each character, has none: an "
                "alphabet must not vanish"
            )
        classes += [(f"{alphabet}/{name}", inside) for name, inside in characters]
        parents += [alphabet] * len(characters)
    return _images(classes, parents if alphabets else None, size, True, True, owner)


def _images(
    classes: Sequence[Entry],
    above: Sequence[str] | None,
    size: int | None,
    grey: bool,
    invert: bool,
    owner: Owner | None,
) -> Images:
    """All images of the classes."""
    if size is not None:
        most = math.isqrt(_MAX_PIXELS)
        size = _validation.whole_number("size", size, maximum=most)
    files = [listed_images(folder) for _, folder in classes]
    paths = [path for inside in files for path in inside]
    if not paths:
        raise ValueError(
            f"the folder must hold images, {len(classes)} classes have none"
        )
    counts = [len(inside) for inside in files]
    names = [name for name, _ in classes]
    units = {"class": np.repeat(names, counts)}
    owners = _owners(paths, units["class"], owner)
    if above is not None:
        if 0 in counts:
            raise NotImplementedError(
                f"class {names[counts.index(0)]!r} has no images: covered are empty "
                "classes without a level above them"
            )
        units = {"alphabet": np.repeat(above, counts), **units}
    public = names if above is None else None
    return Images(paths, units, public, size, grey, invert, owners)


def _owners(
    paths: Sequence[Path], classes: np.ndarray, owner: Owner | None
) -> Owners | None:
    """Whose images are, by their paths below the folder of all."""
    if owner is None:
        return None
    owner_of = owner if callable(owner) else owner_of_name(owner)
    below = map("/".join, zip(classes.tolist(), (p.name for p in paths), strict=True))
    return Owners.from_ids(
        [owner_of(path) for path in below], where=lambda place: str(paths[place])
    )


def _folders(path: Path) -> list[Entry]:
    """The folders in a folder, by name."""
    return _entries(path, "a folder", lambda e: e.is_dir(follow_symlinks=False))


def is_image_name(name: str) -> bool:
    """Returns whether a file's name is one of an image."""
    return name.lower().endswith(_SUFFIXES)


def listed_images(path: Path) -> list[Path]:
    """Returns the images in a folder, by name; it holds nothing else."""

    def is_image(entry: os.DirEntry[str]) -> bool:
        return is_image_name(entry.name) and entry.is_file(follow_symlinks=False)

    found = _entries(path, f"an image, one of {_SUFFIXES}", is_image)
    return [file for _, file in found]


def is_ignored(name: str) -> bool:
    """Returns whether what has this name in a folder is nobody's data."""
    return name.startswith(".") or name.lower() in _LITTER


def _entries(
    path: Path, kind: str, is_kind: Callable[[os.DirEntry[str]], bool]
) -> list[Entry]:
    """What is in a folder, by name: all of a kind; no links."""
    with os.scandir(path) as listing:
        entries = [entry for entry in listing if not is_ignored(entry.name)]
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


def _loaded(found: Images, max_bytes: int) -> ExampleTable:
    """The table of the images, (R, H, W, channels) float32 in [0, 1]."""
    number = len(found.paths)
    if found.size is not None:
        _check_bytes(number, 4 * found.size**2 * (1 if found.grey else 3), max_bytes)
    images: Any = None
    for row, path in enumerate(found.paths):
        image = found.pixels_of(path)
        if images is None:
            _check_bytes(number, 4 * image.size, max_bytes)
            images = np.empty((number, *image.shape), np.float32)
        check_alike(path, image, found.paths[0], images.shape[1:])
        images[row] = image
    images /= 255
    return found.table(1 - images if found.invert else images)


def check_alike(
    path: Path, image: np.ndarray, first: Path, shape: tuple[int, ...]
) -> None:
    """Refuses an image of another shape than the first, by a ValueError."""
    if image.shape != shape:
        raise ValueError(
            f"images must be alike or brought to a size; {path} is "
            f"{image.shape[:2]}, {first} is {shape[:2]} (give size=)"
        )


def _check_bytes(number: int, bytes_each: int, max_bytes: int) -> None:
    if number * bytes_each > max_bytes:
        raise ValueError(
            f"the features must take at most max_bytes={max_bytes} bytes, "
            f"{number} images take {number * bytes_each}"
        )


def decoded_image(
    file: Path | IO[bytes], size: int | None, grey: bool, path: Path
) -> np.ndarray:
    """Returns (H, W, channels) uint8 of an image file; see `Images`.

    What is transparent lies on white.

    Raises:
      ImportError: without the extra ``[data]``.
      ValueError: no readable image, an animation, or white on a clear ground, which
        white would hide; the message has the path.
    """
    pillow = require("PIL.Image", purpose="reading images")
    upright = require("PIL.ImageOps", purpose="reading images").exif_transpose
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; our limit is smaller, and an error.
            warnings.simplefilter("ignore")
            with pillow.open(file, formats=_FORMATS) as image:
                width, height = image.size
                if width * height > _MAX_PIXELS:
                    raise ValueError(f"{width} x {height} pixels, over {_MAX_PIXELS}")
                if image.mode not in _MODES:
                    raise ValueError(f"mode {image.mode!r}, not 8 bits a channel")
                # A photograph with a preview behind it (MPO) is one picture.
                if image.format != "MPO" and getattr(image, "is_animated", False):
                    raise ValueError("an animation, not one picture")
                seen = upright(image)
                if "A" in seen.getbands() or "transparency" in seen.info:
                    # Left out, alpha would show what lies under a clear ground: black.
                    paper = pillow.new("RGBA", seen.size, "white")
                    drawn = seen.convert("RGBA")
                    seen = pillow.alpha_composite(paper, drawn)
                    alpha = np.asarray(drawn.getchannel("A"))
                    if seen == paper and alpha.min() < alpha.max():
                        raise ValueError("white on a clear ground: lay it on another")
                converted = seen.convert("L" if grey else "RGB")
        if size is not None and converted.size != (size, size):
            converted = converted.resize((size, size), pillow.Resampling.BILINEAR)
    except Exception as error:  # a broken file raises nearly anything in Pillow
        raise ValueError(f"{path} must be a readable image: {error}") from error
    pixels = np.asarray(converted)
    return pixels[..., None] if grey else pixels
