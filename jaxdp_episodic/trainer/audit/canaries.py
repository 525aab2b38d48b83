"""Canaries: units made up by the auditor, each in the data or not, at random."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    OWNED,
    MultistageSampling,
    Poisson,
    RandomAllocation,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import Episode


class Canaries(NamedTuple):
    """A table with all canaries in it, and what becomes of those that are out."""

    table: ExampleTable  # all in: added examples; larger units are those of the data
    rows: np.ndarray  # (n,) the canaries' rows in it
    owner: np.ndarray  # (n,) which canary, from 0, each of these rows belongs to
    # (n, ...) features in place of those that are out, under replace_one; None: the
    # rows are left out, and a larger unit stays on the public list, emptied.
    substitutes: np.ndarray | None
    number: int  # of canaries
    leaves_null: bool = False  # a larger unit that is out is not even on the list

    def data(self, is_in: np.ndarray) -> ExampleTable:
        """Returns the table with those canaries that are in, (number,) bool."""
        out = ~np.asarray(is_in, bool)[self.owner]
        if self.substitutes is not None:
            features = self.table.features.copy()
            features[self.rows[out]] = self.substitutes[out]
            return self.table.with_features(features)
        kept = np.ones(self.table.num_examples, bool)
        kept[self.rows[out]] = False
        table = self.table.take(np.flatnonzero(kept))
        if not self.leaves_null:
            return table
        (_, sizes), names = table.population.children_counts, table.level_names
        sizes = sizes[sizes > 0]
        tree = Population((np.array([len(sizes)]), sizes), names)
        return dataclasses.replace(table, population=tree)


def gradient_canaries(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> Canaries:
    """Returns canaries for `CanaryLearner`: marks stand behind the features."""
    # The mark is k + 1 in the rows of canary k, and -(k + 1) in those of the others in
    # its clip unit, which contribute the opposite: the theorem's worst case.
    chosen, others = _chosen(data, step, number, generator)
    table = chosen.table
    marks = np.zeros(table.num_examples, np.float32)
    for canary, rows in enumerate(others):
        marks[rows] = -(canary + 1)
    marks[chosen.rows] = chosen.owner + 1
    flat = table.features.reshape(table.num_examples, -1).astype(np.float32)
    marked = np.concatenate([flat, marks[:, None]], axis=1)
    substitutes = None
    if step.neighboring_relation == "replace_one":
        substitutes = marked[chosen.rows]
        substitutes[:, -1] *= -1
    return chosen._replace(table=table.with_features(marked), substitutes=substitutes)


def input_canaries(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> Canaries:
    """Returns canaries of unusual content, which the model's loss may give away."""
    # Entries of each row are shuffled; targets are mirrored at the mean, far away.
    chosen, _ = _chosen(data, step, number, generator)
    table, rows = chosen.table, chosen.rows
    features = table.features.copy()
    before = features[rows].copy()
    flat = before.reshape(len(rows), -1)
    features[rows] = generator.permuted(flat, axis=1).reshape(before.shape)
    targets = None
    if table.targets is not None:
        targets = table.targets.copy()
        mean = targets.mean()
        targets[rows] = mean - 3 * (targets[rows] - mean)
    replaces = step.neighboring_relation == "replace_one"
    table = table.with_features(features, targets)
    return chosen._replace(table=table, substitutes=before if replaces else None)


def _chosen(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> tuple[Canaries, list[np.ndarray]]:
    """Units in different clip units, chosen at random; and other rows of the same."""
    _validation.whole_number("num_canaries", number)
    if step.privacy_unit in OWNED:
        return _people(data, str(step.privacy_unit), number, generator)
    names = list(data.level_names)
    _validation.choice("privacy_unit", step.privacy_unit, names)
    unit = names.index(str(step.privacy_unit))
    is_example = unit == len(names) - 1
    leaves_null = step.neighboring_relation == "zero_out" and not is_example
    if leaves_null and len(names) != 2:
        raise NotImplementedError(
            "canaries for zero_out are examples, or units of data with two levels, got "
            f"{step.privacy_unit!r} of {tuple(names)}"
        )
    # Each unit of this level has at most one canary: the clip unit or, where that is
    # lower in the tree, the canary's parent.
    host = unit - is_example
    if step.clip_unit in names:  # else it is formed in the draw
        host = min(host, names.index(str(step.clip_unit)))
    host = max(host, 0)
    hosts = np.unique(data.places(host + 1))
    if number > len(hosts):
        raise ValueError(
            f"num_canaries must be at most {len(hosts)}, the number of units of level "
            f"{names[host]!r}, each of which has room for one, got {number}"
        )
    hosts = generator.choice(hosts, number, replace=False)
    places = data.places(host + 1)
    firsts = [generator.choice(np.flatnonzero(places == h)) for h in hosts]
    if is_example and step.neighboring_relation == "add_remove":
        data, added = _with_copies(data, np.asarray(firsts))
        groups = [np.asarray([row]) for row in added]
    else:
        units = data.places(unit + 1)
        groups = [np.flatnonzero(units == units[first]) for first in firsts]
    rows = np.concatenate(groups)
    owner = np.repeat(np.arange(number), [len(group) for group in groups])
    others, places = [], data.places(host + 1)
    for group in groups:
        around = np.flatnonzero(places == places[group[0]])
        if number == 1 and not _is_independent(step):  # one more displaces another
            around = np.arange(data.num_examples)
        others.append(np.setdiff1d(around, group))
    return Canaries(data, rows, owner, None, number, leaves_null), others


def _people(
    data: ExampleTable, unit: str, number: int, generator: np.random.Generator
) -> tuple[Canaries, list[np.ndarray]]:
    """Those who are in most classes; whoever is drawn else contributes its own."""
    codes = data.owned(unit)
    if codes is None:
        raise ValueError(f"data must have owners for canaries of unit {unit!r}")
    owners, examples = np.unique(codes.codes, return_counts=True)
    if number > len(owners):
        raise ValueError(
            f"num_canaries must be at most {len(owners)}, the number of {unit} units, "
            f"got {number}"
        )
    pairs = np.unique([codes.codes, data.class_places], axis=1)
    classes = np.bincount(pairs[0])[owners]
    order = np.lexsort((generator.random(len(owners)), -examples, -classes))[:number]
    groups = [np.flatnonzero(codes.codes == p) for p in owners[order]]
    owner = np.repeat(np.arange(number), [len(group) for group in groups])
    nobody = [np.zeros(0, np.int64)] * number
    return Canaries(data, np.concatenate(groups), owner, None, number), nobody


def _is_independent(step: GaussianStep) -> bool:
    """True if each clip unit is drawn by itself: by Poisson, or into its own step."""
    if isinstance(step.design, GroupedClasses):
        return isinstance(step.design.episodes, Poisson | RandomAllocation)
    if not isinstance(step.design, MultistageSampling):
        return False
    names = step.design.level_names
    if step.clip_unit not in names:
        return False
    scheme = step.design.levels[names.index(str(step.clip_unit))]
    return isinstance(scheme, Poisson | RandomAllocation)


def _with_copies(
    data: ExampleTable, rows: np.ndarray
) -> tuple[ExampleTable, np.ndarray]:
    """The table with a copy of each of these rows behind it, and the copies' rows."""
    times = np.ones(data.num_examples, np.int64)
    times[rows] += 1
    table = data.take(np.repeat(np.arange(data.num_examples), times))
    return table, np.cumsum(times)[rows] - 1


# Entries of the parameters.
MODEL = "model"
CANARIES = "canaries"
# Weight of an episode without the canary, against one with it in the same clip unit,
# which it must not outweigh.
_OPPOSITE = 0.01
# Gradient norm in clip norms: far above 1, so that clipping must do its part.
_STEEPNESS = 1e4


@dataclass(frozen=True)
class CanaryLearner:
    """Wraps a learner; gradient canaries in its episodes replace its gradient."""

    learner: Any  # what is wrapped
    # Of an example, before marks were put behind its features.
    feature_shape: tuple[int, ...]
    feature_dtype: str  # name of its type
    num_canaries: int  # how many there are
    l2_clip_norm: float  # C of the run

    @property
    def is_regression(self) -> bool:
        """As the wrapped learner."""
        return self.learner.is_regression

    @property
    def couples_examples(self) -> bool:
        """As the wrapped learner."""
        return getattr(self.learner, "couples_examples", True)

    @property
    def ways(self) -> int | None:
        """As the wrapped learner, if it says so."""
        return getattr(self.learner, "ways", None)

    def params(self, params: Any) -> dict[str, Any]:
        """Returns the parameters with those of the canaries."""
        dtype = training_dtype(params)
        return {MODEL: params, CANARIES: jnp.zeros(self.num_canaries, dtype)}

    def loss(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's loss, or where there are canaries a steep plane."""
        episode, marks = self._without_marks(episode)
        direction = self._direction(marks)
        has_canary = jnp.any(direction != 0)
        own = self.learner.loss(params[MODEL], episode)
        slope = _STEEPNESS * self.l2_clip_norm * direction
        steep = jax.lax.stop_gradient(own) + jnp.dot(slope, params[CANARIES])
        return jnp.where(has_canary, steep, own)

    def predict(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's predictions."""
        return self.learner.predict(params[MODEL], self._without_marks(episode)[0])

    def _without_marks(self, episode: Episode) -> tuple[Episode, Array]:
        """The episode as it would be, and the marks of all that is in it."""

        def plain(inputs: Array) -> Array:
            size = math.prod(self.feature_shape)
            flat = inputs.reshape(-1, size + 1)[:, :-1]
            shaped = flat.reshape(-1, *self.feature_shape)
            return as_trained(shaped.astype(self.feature_dtype), inputs.dtype)

        parts = (
            (episode.support_inputs, episode.support_mask),
            (episode.query_inputs, episode.query_mask),
        )
        marks = [jnp.where(mask > 0, inputs[..., -1], 0.0) for inputs, mask in parts]
        bare = episode._replace(
            support_inputs=plain(episode.support_inputs),
            query_inputs=plain(episode.query_inputs),
        )
        return bare, jnp.concatenate([jnp.ravel(mark) for mark in marks])

    def _direction(self, marks: Array) -> Array:
        """(num_canaries,) 1 for a canary that is there, else -0.01 for its others."""
        which = jnp.round(jnp.abs(marks)).astype(jnp.int32)
        none = jnp.zeros(self.num_canaries + 1, marks.dtype)
        there = none.at[jnp.where(marks > 0, which, 0)].set(1.0)[1:]
        others = none.at[jnp.where(marks < 0, which, 0)].set(1.0)[1:]
        return jnp.where(there > 0, 1.0, -_OPPOSITE * others)


class Recorded(NamedTuple):
    """State of an optimizer that `recording` wraps."""

    inner: Any  # the optimizer's own state
    canaries: Array  # (num_canaries,) what the last released gradient says about them


def recording(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns the optimizer, keeping the canaries' part of the last noised gradient."""

    def init(params: Any) -> Recorded:
        return Recorded(optimizer.init(params), jnp.zeros_like(params[CANARIES]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Recorded]:
        changes, inner = optimizer.update(updates, state.inner, params)
        return changes, Recorded(inner, updates[CANARIES])

    return optax.GradientTransformation(init, update)
