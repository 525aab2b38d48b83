"""A run's release: how it is written, and how it is used.

It holds parameters, a privacy statement, a public log and facts, which all follow from
the noised releases and from public settings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxdp_episodic.files.atomic import atomic_folder
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.trainer.data.owners import id_array
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners import learners
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.learners.models import plain_params
from jaxdp_episodic.trainer.run.evaluation import Calibration, for_ways
from jaxdp_episodic.trainer.run.report import RunStatement
from jaxdp_episodic.trainer.run.run_files import STORE, read_log, releasable_records
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import Started

PARAMETERS = "parameters.npz"
STATEMENT = "privacy.md"
PUBLIC_LOG = "log.jsonl"
FACTS = "run.json"
DESCRIPTION = "release.json"
OWN = "own"  # kind of a part that is the user's own
FORMAT = "jaxdp-episodic release"
VERSION = 1  # of `DESCRIPTION`; other versions are refused

# Learners that `load_release` builds from their described fields.
LEARNERS = {
    cls.__name__: cls
    for cls in (
        learners.ANIL,
        learners.BayesianRegression,
        learners.Classifier,
        learners.MAML,
        MixedModel,
        learners.ProtoNet,
        learners.Ridge,
        learners.Supervised,
    )
}

# What a learner applies: nothing, the model, or the model without its last layer.
AS_THEY_ARE = "as_they_are"
MODEL = "model"
HIDDEN = "hidden"


def write_release(
    folder: Path, trainer: Any, log: Path, own: RunStatement
) -> list[Path]:
    """Writes all files of a run's release at once; returns them."""
    if (folder / STORE).exists():
        raise ValueError(f"folder must not be a run's, which is private, got {folder}")
    facts, statement = own.released
    stage, params = trainer.released, trainer.released.params
    if OWN not in trainer.recipe.get("model", {OWN: True}):
        params = without_adapters(stage.learner, params)
    arrays = {
        path: np.asarray(leaf, np.float32) if leaf.dtype == jnp.bfloat16 else leaf
        for path, leaf in flat_params(params).items()
    }
    # Epsilons from private sizes are not public, nor is the number of steps.
    is_public = trainer.has_public_accounting
    records = releasable_records(read_log(log)) if is_public else []
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    described = {**described_release(trainer), "parameters": shapes}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in described.items()]
    texts = {
        STATEMENT: statement,
        PUBLIC_LOG: "".join(json.dumps(record) + "\n" for record in records),
        FACTS: json.dumps(facts, indent=2, allow_nan=False) + "\n",
        DESCRIPTION: "{\n" + ",\n".join(lines) + "\n}\n",
    }
    with atomic_folder(folder) as whole:
        np.savez(whole / PARAMETERS, allow_pickle=False, **arrays)
        for name, text in texts.items():
            (whole / name).write_text(text, encoding="utf-8")
    return [folder / name for name in (PARAMETERS, *texts)]


def without_adapters(learner: Any, params: Any) -> Any:
    """Returns a built-in network's parameters without adapters, for a release."""
    if isinstance(learner, Started):
        return {**params, "model": without_adapters(learner.learner, params["model"])}
    apply: Any = getattr(learner, "apply", None)
    if not hasattr(apply, "module"):
        return params
    has_prior = isinstance(learner, learners.BayesianRegression)
    inner = params["model"] if has_prior else params
    whole = plain_params(apply.module(inner))
    return whole if inner is params else {**params, "model": whole}


def flat_params(params: Any) -> dict[str, Any]:
    """Returns the leaves by their paths, e.g. ``"layers/0/kernel"``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }


def described_release(trainer: Any) -> dict[str, Any]:
    """Returns how to use a trainer's release: settings and shapes, no sizes."""
    recipe, stage = dict(trainer.recipe), trainer.released
    features = list(trainer.data.features.shape[1:])
    shape, model = features, recipe.pop("model", {OWN: True})
    name, chosen, calibration = stage.name, trainer.selection, None
    if chosen is not None and chosen.step == trainer.num_steps_taken:
        calibration = chosen.calibration
    if not trainer.has_public_accounting:  # nor is the number of steps
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


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and fields; functions by what they stand for."""
    if isinstance(learner, Started):
        return {"type": Started.__name__, "learner": described_learner(learner.learner)}
    cls = type(learner)
    if LEARNERS.get(cls.__name__) is not cls:
        return {"type": OWN, "name": f"{cls.__module__}.{cls.__qualname__}"}
    fields = {one.name: getattr(learner, one.name) for one in dataclasses.fields(cls)}
    for name, value in fields.items():
        if value is learners.as_they_are:
            fields[name] = AS_THEY_ARE
        elif callable(value):
            fields[name] = HIDDEN if name == "features" else MODEL
    return {"type": cls.__name__, **fields}


# Most queries of a call, and most bytes of their inputs.
_QUERIES = 512
_BLOCK_BYTES = 2**26


class Classified(NamedTuple):
    """The classes of queries.

    Attributes:
      labels: (Q,) the class of each query with the largest score.
      classes: (W,) the classes of the support, sorted.
      scores: (Q, W) softmax of the learner's logits, divided by the release's
        temperature if it has one. Each row sums to 1.
      is_calibrated: whether the scores are probabilities: the temperature was fitted on
        held-out classes, for such numbers of classes and of labelled examples. If
        False, the scores only rank the classes.
    """

    labels: np.ndarray
    classes: np.ndarray
    scores: np.ndarray
    is_calibrated: bool = False


@dataclass(frozen=True, eq=False)
class Release:
    """A released model, ready for use; made by `load_release`.

    What it computes from examples follows from these and from what was released, so it
    costs the training data nothing more. Support and queries are not protected.

    Attributes:
      stage: the stage of the run that was released; see `Stage`.
      learner: makes the predictions.
      params: of the learner.
      features: fixed features, computed from every example; None: there are none.
      example_shape: of an example before features, as in the training data.
      dtype: of its numbers: images of training files are float32 in [0, 1].
      source: how the training data's files became examples, as plain values.
      statement: of the run's privacy (Markdown).
      facts: of the run, as plain values.
      calibration: what its temperatures were fitted on; None: scores rank the classes,
        and are no probabilities.
    """

    stage: str
    learner: Any
    params: Any
    features: FixedFeatures | None
    example_shape: tuple[int, ...]
    dtype: np.dtype
    source: Mapping[str, Any]
    statement: str
    facts: Mapping[str, Any]
    calibration: Calibration | None = None

    @property
    def is_regression(self) -> bool:
        """True if it predicts numbers, False if classes."""
        return self.learner.is_regression

    def embed(self, examples: Any) -> np.ndarray:
        """Returns (n, D) float32 embeddings; the mean of a class's is its prototype.

        Args:
          examples: (n, *example_shape), as in the training data.

        Raises:
          NotImplementedError: a learner without an embedding, such as one that adapts
            to each task.
          TypeError, ValueError: examples of another type or shape, or not finite.
        """
        inner = getattr(self.learner, "learner", self.learner)  # of `Started`
        if not hasattr(inner, "embedding"):
            name = type(inner).__name__
            raise NotImplementedError(
                f"{name} has no embedding: it adapts to each task"
            )
        inputs = self._inputs("examples", examples)
        how = {"learner": self.learner, "method": "embedding"}
        made = [
            np.asarray(_applied(self.params, jnp.asarray(rows), **how))
            for rows, _ in _blocks(inputs)
        ]
        return np.concatenate(made)[: len(inputs)].astype(np.float32)

    def classify(self, support: Any, labels: Any, queries: Any) -> Classified:
        """Returns which of the support's classes each query belongs to.

        Args:
          support: (S, *example_shape) examples of the classes, any number of each.
          labels: (S,) their classes, integers or strings. A learner that adapts a
            network (MAML, ANIL) needs as many classes as it was trained for.
          queries: (Q, *example_shape).

        Raises:
          NotImplementedError: a learner of numbers, or of its training classes alone.
          TypeError, ValueError: examples of another type or shape, or not finite;
            another number of labels than of support examples, or of classes.
        """
        if self.is_regression:
            raise NotImplementedError("this release predicts numbers: use predict")
        if isinstance(self.learner, learners.Supervised) and not isinstance(
            self.learner, learners.Classifier
        ):
            raise NotImplementedError(
                "Supervised tells its training classes apart, and no others; "
                "learner.predict(params, episode) gives their logits"
            )
        ids = id_array("labels", labels)
        if ids.dtype.kind not in "iuU":
            raise TypeError(f"labels must be integers or strings, got {ids.dtype}")
        classes, places = np.unique(ids, return_inverse=True)
        learner = for_ways(self.learner, len(classes))
        given = support, "labels", places.astype(np.int32)
        logits = self._predicted(learner, *given, queries)
        if logits.shape[1] != len(classes):
            raise ValueError(
                f"labels must name {logits.shape[1]} classes, as many as "
                f"{type(self.learner).__name__} was trained to tell apart, got "
                f"{len(classes)}"
            )
        found, shots = self.calibration, len(ids) / len(classes)
        temperature = 1.0 if found is None else found.temperature(shots)
        is_calibrated = found is not None and found.covers(len(classes), shots)
        scores = scipy.special.softmax(logits / temperature, axis=1)
        labels = classes[logits.argmax(axis=1)]
        return Classified(labels, classes, scores, is_calibrated)

    def predict(self, support: Any, targets: Any, queries: Any) -> np.ndarray:
        """Returns (Q,) float32 values of a task's queries, given its support.

        Args:
          support: (S, *example_shape) examples of the task.
          targets: (S,) their values.
          queries: (Q, *example_shape).

        Raises:
          NotImplementedError: a learner of classes.
          TypeError, ValueError: as of `classify`.
        """
        if not self.is_regression:
            raise NotImplementedError("this release tells classes apart: use classify")
        values = _finite("targets", np.asarray(targets, np.float32))
        return self._predicted(self.learner, support, "targets", values, queries)

    def _predicted(
        self, learner: Any, support: Any, name: str, targets: np.ndarray, queries: Any
    ) -> np.ndarray:
        """The learner's predictions, block by block of the queries."""
        rows = self._inputs("support", support)
        wanted = self._inputs("queries", queries)
        if targets.shape != rows.shape[:1]:
            raise ValueError(
                f"{name} must have one entry for each of the {len(rows)} support "
                f"examples, got shape {targets.shape}"
            )
        dtype = rows.dtype if rows.dtype.kind == "f" else np.dtype(np.float32)
        # Padded to a power of two, so that what is compiled serves other supports.
        slots = 1 << (len(rows) - 1).bit_length()
        mask = _padded(np.ones(len(rows), dtype), slots)
        kind = dtype if learner.is_regression else np.dtype(np.int32)
        given = _padded(rows, slots), _padded(targets.astype(kind), slots), mask
        found = []
        for some, there in _blocks(wanted):
            arrays = (*given, some, np.zeros(len(some), kind), there)
            episode = Episode(*map(jnp.asarray, arrays))
            made = _applied(self.params, episode, learner=learner, method="predict")
            found.append(np.asarray(made))
        return np.concatenate(found)[: len(wanted)]

    def _inputs(self, name: str, examples: Any) -> np.ndarray:
        """Examples as the learner sees them: checked, and with their features."""
        array = np.asarray(examples)
        shape = self.example_shape
        if array.shape[1:] != shape or not len(array):
            raise ValueError(
                f"{name} must be of shape (n, {', '.join(map(str, shape))}), n at "
                f"least 1, as the training data's examples, got {array.shape}"
            )
        if array.dtype.kind != self.dtype.kind:
            raise TypeError(
                f"{name} must be {self.dtype} as the training data were, got "
                f"{array.dtype} (images of 8 bits are divided by 255)"
            )
        array = _finite(name, array)
        if self.features is not None:
            array = self.features.of_examples(array.astype(self.dtype, copy=False))
        wide = training_dtype(self.params)
        return array.astype(wide) if array.dtype.kind == "f" else array


@functools.partial(jax.jit, static_argnames=("learner", "method"))
def _applied(params: Any, given: Any, *, learner: Any, method: str) -> Any:
    return getattr(learner, method)(params, given)


def _blocks(inputs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of rows, padded to one length, and a mask of the rows."""
    bytes_each = max(math.prod(inputs.shape[1:]) * inputs.dtype.itemsize, 1)
    size = min(max(_BLOCK_BYTES // bytes_each, 1), _QUERIES)
    size = min(size, 1 << (len(inputs) - 1).bit_length())
    kind = inputs.dtype if inputs.dtype.kind == "f" else np.dtype(np.float32)
    for start in range(0, len(inputs), size):
        rows = inputs[start : start + size]
        yield _padded(rows, size), _padded(np.ones(len(rows), kind), size)


def _padded(rows: np.ndarray, number: int) -> np.ndarray:
    """Rows, followed by rows of zeros."""
    rest = np.zeros((number - len(rows), *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, rest])


def _finite(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers")
    return array
