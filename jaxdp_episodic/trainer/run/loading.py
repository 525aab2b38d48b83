"""Reads a release. Anybody may have written it, so all of it is bounded and checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import read_arrays, read_bounded
from jaxdp_episodic.files.json_file import read_json
from jaxdp_episodic.trainer.config.training_parts import (
    MOST_INNER_STEPS,
    MOST_POWERS,
    MOST_UNITS,
    ONNX,
    SCALED,
    WAVELETS,
    FeaturesConfig,
    ModelConfig,
)
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners import models
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.learners.learners import BayesianRegression, as_they_are
from jaxdp_episodic.trainer.run.evaluation import calibration_of, for_ways
from jaxdp_episodic.trainer.run.release import (
    AS_THEY_ARE,
    DESCRIPTION,
    FACTS,
    FORMAT,
    HIDDEN,
    LEARNERS,
    MODEL,
    OWN,
    PARAMETERS,
    STATEMENT,
    VERSION,
    Release,
    flat_params,
)
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import Started

_MOST_BYTES = 2**30  # of the parameters, by default
_HEADER_BYTES = 2**20  # most bytes of all array headers
_MOST_TEXT = 2**20  # most bytes of each text file of a release
# Learners whose parameters are those of the model and those of a prior.
_WITH_PRIORS = (MixedModel.__name__, BayesianRegression.__name__)
# Maximum of learner fields that determine its work, as in a config.
_MOST = {"inner_steps": MOST_INNER_STEPS, "powers": MOST_POWERS, "rank": MOST_UNITS}
_MOST_AXES = 8  # of an example or a parameter
_MOST_NUMBERS = 2**30  # of an example or a parameter
# Types of a declared number or flag, in words too; others are str.
_TYPES = {
    "int": ((int,), "of type int"),
    "float": ((int, float), "a finite number"),
    "bool": ((bool,), "of type bool"),
}
_DTYPES = tuple(np.dtype(code).name for code in "bBhHiIlLefd")


def load_release(
    folder: Path,
    *,
    model: Any = None,
    learner: Any = None,
    features: FixedFeatures | str | os.PathLike[str] | None = None,
    max_bytes: int = _MOST_BYTES,
) -> Release:
    """Returns a run's release, ready for use.

    Nothing is unpickled, and sizes are checked before anything is read.

    Args:
      folder: the ``release`` folder of a run or a search, or one that `Trainer.release`
        has made.
      model: your own model, if `run_training` was given one; its parameters are not
        used.
      learner: your own learner, likewise.
      features: your own features, likewise; or the file of the run's network (ONNX),
        which a release does not hold.
      max_bytes: largest size of the parameters in bytes.

    Raises:
      OSError: a file that is missing or cannot be read.
      TypeError, ValueError: a folder that is damaged, of another version or no release;
        links to other files in it; parameters that do not fit; a part of your own that
        is needed and not given, or given and not needed.
    """
    folder = Path(folder)
    for name in (DESCRIPTION, PARAMETERS, STATEMENT, FACTS):
        if (folder / name).is_symlink():  # it could show a file from elsewhere
            raise ValueError(f"{folder / name} must be a file, got a link to one")
    with _validation.prefixed(folder / DESCRIPTION):
        description = _description(folder)
        shape = _shape("example_shape", description["example_shape"], fewest=1)
        seen = _shape("feature_shape", description["feature_shape"], fewest=1)
        stage = _plain_value("stage", description["stage"], "str")
        is_own = _validation.flag("has_own_learner", description["has_own_learner"])
        named = _table("parameters", description["parameters"])
        wanted = {n: _shape(f"parameters.{n}", value) for n, value in named.items()}
        fields, starts = _table("learner", description["learner"]), 0
        while fields["type"] == Started.__name__:
            fields, starts = _table("learner", fields["learner"]), starts + 1
        # The model's parameters are below so many keys "model".
        depth = starts + (fields["type"] in _WITH_PRIORS)
        functions, like = _functions(description, fields, depth, model, wanted)
        inner = _learner(fields, functions, learner)
        if learner is not None and not is_own:
            raise ValueError("learner must be left out: the release describes its own")
        fixed = _features(description["features"], features)
        dtype = np.dtype(_validation.choice("dtype", description["dtype"], _DTYPES))
        source = _source(description["source"])
        calibration = description.get("calibration")  # older releases have none
        if calibration is not None:
            calibration = calibration_of(_table("calibration", calibration))
        if fixed is None and seen != shape:
            raise ValueError(
                f"example_shape must be feature_shape, {list(seen)}, where there are "
                f"no features, got {list(shape)}"
            )
    arrays = read_arrays(folder / PARAMETERS, max_bytes=max_bytes)
    with _validation.prefixed(folder / PARAMETERS):
        params = _params(arrays, wanted, like, depth)
    if learner is None:  # a user's own may take certain episodes only
        with _validation.prefixed(folder / DESCRIPTION):
            _check_use(inner, starts, params, seen, dtype)
    with _validation.prefixed(folder / STATEMENT):
        statement = read_bounded(folder / STATEMENT, _MOST_TEXT).decode()
    with _validation.prefixed(folder / FACTS):
        facts = _table("it", read_json(folder / FACTS, max_bytes=_MOST_TEXT))
    made = _started(inner, starts)
    return Release(
        stage, made, params, fixed, shape, dtype, source, statement, facts, calibration
    )


def load_parameters(path: Path, like: Any) -> Any:
    """Returns exported parameters in the structure of ``like``; never unpickles.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no npz file of numbers, one that is too large, or other names or
        shapes than those of ``like``.
    """
    wanted = flat_params(like)
    # Twice the bytes of float64.
    most = 16 * sum(leaf.size for leaf in wanted.values()) + _HEADER_BYTES
    arrays = read_arrays(path, max_bytes=most)
    with _validation.prefixed(path):
        _check_shapes(arrays, wanted)
    leaves = [jnp.asarray(arrays[n], v.dtype) for n, v in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    if not path.exists() and (folder / PARAMETERS).exists():
        raise ValueError(
            "missing, though there are parameters: they are of an older version, which "
            "described no model; load_parameters reads them"
        )
    inside = folder / "release"
    if not path.exists() and (inside / DESCRIPTION).exists():
        raise ValueError(
            f"missing: this is the folder of a run or a search; name {inside}"
        )
    description = _table("it", read_json(path, max_bytes=_MOST_TEXT))
    for key, wanted, why in (
        ("format", FORMAT, "this is no release"),
        ("version", VERSION, "another release of the library wrote it"),
    ):
        if description.get(key) != wanted:
            shown = _validation.shown(description.get(key))
            raise ValueError(f"{key} must be {wanted!r}, got {shown}: {why}")
    return description


def _source(source: Any) -> dict[str, Any]:
    """Returns what describes the training files: names, numbers and lists of names."""
    for name, value in _table("source", source).items():
        for one in value if isinstance(value, list) else [value]:
            kinds = str | int | bool | None
            _validation.instance(f"source.{name}", one, kinds, "plain values")
        if name in ("groups", "features"):
            _validation.instance(f"source.{name}", value, list, "a list of names")
    return source


def _functions(
    description: Mapping[str, Any],
    learner: Mapping[str, Any],
    depth: int,
    model: Any,
    wanted: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Any], Any]:
    """Returns what a learner may apply, by name, and parameters like the model's."""
    functions: dict[str, Any] = {AS_THEY_ARE: as_they_are}
    described = _table("model", description["model"])
    shape = _shape("model.input_shape", described["input_shape"], fewest=1)
    del described["input_shape"]
    if model is not None and OWN not in described:
        raise ValueError("model must be left out: the release describes its own")
    applied = {str(learner.get(name)) for name in ("apply", "features")}
    is_own = learner["type"] == OWN  # what it applies is not known
    if not described or not (is_own or MODEL in applied or HIDDEN in applied):
        return functions, {}
    if OWN in described:
        if model is None:
            return functions, {}
        functions[MODEL], like = models.apply_and_params(model, shape)
        return functions, like
    outputs = _validation.whole_number("model.outputs", described["outputs"])
    embeds = _validation.flag("model.embeds", described["embeds"])
    given = {k: v for k, v in described.items() if k not in ("outputs", "embeds")}
    config = ModelConfig.from_dict(given, where="model")

    def made() -> Any:
        return models.built_module(config, shape, outputs, embeds=embeds)

    # By shapes alone: the file may ask for more than fits in memory.
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(made), nnx.Param))
    _check_shapes(_below(depth, wanted), flat_params(state))
    module = made()
    functions[MODEL], like = models.split_model(module)
    if hasattr(module, HIDDEN):
        functions[HIDDEN], _ = models.split_model(module, HIDDEN)
    return functions, like


def _learner(fields: Mapping[str, Any], functions: Mapping[str, Any], own: Any) -> Any:
    """The learner of a description without the `Started` around it."""
    kind = fields["type"]
    if kind == OWN:
        if own is None:
            raise ValueError(
                "learner must be given, as it was to the run: it had its own, "
                f"{_validation.shown(fields.get('name'))}"
            )
        return models.learner_of(own, _function(MODEL, functions))
    cls = LEARNERS[_validation.choice("learner.type", kind, LEARNERS)]
    kinds = {field.name: field for field in dataclasses.fields(cls)}
    for name in set(fields) - {"type"} - kinds.keys():
        raise ValueError(f"learner.{name} is unexpected: {kind} has {list(kinds)}")
    given = {}
    for name, field in kinds.items():
        if name not in fields and field.default is not dataclasses.MISSING:
            continue
        key, value, declared = f"learner.{name}", fields[name], str(field.type)
        if value is None and declared.endswith("| None"):
            given[name] = None
        elif declared.startswith("Apply"):
            given[name] = _function(value, functions, key)
        else:
            given[name] = _plain_value(key, value, declared)
            if name in _MOST and given[name] > _MOST[name]:
                shown = _validation.shown(value)
                raise ValueError(f"{key} must be at most {_MOST[name]:,}, got {shown}")
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"learner.{error}") from error


def _function(name: Any, functions: Mapping[str, Any], key: str = "") -> Any:
    if name == MODEL and MODEL not in functions:
        raise ValueError("model must be given, as it was to the run, which had its own")
    return functions[_validation.choice(key, name, functions)]


def _features(value: Any, own: Any) -> FixedFeatures | None:
    """The run's fixed features."""
    if value is None:
        if own is not None:
            raise ValueError("features must be left out: the run had none")
        return None
    table = _table("features", value)
    kinds = (WAVELETS, SCALED, ONNX, OWN)
    kind = _validation.choice("features.kind", table["kind"], kinds)
    described = {k: v for k, v in table.items() if k != "kind"}
    settings = _table("features.settings", table.get("settings", {}))
    if own is None and kind in (WAVELETS, SCALED):
        own = FixedFeatures.of(FeaturesConfig(kind=kind, **settings))
    if own is None:
        name = _validation.shown(described.get("name"))
        raise ValueError(
            f"features must be given, as to the run: the file of its network, {name}"
            if kind == ONNX
            else f"features must be given, as to the run, which had its own, {name}"
        )
    if isinstance(own, str | os.PathLike):
        if kind != ONNX:
            shown = _validation.shown(kind)
            raise ValueError(
                f"features must not be a file: those of the run are {shown}, not a "
                "network"
            )
        settings.pop("sha256", None)
        own = FixedFeatures.onnx(own, **settings)
    if own.described() != described:
        shown = _validation.shown(json.dumps(described))
        raise ValueError(
            f"features must be those of the run, {shown}, got {own.described()}"
        )
    return own


def _params(
    arrays: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[int, ...]],
    like: Any,
    depth: int,
) -> Any:
    """The parameters in the structure that the learner takes."""
    _check_shapes(arrays, wanted)
    for name, array in arrays.items():
        if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite numbers")
    own = _below(depth, arrays)
    leaves = flat_params(like)
    _check_shapes(own, leaves)
    made = [jnp.asarray(own[name], leaf.dtype) for name, leaf in leaves.items()]
    params = jax.tree.unflatten(jax.tree.structure(like), made)
    for level in reversed(range(depth)):
        params = {MODEL: params}
        for name, array in _below(level, arrays).items():
            part, _, rest = name.partition("/")
            if part != MODEL:
                params.setdefault(part, {})[rest] = jnp.asarray(array)
    return params


def _started(learner: Any, starts: int) -> Any:
    """The learner with so many `Started` around it."""
    for _ in range(starts):
        learner = Started(learner)
    return learner


def _check_use(
    inner: Any, starts: int, params: Any, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    """Refuses a learner that cannot predict with the parameters; computes nothing."""
    if hasattr(inner, "inner_steps"):  # many take long to trace, and change no shape
        inner = dataclasses.replace(inner, inner_steps=1)
    learner, wide = _started(inner, starts), training_dtype(params)
    kind = wide if dtype.kind == "f" else dtype
    labels = wide if learner.is_regression else np.int32
    rows: list[Any] = [jax.ShapeDtypeStruct((2, *shape), kind)]
    rows += [jax.ShapeDtypeStruct((2,), one) for one in (labels, wide)]
    try:
        jax.eval_shape(for_ways(learner, 2).predict, params, Episode(*rows, *rows))
    except Exception as error:  # a hostile file may fail anywhere
        raise ValueError(
            "learner must predict with these parameters, got "
            f"{_validation.shown(str(error))} ({type(error).__name__})"
        ) from error


def _below(depth: int, named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries below ``depth`` keys "model", by the rest of their names."""
    head = f"{MODEL}/" * depth
    return {n[len(head) :]: one for n, one in named.items() if n.startswith(head)}


def _check_shapes(*found_and_wanted: Mapping[str, Any]) -> None:
    """Refuses other names or shapes than those wanted; both are arrays, or shapes."""
    found, wanted = (
        {name: tuple(getattr(one, "shape", one)) for name, one in named.items()}
        for named in found_and_wanted
    )
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"parameter {name!r} must be of shape {wanted.get(name, '(none)')}, "
                f"got {found.get(name, '(none)')}"
            )


class _Table(dict[str, Any]):
    """An object of a file that knows its name; a missing key is named in full."""

    name = ""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"missing key {f'{self.name}.{key}'.lstrip('.')!r}")


def _table(name: str, value: Any) -> _Table:
    """Returns an object of a file; the outermost is named "it"."""
    table = _Table(_validation.instance(name, value, dict, "an object"))
    table.name = "" if name == "it" else name
    return table


def _plain_value(name: str, value: Any, kind: str) -> Any:
    """Returns a string, number or flag of a file, of the type a field declares."""
    types, wanted = _TYPES.get(kind, ((str,), "of type str"))
    if type(value) not in types or (kind == "float" and not math.isfinite(value)):
        raise TypeError(f"{name} must be {wanted}, got {_validation.shown(value)}")
    return value


def _shape(name: str, value: Any, *, fewest: int = 0) -> tuple[int, ...]:
    """Returns a shape of at most `_MOST_NUMBERS` numbers."""
    fits = isinstance(value, list) and len(value) <= _MOST_AXES
    if not fits or not all(type(n) is int and n >= fewest for n in value):
        raise TypeError(f"{name} must be a shape, got {_validation.shown(value)}")
    if math.prod(max(n, 1) for n in value) > _MOST_NUMBERS:
        raise ValueError(f"{name} must be at most {_MOST_NUMBERS} numbers, got {value}")
    return tuple(value)
