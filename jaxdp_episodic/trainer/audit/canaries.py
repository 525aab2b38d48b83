"""Canaries: units that the auditor makes up, each in the data or not, at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import OWNED, Poisson, RandomAllocation
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import Episode


class Canaries(NamedTuple):
    """A table with all canaries, and what replaces those that are out."""

    # with all canaries: added examples, or larger units of the data
    table: ExampleTable
    rows: np.ndarray  # (n,) the canaries' rows in the table
    owner: np.ndarray  # (n,) the canary, from 0, that each of these rows belongs to
    # (n, ...) features that replace rows that are out, under replace_one. None: the
    # rows are left out; a larger unit stays on the public list, empty.
    substitutes: np.ndarray | None
    number: int  # number of canaries
    leaves_null: bool = False  # a larger unit that is out leaves the list too

    def data(self, is_in: np.ndarray) -> ExampleTable:
        """Returns the table with the canaries that are in, (number,) bool."""
        out = ~np.asarray(is_in, bool)[self.owner]
        if self.substitutes is not None:
            features = self.table.features.copy()
            features[self.rows[out]] = self.substitutes[out]
            return self.table.with_features(features)
        kept = np.ones(self.table.num_examples, bool)
        kept[self.rows[out]] = False
        table = self.table.take(np.flatnonzero(kept))
        if self.leaves_null:
            return table.of_classes(table.population.children_counts[-1] > 0)
        return table

    @property
    def extremes(self) -> tuple[ExampleTable, ExampleTable]:
        """The data with all canaries and with none."""
        everyone = np.ones(self.number, bool)
        return self.data(everyone), self.data(~everyone)


def gradient_canaries(
    data: ExampleTable, step: GaussianStep, number: int, generator: np.random.Generator
) -> Canaries:
    """Returns canaries for `CanaryLearner`, marked behind the features."""
    # The mark is k + 1 in the rows of canary k, and -(k + 1) in the other rows of its
    # clip unit, which contribute the opposite: the theorem's worst case.
    chosen, marks = _chosen(data, step, number, generator)
    table = chosen.table
    flat = np.asarray(table.features[:], np.float32).reshape(table.num_examples, -1)
    marked = np.concatenate([flat, marks[:, None]], axis=1)
    substitutes = None
    if step.neighboring_relation == "replace_one":
        substitutes = marked[chosen.rows]
        substitutes[:, -1] *= -1
    return chosen._replace(table=table.with_features(marked), substitutes=substitutes)


def input_canaries(
    data: ExampleTable, step: GaussianStep, number: int, generator: np.random.Generator
) -> Canaries:
    """Returns canaries with unusual content, which the model's loss may reveal."""
    # Entries of each row are shuffled; targets are reflected at the mean and tripled.
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
    data: ExampleTable, step: GaussianStep, number: int, generator: np.random.Generator
) -> tuple[Canaries, np.ndarray]:
    """Units in different clip units, chosen at random; and the marks of all rows."""
    _validation.whole_number("num_canaries", number)
    names, unit = list(data.level_names), str(step.privacy_unit)
    places, is_null = None, False
    if step.privacy_unit in OWNED:  # other people contribute their own
        groups = _people(data, unit, number, generator)
    else:
        _validation.choice("privacy_unit", step.privacy_unit, names)
        is_example = unit == names[-1]
        is_null = step.neighboring_relation == "zero_out" and not is_example
        if is_null and len(names) != 2:
            raise NotImplementedError(
                "canaries for zero_out are examples, or units of data with two levels, "
                f"got {step.privacy_unit!r} of {tuple(names)}"
            )
        # Each unit of this level has at most one canary: the clip unit or, if that is
        # lower in the tree, the canary's parent.
        host = names.index(unit) - is_example
        if step.clip_unit in names:  # else the draw forms it
            host = min(host, names.index(str(step.clip_unit)))
        host = max(host, 0)
        places = data.places(host + 1)
        hosts = np.unique(places)
        _refuse_more(
            number,
            len(hosts),
            f"units of level {names[host]!r}, each of which can hold one",
        )
        hosts = generator.choice(hosts, number, replace=False)
        firsts = [generator.choice(np.flatnonzero(places == h)) for h in hosts]
        if is_example and step.neighboring_relation == "add_remove":
            # The canaries are copies of examples, each behind its original.
            times = np.bincount(firsts, minlength=data.num_examples) + 1
            data = data.take(np.repeat(np.arange(data.num_examples), times))
            groups = [np.array([row]) for row in np.cumsum(times)[firsts] - 1]
            places = data.places(host + 1)
        else:
            units = data.places(names.index(unit) + 1)
            groups = [np.flatnonzero(units == units[first]) for first in firsts]
    # Is each clip unit drawn independently, or into a step of its own?
    schemes = [one for one in step.design.schemes if one.name == step.clip_unit]
    is_independent = any(isinstance(one, Poisson | RandomAllocation) for one in schemes)
    marks = np.zeros(data.num_examples, np.float32)
    for canary, group in enumerate(groups, start=1):
        if places is not None:
            is_around = places == places[group[0]]
            # the canary displaces another unit
            if number == 1 and not is_independent:
                is_around[:] = True
            marks[is_around] = -canary
        marks[group] = canary
    rows = np.concatenate(groups)
    owner = np.repeat(np.arange(number), [len(group) for group in groups])
    return Canaries(data, rows, owner, None, number, is_null), marks


def _people(
    data: ExampleTable, unit: str, number: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """The rows of the people with the most classes."""
    codes = data.owned(unit)
    if codes is None:
        raise ValueError(f"data must have owners for canaries of unit {unit!r}")
    owners, examples = np.unique(codes.codes, return_counts=True)
    _refuse_more(number, len(owners), f"{unit} units")
    pairs = np.unique([codes.codes, data.class_places], axis=1)
    classes = np.bincount(pairs[0])[owners]
    order = np.lexsort((generator.random(len(owners)), -examples, -classes))[:number]
    return [np.flatnonzero(codes.codes == p) for p in owners[order]]


def _refuse_more(number: int, most: int, units: str) -> None:
    if number > most:
        raise ValueError(
            f"num_canaries must be at most {most}, the number of {units}, got {number}"
        )


# Keys of the parameters.
MODEL = "model"
CANARIES = "canaries"
# Weight of an episode without the canary relative to one with it in the same clip unit,
# which it must not cancel.
_OPPOSITE = 0.01
# Gradient norm in clip norms: far above 1, so that a missing clipping is found.
_STEEPNESS = 1e4


@dataclass(frozen=True)
class CanaryLearner:
    """Wraps a learner; in episodes with gradient canaries these set the gradient."""

    learner: Any  # the wrapped learner
    # Of an example without its mark.
    feature_shape: tuple[int, ...]
    feature_dtype: str  # of its features
    num_canaries: int  # number of canaries
    l2_clip_norm: float  # C of the run

    is_regression = property(lambda self: self.learner.is_regression)
    couples_examples = property(
        lambda self: getattr(self.learner, "couples_examples", True)
    )
    ways = property(lambda self: getattr(self.learner, "ways", None))

    def params(self, params: Any) -> dict[str, Any]:
        """Returns the parameters, with those of the canaries."""
        dtype = training_dtype(params)
        return {MODEL: params, CANARIES: jnp.zeros(self.num_canaries, dtype)}

    def loss(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's loss; in episodes with canaries a steep plane."""
        episode, marks = self._without_marks(episode)
        which = jnp.round(jnp.abs(marks)).astype(jnp.int32)
        none = jnp.zeros(self.num_canaries + 1, marks.dtype)
        there = none.at[jnp.where(marks > 0, which, 0)].set(1.0)[1:]
        others = none.at[jnp.where(marks < 0, which, 0)].set(1.0)[1:]
        # (num_canaries,) 1 for a canary in the episode, -0.01 if its others are.
        direction = jnp.where(there > 0, 1.0, -_OPPOSITE * others)
        has_canary = jnp.any(direction != 0)
        own = self.learner.loss(params[MODEL], episode)
        slope = _STEEPNESS * self.l2_clip_norm * direction
        steep = jax.lax.stop_gradient(own) + jnp.dot(slope, params[CANARIES])
        return jnp.where(has_canary, steep, own)

    def predict(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's predictions."""
        return self.learner.predict(params[MODEL], self._without_marks(episode)[0])

    def _without_marks(self, episode: Episode) -> tuple[Episode, Array]:
        """The episode without marks, and the marks of its examples."""
        parts, marks = {}, []
        for kind in ("support", "query"):
            inputs = getattr(episode, f"{kind}_inputs")
            there = getattr(episode, f"{kind}_mask") > 0
            marks.append(jnp.ravel(jnp.where(there, inputs[..., -1], 0.0)))
            flat = inputs.reshape(-1, math.prod(self.feature_shape) + 1)[:, :-1]
            plain = flat.reshape(-1, *self.feature_shape).astype(self.feature_dtype)
            parts[f"{kind}_inputs"] = as_trained(plain, inputs.dtype)
        return episode._replace(**parts), jnp.concatenate(marks)
