"""Folders of images, and which layout of data a path holds."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.column_folder import MANIFEST
from jaxdp_episodic.files.csv_file import read_csv_columns
from jaxdp_episodic.files.json_file import json_lines
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, Owners, owner_of_name
from jaxdp_episodic.trainer.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from jaxdp_episodic.trainer.data.stored import Part, Records
from jaxdp_episodic.trainer.data.stored_features import INVERTED, UNIT
from jaxdp_episodic.trainer.data.table import ExampleTable

# Of one image, before it is resized: 200 MB decoded, and where it is transparent some
# 500 MB more for a moment.
_MAX_PIXELS = 2**26
_BATCH_IMAGES = 256  # most that are decoded at a time

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# What is decoded: left to itself Pillow goes by the content, and runs other programs
# for some of it (PostScript).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# Pixel modes of Pillow with at most 8 bits a channel.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# What operating systems and archives leave in folders, in lower case.
_LITTER = ("__macosx", "desktop.ini", "thumbs.db")
# What splits are called, as folders or as lists of files; the customary name first.
_NAMES_OF_SPLIT = {
    TRAIN: ("train",),
    VALIDATION: ("val", "validation", "valid"),
    TEST: ("test",),
}
METADATA = "metadata.jsonl"
"""The list of files in an image folder of Hugging Face."""
IMAGES = "images"
"""The folder beside lists of files, as mini-ImageNet comes."""
_FILE_KEYS = ("filename", "file_name")  # of lists of files
_MAX_LIST_BYTES = 2**30
_MOST_SHOWN = 20  # bad files in one message

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

    In place of such a folder ``path`` may be a list of image files: a folder with a
    ``metadata.jsonl`` of objects with ``file_name`` and ``label`` (as Hugging Face has
    it), or a ``.csv`` file with the columns ``filename`` and ``label`` whose images are
    in the folder ``images`` beside it (as mini-ImageNet comes).

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
      ValueError: links, files that are no readable image or an animation, images of
        different shapes, too many, or one without an owner; the message lists all bad
        files with the reason for each.
    """
    found = listed_classes(Path(path), size=size, grey=grey, owner=owner, keeps=keeps)
    return image_records(found).table(max_bytes)


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
    return image_records(found).table(max_bytes)


def load_mini_imagenet(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: int = 84,
    owner: Owner | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns one split of ``train|val|test/<class>/*.jpg``, or of lists of files.

    Args:
      path: the folder that holds the three folders; or ``images`` and the lists
        ``train.csv``, ``val.csv`` and ``test.csv``, see `load_class_folders`.
      split: "train", "validation" (``val``, ``validation`` or ``valid``) or "test".
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
    """Returns the folders, or lists of files, of the splits in a folder, by split."""
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


def image_records(found: Images) -> Records:
    """Returns the records of a listing of image files."""
    size, grey = found.size, found.grey
    first = first_decoded(((str(p), p) for p in found.paths), size, grey)

    def read(wanted: np.ndarray) -> Iterator[Part]:
        files = ((str(found.paths[i]), found.paths[i]) for i in wanted.tolist())
        done = 0
        for pixels in decoded_parts(files, size, grey, first.shape):
            yield wanted[done : done + len(pixels)], pixels
            done += len(pixels)

    numbers = found.table(np.arange(len(found.paths)))
    encoding = INVERTED if found.invert else UNIT
    return Records(numbers, np.dtype(np.uint8), first.shape, encoding, read)


def listed_classes(
    path: Path,
    *,
    size: int | None = None,
    grey: bool = False,
    owner: Owner | None = None,
    keeps: Keeps | None = None,
) -> Images:
    """Returns the images of `load_class_folders`."""
    problems: list[str] = []
    if path.suffix.lower() == ".csv" or (path / METADATA).is_file():
        files = _of_list(path, problems)
    else:
        files = {
            name: [file for _, file in _images_in(folder, problems)]
            for name, folder in _folders(path, problems)
        }
    _refuse(problems)
    if keeps is not None:
        names = list(files)
        files = {names[i]: files[names[i]] for i in np.flatnonzero(keeps(names))}
    return _images(files, None, size, grey, False, owner)


def listed_omniglot(
    path: Path, *, size: int = 28, alphabets: bool = False, owner: Owner | None = None
) -> Images:
    """Returns the images of `load_omniglot`."""
    problems: list[str] = []
    files, parents = {}, []
    for alphabet, folder in _folders(path, problems):
        characters = _folders(folder, problems)
        if not characters:
            problems.append(
                f"{folder} must hold a folder for each character, has none: an "
                "alphabet must not vanish"
            )
        for name, inside in characters:
            images = _images_in(inside, problems)
            files[f"{alphabet}/{name}"] = [file for _, file in images]
            parents.append(alphabet)
    _refuse(problems)
    return _images(files, parents if alphabets else None, size, True, True, owner)


def _of_list(path: Path, problems: list[str]) -> dict[str, list[Path]]:
    """By class, the images that a list names: ``metadata.jsonl``, or a CSV file."""
    if path.suffix.lower() == ".csv":
        base, listed, pairs = path.parent / IMAGES, path, _csv_pairs(path)
    else:
        base, listed = path, path / METADATA
        pairs = _jsonl_pairs(listed, problems)
    files: dict[str, list[Path]] = {}
    for name, label in pairs:
        parts = PurePosixPath(name.replace("\\", "/"))
        file = base.joinpath(*parts.parts)
        if parts.is_absolute() or ".." in parts.parts or file.is_symlink():
            problems.append(f"{file} in {listed} must lie in {base}, and be no link")
        elif not is_image_name(name) or not file.is_file():
            problems.append(f"{file} in {listed} must be an image, one of {_SUFFIXES}")
        else:
            files.setdefault(label, []).append(file)
    return {label: sorted(files[label]) for label in sorted(files)}


def _csv_pairs(path: Path) -> Iterator[tuple[str, str]]:
    try:
        found = read_csv_columns(path, ("filename", "label"), max_bytes=_MAX_LIST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}, a list of image files: {error}") from None
    return zip(found["filename"], found["label"], strict=True)


def _jsonl_pairs(path: Path, problems: list[str]) -> Iterator[tuple[str, str]]:
    for number, row, _ in json_lines(path):
        if isinstance(row, Exception):
            problems.append(f"{path}, {row}")
            continue
        name = next((row[key] for key in _FILE_KEYS if key in row), None)
        label = row.get("label")
        is_id = isinstance(label, str | int) and not isinstance(label, bool)
        if not isinstance(name, str) or not is_id or label == "":
            problems.append(
                f"{path}, line {number}: must have file_name and label, the class, has "
                f"{_validation.shown(row)}; with labels under another name make the "
                "table in Python by ExampleTable.from_records"
            )
            continue
        yield name, str(label)


def _images(
    files: dict[str, list[Path]],
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
    names, counts = list(files), [len(inside) for inside in files.values()]
    paths = list(itertools.chain.from_iterable(files.values()))
    if not paths:
        raise ValueError(f"the folder must hold images, {len(names)} classes have none")
    units, owners = {"class": np.repeat(names, counts)}, None
    if owner is not None:
        owner_of = owner if callable(owner) else owner_of_name(owner)
        pairs = zip(units["class"].tolist(), paths, strict=True)
        owners = Owners.from_ids(
            [owner_of(f"{name}/{file.name}") for name, file in pairs],
            where=lambda place: str(paths[place]),
        )
    if above is not None:
        if 0 in counts:
            raise NotImplementedError(
                f"class {names[counts.index(0)]!r} has no images: covered are empty "
                "classes without a level above them"
            )
        units = {"alphabet": np.repeat(above, counts), **units}
    public = names if above is None else None
    return Images(paths, units, public, size, grey, invert, owners)


def _folders(path: Path, problems: list[str]) -> list[Entry]:
    """The folders in a folder, by name."""
    is_folder = lambda entry: entry.is_dir(follow_symlinks=False)  # noqa: E731
    return _entries(path, "a folder", is_folder, problems)


def is_image_name(name: str) -> bool:
    """Returns whether a file's name is one of an image."""
    return name.lower().endswith(_SUFFIXES)


def listed_images(path: Path) -> list[Path]:
    """Returns the images in a folder, by name; it holds nothing else."""
    problems: list[str] = []
    found = [file for _, file in _images_in(path, problems)]
    _refuse(problems)
    return found


def _images_in(path: Path, problems: list[str]) -> list[Entry]:
    def is_image(entry: os.DirEntry[str]) -> bool:
        return is_image_name(entry.name) and entry.is_file(follow_symlinks=False)

    return _entries(path, f"an image, one of {_SUFFIXES}", is_image, problems)


def is_ignored(name: str) -> bool:
    """Returns whether what has this name in a folder is nobody's data."""
    return name.startswith(".") or name.lower() in _LITTER


def _entries(
    path: Path,
    kind: str,
    is_kind: Callable[[os.DirEntry[str]], bool],
    problems: list[str],
) -> list[Entry]:
    """What is in a folder, by name: all of a kind; no links. Others are problems."""
    with os.scandir(path) as listing:
        entries = [entry for entry in listing if not is_ignored(entry.name)]
    found = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        is_junction = getattr(entry, "is_junction", lambda: False)  # Python 3.12
        if entry.is_symlink() or is_junction():
            problems.append(f"{entry.path} must not be a link")
        elif not entry.name.isascii() and not _is_text(entry.name):
            problems.append(f"{entry.path!r} must have a name in UTF-8")
        elif not is_kind(entry):
            problems.append(f"{entry.path} must be {kind}")
        else:
            found.append((entry.name, Path(entry.path)))
    return found


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _refuse(problems: Sequence[str]) -> None:
    """Raises a ValueError with all problems: one as it is, several as a list."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        rest = len(problems) - _MOST_SHOWN
        more = [f"and {rest:,} more"] if rest > 0 else []
        lines = [f"{len(problems):,} files cannot be used:", *problems[:_MOST_SHOWN]]
        raise ValueError("\n  ".join([*lines, *more]))


def check_alike(
    path: Any, image: np.ndarray, first: Any, shape: tuple[int, ...]
) -> None:
    """Refuses an image of another shape than the first, by a ValueError."""
    if image.shape != shape:
        raise ValueError(
            f"images must be alike or brought to a size; {path} is "
            f"{image.shape[:2]}, {first} is {shape[:2]} (give size=)"
        )


File = tuple[str, Path | IO[bytes]]
"""What messages call an image, and where it is."""


def first_decoded(files: Iterable[File], size: int | None, grey: bool) -> np.ndarray:
    """Returns (H, W, channels) uint8 of the first image; lists all bad if it is bad."""
    problems: list[str] = []
    for name, file in files:
        try:
            found = decoded_image(file, size, grey, name)
        except ValueError as error:
            problems.append(str(error))
            continue
        if not problems:
            return found
    _refuse(problems)
    raise ValueError("there must be at least one image, got none")


def decoded_parts(
    files: Iterable[File], size: int | None, grey: bool, shape: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """Yields images (n, *shape) uint8, decoded in threads; lists all bad at the end."""
    problems: list[str] = []

    def pixels(file: File) -> np.ndarray | ValueError:
        try:
            image = _decoded(file[1], size, grey, file[0])
            check_alike(file[0], image, "the first", shape)
            return image
        except ValueError as error:
            return error

    iterator = iter(files)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode") as pool:
        while part := list(itertools.islice(iterator, _BATCH_IMAGES)):
            with warnings.catch_warnings(action="ignore"):  # for all threads
                found = list(pool.map(pixels, part))
            problems += [str(one) for one in found if isinstance(one, ValueError)]
            if not problems:
                yield np.stack([one for one in found if isinstance(one, np.ndarray)])
    _refuse(problems)


def decoded_image(
    file: Path | IO[bytes], size: int | None, grey: bool, name: Any
) -> np.ndarray:
    """Returns (H, W, channels) uint8 of an image file; see `Images`."""
    with warnings.catch_warnings(action="ignore"):
        return _decoded(file, size, grey, name)


def _decoded(
    file: Path | IO[bytes], size: int | None, grey: bool, name: Any
) -> np.ndarray:
    """`decoded_image`, with what Pillow warns of."""
    pillow = require("PIL.Image", purpose="reading images")
    upright = require("PIL.ImageOps", purpose="reading images").exif_transpose
    try:
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
        raise ValueError(f"{name} must be a readable image: {error}") from error
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
# In one line, as commands print errors in one.
_CONVERSION = """\
import numpy as np, pathlib, pickle; d = pickle.loads(pathlib.Path(\
{name!r}).read_bytes()); \
np.savez("data.npz", images=d["image_data"], labels=[k for _, k in sorted(\
(i, k) for k, rows in d["class_dict"].items() for i in rows)])"""


def recognized(source: Path) -> str:
    """Returns the layout of a file or folder."""
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    if not source.is_dir():
        suffix = source.suffix.lower()
        if suffix in _PICKLES:
            lines = _CONVERSION.format(name=str(source))
            raise ValueError(
                f"{source} is a pickle, which may run any program when it is opened. "
                "If you trust whoever made it, convert it once (here as mini-ImageNet "
                f"is cached):\n\n{lines}\n"
            )
        if suffix not in _OF_SUFFIX:
            raise ValueError(
                f"{source} must be a folder or end in one of {tuple(_OF_SUFFIX)}; of "
                "anything else make a table in Python by "
                "jaxdp_episodic.data.ExampleTable.from_records"
            )
        return _OF_SUFFIX[suffix]
    if (source / MANIFEST).is_file():
        return STORED
    splits = split_folders(source)
    if TRAIN in splits and len(splits) > 1:
        return MINI_IMAGENET
    if (source / METADATA).is_file():
        return CLASSES
    inside = [p for p in sorted(source.iterdir()) if not is_ignored(p.name)]
    first = next(filter(Path.is_dir, inside), None)
    if first is None:
        for pickled in (p for p in inside if p.suffix.lower() in _PICKLES):
            recognized(pickled)  # which says how to convert it
        raise ValueError(
            f"{source} must hold folders, one of images for each class, or "
            f"{METADATA}, a list of the images and their labels; it has neither"
        )
    found = (p for p in first.iterdir() if not is_ignored(p.name))
    return OMNIGLOT if any(map(Path.is_dir, found)) else CLASSES
