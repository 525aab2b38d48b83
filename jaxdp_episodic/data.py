"""Data: tables of examples, the units that contain them, and their loaders.

Doors: `folders`, `sources`, `stored`, `stored_features`, `table`.
"""

from jaxdp_episodic.trainer.data.adapters import (
    from_huggingface as from_huggingface,
    from_tfds as from_tfds,
)
from jaxdp_episodic.trainer.data.built_in import (
    load_glyphs as load_glyphs,
    load_schools as load_schools,
    make_sinusoids as make_sinusoids,
)
from jaxdp_episodic.trainer.data.folders import (
    load_class_folders as load_class_folders,
    load_mini_imagenet as load_mini_imagenet,
    load_omniglot as load_omniglot,
)
from jaxdp_episodic.trainer.data.owners import Owners as Owners
from jaxdp_episodic.trainer.data.people import (
    Truncation as Truncation,
    fitting_bounds as fitting_bounds,
    truncated as truncated,
)
from jaxdp_episodic.trainer.data.splits import (
    ClassSplit as ClassSplit,
    with_rotations as with_rotations,
)
from jaxdp_episodic.trainer.data.stored import load_stored as load_stored
from jaxdp_episodic.trainer.data.table import ExampleTable as ExampleTable
from jaxdp_episodic.trainer.data.user_files import (
    load_npz as load_npz,
    load_table as load_table,
)
