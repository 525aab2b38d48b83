"""Which layout of data a path holds, told by its name and by what is in it."""

from __future__ import annotations

from pathlib import Path

from jaxdp_episodic.files.column_folder import MANIFEST
from jaxdp_episodic.trainer.data.folders import is_ignored, split_folders
from jaxdp_episodic.trainer.data.splits import TRAIN

CLASSES = "class-folders"
OMNIGLOT = "omniglot"
MINI_IMAGENET = "mini-imagenet"
NPZ = "npz"
PARQUET = "parquet"
CSV = "csv"
STORED = "stored"
_OF_SUFFIX = {".npz": NPZ, ".parquet": PARQUET, ".csv": CSV}


def recognized(source: Path) -> str:
    """Returns the layout of a file or folder.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: a file of another kind; a folder without folders, or with two of a
        split.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    if not source.is_dir():
        layout = _OF_SUFFIX.get(source.suffix.lower())
        if layout is None:
            raise ValueError(
                f"{source} must be a folder or end in one of {tuple(_OF_SUFFIX)}"
            )
        return layout
    if (source / MANIFEST).is_file():
        return STORED
    splits = split_folders(source)
    if TRAIN in splits and len(splits) > 1:
        return MINI_IMAGENET
    inside = (p for p in sorted(source.iterdir()) if not is_ignored(p.name))
    first = next(filter(Path.is_dir, inside), None)
    if first is None:
        raise ValueError(
            f"{source} must hold folders, one of images for each class; it has none"
        )
    found = (p for p in first.iterdir() if not is_ignored(p.name))
    return OMNIGLOT if any(map(Path.is_dir, found)) else CLASSES
