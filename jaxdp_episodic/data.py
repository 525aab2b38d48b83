"""Data: tables of examples, the units that contain them, and their loaders.

Doors: `folders`, `sources`, `stored`, `table`.
"""

from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.built_in import (
    load_glyphs,
    load_schools,
    make_sinusoids,
)
from jaxdp_episodic.trainer.data.folders import (
    load_class_folders,
    load_mini_imagenet,
    load_omniglot,
)
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.people import Truncation, fitting_bounds, truncated
from jaxdp_episodic.trainer.data.splits import ClassSplit, with_rotations
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import load_npz, load_table

__all__ = [
    "ClassSplit",
    "ExampleTable",
    "Owners",
    "Truncation",
    "fitting_bounds",
    "from_huggingface",
    "from_tfds",
    "load_class_folders",
    "load_glyphs",
    "load_mini_imagenet",
    "load_npz",
    "load_omniglot",
    "load_schools",
    "load_stored",
    "load_table",
    "make_sinusoids",
    "truncated",
    "with_rotations",
]
