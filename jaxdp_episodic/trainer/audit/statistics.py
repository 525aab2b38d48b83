"""Audits of the private statistics that a run begins with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.audit.release import (
    DELTAS,
    ReleaseAudit,
    audit_release,
    claimed_epsilons,
)
from jaxdp_episodic.trainer.audit.training import Training
from jaxdp_episodic.trainer.config.training_parts import MIXED
from jaxdp_episodic.trainer.config.training_start import StartConfig, contribution_norm
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys

# Of the made-up table, which is small because a unit's effect on a sum does not depend
# on the others.
_CLASSES = 4
_FEATURES = 8
_STEP = 1e-3  # between the examples of a class, of norm about 1
_CANARY = (-0.5, 0.75**0.5)  # first two features: 120 degrees from its class
# Of each sum without noise: pairs are random, and their mean is what counts.
_EVALUATIONS = 64


def audit_statistics(
    training: Training,
    *,
    num_draws: int = 2_000,
    deltas: tuple[float, ...] = DELTAS,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Audits all private statistics of a run together, by one canary, many times.

    The run's releases, with its noise, of a made-up table of a few classes, each as
    large as the data's largest: a unit's effect on a sum does not depend on the others.
    The canary changes every sum about as much as any unit can; the attacker adds up the
    likelihood ratios. Each release is made in the space that the first one sees.

    Args:
      training: a run with ``start``.
      num_draws: of all releases with the canary, and as many without; at least 100.
      deltas: at which the claim is tested; all bounds hold together.
      confidence: of the bounds.
      seed: of the table. Pairs and noise are never seeded.
      on_draws: see `audit_release`.

    Raises:
      ValueError: a run without private statistics, or a number out of range.
    """
    if training.start is None:
        raise ValueError("training must begin with private statistics, got none")
    steps, config = training.budget.before, training.start(training.data).config
    without_and_with = [
        training.start(_table(training, config, is_in, seed)) for is_in in (False, True)
    ]
    noises = [float(step.noise_multiplier) for step in steps]
    pairs = np.random.default_rng()

    def sums(is_in: bool, scale: float) -> list[np.ndarray]:
        own = without_and_with[is_in]
        state, fresh = own.initial(), Keys(None)
        return [
            own.noised_sum(state, index, pairs, fresh.new("noise", index), scale * one)
            for index, one in enumerate(noises)
        ]

    means = []
    for is_in in (False, True):
        evaluated = zip(*(sums(is_in, 0.0) for _ in range(_EVALUATIONS)), strict=True)
        means.append([np.mean(of_release, axis=0) for of_release in evaluated])
    directions = [inside - out for out, inside in zip(*means, strict=True)]
    variances = [
        (noise * contribution_norm(step)) ** 2
        for noise, step in zip(noises, steps, strict=True)
    ]

    def score(released: list[np.ndarray]) -> float:
        parts = zip(released, directions, variances, strict=True)
        return float(sum(np.sum(total * way) / v for total, way, v in parts))

    return audit_release(
        lambda _, with_unit: sums(with_unit, 1.0),
        claimed=claimed_epsilons(training.budget.run(len(steps)), deltas=deltas),
        deltas=deltas,
        num_draws=num_draws,
        score=score,
        confidence=confidence,
        seed=seed,
        on_draws=on_draws,
    )


def _table(
    training: Training, own: StartConfig, is_in: bool, seed: int
) -> ExampleTable:
    """A few classes; the canary is the last example, or the last class."""
    # Examples of a class are nearly equal, so all random pairs have nearly one sum; the
    # canary's own content is far from them, what replaces it is not.
    step, data = training.budget.step, training.data
    is_class = step.privacy_unit == data.level_names[-2]
    relation = step.neighboring_relation
    size = max(int(np.max(data.population.children_counts[-1])), 2)
    if relation == "add_remove" and not is_class:
        size = max(size - 1 + size % 2, 3)  # odd: in its pair it then displaces another
    sizes, canary = np.full(_CLASSES, size), slice(-size if is_class else -1, None)
    number = max(own.slopes, 1) if own.kind == MIXED else _FEATURES
    centers = np.random.default_rng(seed).normal(size=(_CLASSES, number))
    features = centers.repeat(size, axis=0)
    targets = np.full(len(features), own.target_bound, np.float32)
    if own.kind == MIXED:
        features[-size:] = 0.0
        targets[canary] *= -1 if is_in else 1
    else:
        features[-size:] = np.eye(number)[0]
        along = _STEP * np.arange(size)
        features[:-size, 2] += np.tile(along, _CLASSES - 1)
        features[-size:, 2 if is_in or not is_class else 3] += along
        if is_in:
            features[canary, :2] = _CANARY
    if not is_in and relation != "replace_one":
        gone = size if is_class else 1
        sizes[-1] -= gone
        features, targets = features[:-gone], targets[:-gone]
    tree = Population((np.array([_CLASSES]), sizes), tuple(data.level_names[-2:]))
    return ExampleTable(
        features.astype(np.float32), targets, tree, has_public_units=True
    )
