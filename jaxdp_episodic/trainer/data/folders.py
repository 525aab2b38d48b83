"""Image folders, and which data layout a path contains."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.column_folder import MANIFEST
from jaxdp_episodic.files.json_file import json_lines
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.files.table_file import read_csv_columns
from jaxdp_episodic.trainer.data.fields import is_unicode
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, Owners, owner_of_name
from jaxdp_episodic.trainer.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from jaxdp_episodic.trainer.data.stored import Records
from jaxdp_episodic.trainer.data.table import INVERTED, UNIT, ExampleTable, numbered

# Of one image before it is resized: 200 MB decoded; a transparent image briefly takes
# 500 MB more.
_MAX_PIXELS = 2**26
_BATCH_IMAGES = 256  # most images decoded at a time

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# Formats to decode. Without this list Pillow decides by content, and runs other
# programs for some formats (PostScript).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# Pixel modes of Pillow with at most 8 bits a channel.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# Files and folders that operating systems and archives create, in lower case.
_LITTER = ("@eadir", "__macosx", "desktop.ini", "thumbs.db")
# Names of splits, as folders or as lists of files; the customary name first.
_NAMES_OF_SPLIT = {
    TRAIN: ("train",),
    VALIDATION: ("val", "validation", "valid"),
    TEST: ("test",),
}
_METADATA = ("metadata.jsonl", "metadata.csv")  # lists of Hugging Face image folders
IMAGES = "images"
"""Folder of images next to file lists, as in mini-ImageNet."""
_FILE_KEYS = ("filename", "file_name")  # keys in a file list
_MAX_LIST_BYTES = 2**30
_MOST_SHOWN = 20  # bad files listed in one message

Keeps = Callable[[Sequence[str]], np.ndarray]  # class names -> (C,) bool: which to keep
Owner = str | Callable[[str], Any]  # image path -> owner: see `load_class_folders`


def load_class_folders(
    path: str | os.PathLike[str],
    *,
    size: int | None = None,
    grey: bool = False,
    owner: Owner | None = None,
    keeps: Keeps | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a folder that has one folder of images per class.

    Every folder is a class, including empty ones, and every image is kept. Links are
    refused: they may lead outside, or put one image into two classes. Ignored are
    names that begin with a dot, ``desktop.ini``, ``Thumbs.db``, ``@eaDir``,
    ``__MACOSX``.

    ``path`` may also be a list of image files: a folder with a ``metadata.jsonl`` or
    ``metadata.csv`` of ``file_name`` and ``label`` (the Hugging Face layout), or a
    ``.csv`` file with the columns ``filename`` and ``label``, whose images are in the
    folder ``images`` next to it (the mini-ImageNet layout).

    Images are rotated according to their EXIF orientation, as viewers and Hugging Face
    data sets do; torchvision's ``ImageFolder`` does not. Transparent images are laid on
    white, so that black ink on a transparent ground stays visible. Animations are
    refused, because it is unclear which of their pictures is meant.

    Args:
      path: the folder; its folders are the classes, their names the class ids.
      size: side in pixels to which every image is resized; None: all images must have
        the same shape.
      grey: convert to one channel instead of three.
      owner: owner of an image: a regular expression with one group that is searched in
        the file name, "drawer" (see `load_omniglot`), or a function from "class/file"
        to an id; None: not known.
      keeps: function from class names to a mask of the classes to keep, such as
        `ClassSplit.mask`; None: all.
      max_bytes: largest size of the features in bytes.

    Returns:
      Levels "class" and "example", examples sorted by file name; features
      (R, H, W, channels) float32 in [0, 1].

    Raises:
      ImportError: the extra ``[data]`` is not installed.
      FileNotFoundError, NotADirectoryError: no such folder.
      ValueError: links, unreadable images, animations, images of different shapes, too
        many images, or an image without an owner. The message lists all bad files, each
        with the reason.
    """
    found = listed_classes(Path(path), size=size, grey=grey, owner=owner, keeps=keeps)
    return found.table(max_bytes)


def load_omniglot(
    path: str | os.PathLike[str],
    *,
    size: int = 28,
    alphabets: bool = False,
    owner: Owner | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of ``alphabet/character/CCCC_DD.png``; ink is 1, paper 0.

    Args:
      path: the folder of the alphabets, such as ``images_background``.
      size: side in pixels to which every image is resized.
      alphabets: keep the alphabets as the top level.
      owner: "drawer": the number DD in the file name; or as in `load_class_folders`,
        where a function gets "alphabet/character/file".
      max_bytes: largest size of the features in bytes.

    Returns:
      Levels "class" (ids "alphabet/character") and "example", below "alphabet" if
      ``alphabets``; features (R, size, size, 1) float32 in [0, 1].

    Raises:
      As `load_class_folders`; also ValueError for an alphabet without characters.
    """
    found = listed_omniglot(Path(path), size=size, alphabets=alphabets, owner=owner)
    return found.table(max_bytes)


def load_mini_imagenet(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: int = 84,
    owner: Owner | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns one split of ``train|val|test/<class>/*.jpg``, or of file lists.

    Args:
      path: the folder that contains the three folders; or ``images`` and the lists
        ``train.csv``, ``val.csv`` and ``test.csv``, see `load_class_folders`.
      split: "train", "validation" (folder ``val``, ``validation`` or ``valid``) or
        "test".
      size: side in pixels to which every image is resized.
      owner: as in `load_class_folders`.
      max_bytes: largest size of the features in bytes.

    Returns:
      Levels "class" and "example"; features (R, size, size, 3) float32 in [0, 1].

    Raises:
      As `load_class_folders`.
    """
    found = listed_mini_imagenet(Path(path), split, size=size, owner=owner)
    return found.table(max_bytes)


def split_folders(path: Path) -> dict[str, Path]:
    """Returns split -> its folder or file list, for the splits present in a folder."""
    found = {}
    has_lists = (path / IMAGES).is_dir()
    for split, names in _NAMES_OF_SPLIT.items():
        there = [path / name for name in names if (path / name).is_dir()]
        if has_lists:
            lists = [path / f"{name}.csv" for name in names]
            there += [file for file in lists if file.is_file()]
        if len(there) > 1:
            raise ValueError(f"{there[0]} and {there[1]} must not both be there")
        if there:
            found[split] = there[0]
    return found


def listed_classes(
    path: Path,
    *,
    size: int | None = None,
    grey: bool = False,
    owner: Owner | None = None,
    keeps: Keeps | None = None,
) -> Records:
    """Returns the image files that `load_class_folders` reads."""
    problems: list[str] = []
    if (listed := _file_list(path)) is not None:
        files = _of_list(listed, problems)
    else:
        folders = _entries(path, problems, are_images=False)
        files = {one.name: _entries(one, problems, are_images=True) for one in folders}
    _refuse(problems)
    if keeps is not None:
        names = list(files)
        files = {names[i]: files[names[i]] for i in np.flatnonzero(keeps(names))}
    return _of_classes(files, size, grey, owner)


def listed_mini_imagenet(path: Path, split: str = TRAIN, **options: Any) -> Records:
    """Returns the image files that `load_mini_imagenet` reads."""
    _validation.choice("split", split, SPLITS)
    there = {split: path / _NAMES_OF_SPLIT[split][0]} | split_folders(path)
    return listed_classes(there[split], **options)


def listed_omniglot(
    path: Path, *, size: int = 28, alphabets: bool = False, owner: Owner | None = None
) -> Records:
    """Returns the image files that `load_omniglot` reads."""
    problems: list[str] = []
    files = {}
    for alphabet in _entries(path, problems, are_images=False):
        characters = _entries(alphabet, problems, are_images=False)
        if not characters:
            problems.append(
                f"{alphabet} must contain a folder for each character, but has none: "
                "the alphabet would be lost"
            )
        for one in characters:
            name = f"{alphabet.name}/{one.name}"
            files[name] = _entries(one, problems, are_images=True)
    _refuse(problems)
    return _of_classes(files, size, True, owner, INVERTED, alphabets)


def _file_list(path: Path) -> Path | None:
    """Returns the list of images that a path is, or that a folder holds, if any."""
    if path.suffix.lower() == ".csv":
        return path
    there = (path / name for name in _METADATA)
    return next((one for one in there if one.is_file()), None)


def _of_list(listed: Path, problems: list[str]) -> dict[str, list[Path]]:
    """Returns class -> files, from the list of an image folder."""
    base, pairs = listed.parent, []
    if listed.suffix.lower() == ".csv":
        key = _FILE_KEYS[listed.name in _METADATA]
        base = base if listed.name in _METADATA else base / IMAGES
        with _validation.prefixed(f"{listed}, a list of image files"):
            found = read_csv_columns(listed, (key, "label"), max_bytes=_MAX_LIST_BYTES)
        pairs = list(zip(found[key], found["label"], strict=True))
        problems += [f"{n} in {listed} must have a label" for n, c in pairs if not c]
    else:
        for number, row, _ in json_lines(listed):
            if isinstance(row, Exception):
                problems.append(f"{listed}, {row}")
                continue
            name = next((row[key] for key in _FILE_KEYS if key in row), None)
            label = row.get("label")
            is_id = isinstance(label, str | int) and not isinstance(label, bool)
            if isinstance(name, str) and is_id and label != "":
                pairs.append((name, str(label)))
                continue
            problems.append(
                f"{listed}, line {number}: must have file_name and label (the class), "
                f"has {_validation.shown(row)}; for labels under another key make the "
                "table in Python with ExampleTable.from_records"
            )
    files: dict[str, list[Path]] = {}
    for name, label in pairs:
        parts = PurePosixPath(name.replace("\\", "/"))
        file = base.joinpath(*parts.parts)
        if parts.is_absolute() or ".." in parts.parts or file.is_symlink():
            problems.append(f"{file} in {listed} must be in {base} and not be a link")
        elif not is_image_name(name) or not file.is_file():
            problems.append(f"{file} in {listed} must be an image, one of {_SUFFIXES}")
        else:
            files.setdefault(label, []).append(file)
    return {label: sorted(files[label]) for label in sorted(files)}


def _of_classes(
    files: dict[str, list[Path]],
    size: int | None,
    grey: bool,
    owner: Owner | None,
    codes: str = UNIT,
    has_alphabets: bool = False,
) -> Records:
    """Returns the images of all classes, "alphabet/class", with units and owners."""
    if size is not None:
        most = math.isqrt(_MAX_PIXELS)
        size = _validation.whole_number("size", size, maximum=most)
    names, counts = list(files), [len(inside) for inside in files.values()]
    paths = list(itertools.chain.from_iterable(files.values()))
    if not paths:
        raise ValueError(
            f"the folder must have images, its {len(names)} classes are empty"
        )
    units, owners = {"class": np.repeat(names, counts)}, None
    if owner is not None:
        owner_of = owner if callable(owner) else owner_of_name(owner)
        pairs = zip(units["class"].tolist(), paths, strict=True)
        owners = Owners.from_ids(
            [owner_of(f"{name}/{file.name}") for name, file in pairs],
            where=lambda place: str(paths[place]),
        )
    if has_alphabets:
        if 0 in counts:
            raise NotImplementedError(
                f"class {names[counts.index(0)]!r} has no images: empty classes are "
                "supported only without a level above them"
            )
        above = [name.partition("/")[0] for name in names]
        units = {"alphabet": np.repeat(above, counts), **units}
    public = None if has_alphabets else names
    table = numbered(
        np.arange(len(paths)), units=units, public_units=public, owners=owners
    )
    return of_files(paths, table, size, grey, codes)


def of_files(
    paths: Sequence[Path], table: ExampleTable, size: int | None, grey: bool, codes: str
) -> Records:
    """Returns the records of image files; the table is that of their places."""

    def read(wanted: np.ndarray) -> Iterator[np.ndarray]:
        return decoded_parts((paths[i] for i in wanted.tolist()), size, grey)

    return Records(table, read, codes, paths)


def is_image_name(name: str) -> bool:
    """Returns whether a file name has the suffix of an image."""
    return name.lower().endswith(_SUFFIXES)


def listed_images(path: Path) -> list[Path]:
    """Returns the images in a folder by name; raises if it has anything else."""
    problems: list[str] = []
    found = _entries(path, problems, are_images=True)
    _refuse(problems)
    return found


def is_ignored(name: str) -> bool:
    """Returns whether a name in a folder is to be ignored (hidden, system files)."""
    return name.startswith(".") or name.lower() in _LITTER


def _entries(path: Path, problems: list[str], *, are_images: bool) -> list[Path]:
    """Returns the images, or folders, in a folder by name; others become problems."""
    is_kind = os.DirEntry.is_file if are_images else os.DirEntry.is_dir
    with os.scandir(path) as listing:
        entries = [entry for entry in listing if not is_ignored(entry.name)]
    found = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        is_junction = getattr(entry, "is_junction", lambda: False)  # Python 3.12
        if entry.is_symlink() or is_junction():
            problems.append(f"{entry.path} must not be a link")
        elif not entry.name.isascii() and not is_unicode(entry.name):
            problems.append(f"{entry.path!r} must have a name in UTF-8")
        elif (
            are_images
            and not is_image_name(entry.name)
            or not is_kind(entry, follow_symlinks=False)
        ):
            kind = f"an image, one of {_SUFFIXES}" if are_images else "a folder"
            problems.append(f"{entry.path} must be {kind}")
        else:
            found.append(Path(entry.path))
    return found


def _refuse(problems: Sequence[str]) -> None:
    """Raises one ValueError with all problems, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        rest = len(problems) - _MOST_SHOWN
        more = [f"and {rest:,} more"] if rest > 0 else []
        shown = "; ".join([*problems[:_MOST_SHOWN], *more])
        raise ValueError(
            f"{len(problems):,} files cannot be used, mend or remove them: {shown}"
        )


File = Path | IO[bytes]
"""An image; messages have the path, or the ``name`` of a file in memory."""


def decoded_parts(
    files: Iterable[File], size: int | None, grey: bool
) -> Iterator[np.ndarray]:
    """Yields batches (n, H, W, channels) uint8, or lists all images that are bad.

    All have the shape of the first image, which is a batch of its own.
    """
    problems, shape = list[str](), None

    def pixels(file: File) -> np.ndarray | str:
        try:
            image = _decoded(file, size, grey)
        except ValueError as error:
            return str(error)
        if shape is None or image.shape == shape:
            return image
        place = file if isinstance(file, Path) else file.name
        return (
            f"images must have the same shape, or be resized (give a size); {place} "
            f"has {image.shape[:2]}, the first has {shape[:2]}"
        )

    iterator = iter(files)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode") as pool:
        while part := list(itertools.islice(iterator, _BATCH_IMAGES if shape else 1)):
            with warnings.catch_warnings(action="ignore"):  # for all threads
                found = list(pool.map(pixels, part))
            problems += [one for one in found if isinstance(one, str)]
            if not problems:
                yield np.stack([one for one in found if not isinstance(one, str)])
            shape = shape or getattr(found[0], "shape", None)
    _refuse(problems)


def _decoded(file: File, size: int | None, grey: bool) -> np.ndarray:
    """Returns an image file as (H, W, channels) uint8; Pillow may warn."""
    pillow = require("PIL.Image", purpose="reading images")
    upright = require("PIL.ImageOps", purpose="reading images").exif_transpose
    try:
        with pillow.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels, over {_MAX_PIXELS}")
            if image.mode not in _MODES:
                raise ValueError(f"mode {image.mode!r}, not 8 bits a channel")
            # A photo with an embedded preview (MPO) counts as one picture.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise ValueError("is an animation, not one picture")
            seen = upright(image)
            if "A" in seen.getbands() or "transparency" in seen.info:
                # Dropping alpha would show the hidden colour below, usually black.
                paper = pillow.new("RGBA", seen.size, "white")
                drawn = seen.convert("RGBA")
                seen = pillow.alpha_composite(paper, drawn)
                alpha = np.asarray(drawn.getchannel("A"))
                if seen == paper and alpha.min() < alpha.max():
                    raise ValueError("is white on transparent; give it another ground")
            converted = seen.convert("L" if grey else "RGB")
        if size is not None and converted.size != (size, size):
            converted = converted.resize((size, size), pillow.Resampling.BILINEAR)
    except Exception as error:  # Pillow raises almost any type for broken files
        place = file if isinstance(file, Path) else file.name
        raise ValueError(f"{place} must be a readable image: {error}") from error
    pixels = np.asarray(converted)
    return pixels[..., None] if grey else pixels


CLASSES = "class-folders"
OMNIGLOT = "omniglot"
MINI_IMAGENET = "mini-imagenet"
NPZ = "npz"
PARQUET = "parquet"
CSV = "csv"
STORED = "stored"
_OF_SUFFIX = {".npz": NPZ, ".parquet": PARQUET, ".csv": CSV}
_PICKLES = (".pkl", ".pickle", ".pck")
# One line, because commands print errors on one line.
_CONVERSION = """\
import numpy as np, pathlib, pickle; d = pickle.loads(pathlib.Path(\
{name!r}).read_bytes()); \
np.savez("data.npz", images=d["image_data"], labels=[k for _, k in sorted(\
(i, k) for k, rows in d["class_dict"].items() for i in rows)])"""


def recognized(source: Path) -> str:
    """Returns the data layout of a file or folder, or raises with advice."""
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    if not source.is_dir():
        suffix = source.suffix.lower()
        if suffix in _PICKLES:
            lines = _CONVERSION.format(name=str(source))
            raise ValueError(
                f"{source} is a pickle, which can run any program when opened. If you "
                "trust its author, convert it once (this is for mini-ImageNet's "
                f"cache):\n\n{lines}\n"
            )
        if suffix not in _OF_SUFFIX:
            raise ValueError(
                f"{source} must be a folder or end in one of {tuple(_OF_SUFFIX)}; for "
                "other formats make a table in Python with "
                "jaxdp_episodic.data.ExampleTable.from_records"
            )
        return _OF_SUFFIX[suffix]
    if (source / MANIFEST).is_file():
        return STORED
    splits = split_folders(source)
    if TRAIN in splits and len(splits) > 1:
        return MINI_IMAGENET
    if _file_list(source) is not None:
        return CLASSES
    inside = [p for p in sorted(source.iterdir()) if not is_ignored(p.name)]
    first = next(filter(Path.is_dir, inside), None)
    if first is None:
        for pickled in (p for p in inside if p.suffix.lower() in _PICKLES):
            recognized(pickled)  # raises, and says how to convert it
        raise ValueError(
            f"{source} must contain one folder of images per class, or a list of the "
            f"images and their labels, {' or '.join(_METADATA)}; it has neither"
        )
    found = (p for p in first.iterdir() if not is_ignored(p.name))
    return OMNIGLOT if any(map(Path.is_dir, found)) else CLASSES
