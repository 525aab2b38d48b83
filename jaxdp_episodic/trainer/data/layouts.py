"""Which layout of data a path holds, told by its name and by what is in it."""

from __future__ import annotations

from pathlib import Path

from jaxdp_episodic.files.column_folder import MANIFEST
from jaxdp_episodic.trainer.data.folders import METADATA, is_ignored, split_folders
from jaxdp_episodic.trainer.data.splits import TRAIN

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
