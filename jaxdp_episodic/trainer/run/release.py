"""Writes a run's release: parameters, privacy statement, public log, facts, and use.

All of it follows from what the noised steps released and from public settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic.files.archive import write_arrays
from jaxdp_episodic.files.atomic import atomic_folder
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.trainer.learners.adapted import plain_params
from jaxdp_episodic.trainer.learners.bayesian import BayesianRegression
from jaxdp_episodic.trainer.learners.learners import (
    ANIL,
    MAML,
    Classifier,
    ProtoNet,
    Supervised,
)
from jaxdp_episodic.trainer.learners.untrained import Ridge, as_they_are
from jaxdp_episodic.trainer.run.calibration import Calibration
from jaxdp_episodic.trainer.run.report import Said
from jaxdp_episodic.trainer.run.run_files import read_log, releasable_records
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import Started

PARAMETERS = "parameters.npz"
STATEMENT = "privacy.md"
PUBLIC_LOG = "log.jsonl"
FACTS = "run.json"
DESCRIPTION = "release.json"
OWN = "own"  # key of a description of what no config names
FORMAT = "jaxdp-episodic release"
VERSION = 1  # of `DESCRIPTION`; others are refused

# Learners that a description rebuilds by their fields.
LEARNERS = {
    cls.__name__: cls
    for cls in (
        ANIL,
        BayesianRegression,
        Classifier,
        MAML,
        MixedModel,
        ProtoNet,
        Ridge,
        Supervised,
    )
}

# What a learner applies: nothing, the model, or what the model's last layer sees.
AS_THEY_ARE = "as_they_are"
MODEL = "model"
HIDDEN = "hidden"


def write_release(folder: Path, trainer: Any, log: Path, said: Said) -> list[Path]:
    """Writes what a run releases, with what is said of it; see `export_run`."""
    facts, statement = said.released
    stage, params = trainer.released, trainer.released.params
    if OWN not in trainer.recipe.get("model", {OWN: True}):
        params = whole_params(stage.learner, params)
    return export_run(
        folder,
        params=params,
        statement=statement,
        log=log,
        facts=facts,
        description=described_release(trainer),
        has_public_epsilon=said.has_public_epsilon,
    )


def whole_params(learner: Any, params: Any) -> Any:
    """Returns the parameters of a built-in network without adapters, for a release."""
    if isinstance(learner, Started):
        return {**params, "model": whole_params(learner.learner, params["model"])}
    apply: Any = getattr(learner, "apply", None)
    if not hasattr(apply, "module"):
        return params
    inner = params["model"] if isinstance(learner, BayesianRegression) else params
    whole = plain_params(apply.module(inner))
    return whole if inner is params else {**params, "model": whole}


def export_run(
    folder: Path,
    *,
    params: Any,
    statement: str,
    log: Path,
    facts: Mapping[str, Any],
    description: Mapping[str, Any],
    has_public_epsilon: bool = True,
) -> list[Path]:
    """Writes all files of a release at once, and returns them."""
    arrays = {
        path: np.asarray(leaf, np.float32) if leaf.dtype == jnp.bfloat16 else leaf
        for path, leaf in flat_params(params).items()
    }
    # Epsilons from private sizes are not public, nor is how many steps there were.
    records = releasable_records(read_log(log)) if has_public_epsilon else []
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    described = {**description, "parameters": shapes}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in described.items()]
    texts = {
        STATEMENT: statement,
        PUBLIC_LOG: "".join(json.dumps(record) + "\n" for record in records),
        FACTS: json.dumps(facts, indent=2, allow_nan=False) + "\n",
        DESCRIPTION: "{\n" + ",\n".join(lines) + "\n}\n",
    }
    with atomic_folder(folder) as whole:
        write_arrays(whole / PARAMETERS, arrays)
        for name, text in texts.items():
            (whole / name).write_text(text, encoding="utf-8")
    return [folder / name for name in (PARAMETERS, *texts)]


def flat_params(params: Any) -> dict[str, Any]:
    """Returns the leaves by their path, e.g. ``"layers/0/kernel"``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }


def described_release(trainer: Any) -> dict[str, Any]:
    """Returns how to use what a trainer releases: settings and shapes, no sizes."""
    recipe, stage = dict(trainer.recipe), trainer.released
    features = list(trainer.data.features.shape[1:])
    shape, model = features, recipe.pop("model", {OWN: True})
    name, calibration = stage.name, calibration_for(trainer)
    if not trainer.has_public_accounting:  # nor is the number of a step
        name = name.partition("@")[0]
    if isinstance(stage.learner, Started):
        shape = stage.params["start"]["projection"].shape[1:]
    return plain(
        {
            "format": FORMAT,
            "version": VERSION,
            "stage": name,
            "calibration": calibration and calibration._asdict(),
            "learner": described_learner(stage.learner),
            "has_own_learner": described_learner(trainer.learner)["type"] == OWN,
            "model": {**model, "input_shape": shape},
            "features": recipe.pop("features", None),
            "feature_shape": features,
            "example_shape": recipe.pop("example_shape", features),
            "dtype": recipe.pop("dtype", str(trainer.data.features.dtype)),
            "source": recipe.pop("source", {}),
        }
    )


def calibration_for(trainer: Any) -> Calibration | None:
    """Returns the temperatures of what is released; None: scores, no probabilities."""
    chosen = trainer.selection
    if chosen is None or chosen.step != trainer.num_steps_taken:
        return None
    return chosen.calibration


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and fields, functions by what they stand for."""
    if isinstance(learner, Started):
        return {"type": Started.__name__, "learner": described_learner(learner.learner)}
    cls = type(learner)
    if LEARNERS.get(cls.__name__) is not cls:
        return {"type": OWN, "name": f"{cls.__module__}.{cls.__qualname__}"}
    fields = {one.name: getattr(learner, one.name) for one in dataclasses.fields(cls)}
    for name, value in fields.items():
        if value is as_they_are:
            fields[name] = AS_THEY_ARE
        elif callable(value):
            fields[name] = HIDDEN if name == "features" else MODEL
    return {"type": cls.__name__, **fields}
