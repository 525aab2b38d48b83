"""Audits of real training runs, with canaries in their data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    OWNED,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
    block_lengths,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.audit import game
from jaxdp_episodic.trainer.audit.bounds import (
    CHOOSING_SHARE,
    Guesses,
    best_guesses,
    check_confidence,
    score_bounds,
)
from jaxdp_episodic.trainer.audit.canaries import (
    CANARIES,
    Canaries,
    CanaryLearner,
    gradient_canaries,
    input_canaries,
)
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import (
    DISCRETE,
    MIXED,
    ClippingConfig,
    StartConfig,
    contribution_norm,
)
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import (
    Block,
    contribution_loss,
    make_blocks,
)
from jaxdp_episodic.trainer.run.assemble import (
    OwnParts,
    Tables,
    run_parts,
    statistics_of,
)
from jaxdp_episodic.trainer.run.checks import sampler_of
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

GRADIENT = "gradient"
INPUT = "input"
KINDS = (GRADIENT, INPUT)

OnStep = Callable[[int, int], None]
"""``on_step(steps so far, steps in all)``, called after every step."""

# Draws in which each canary's loss is measured (rare ones: in fewer), and draws in all.
_DRAWS_EACH = 8
_MOST_DRAWS = 500
# Clip units whose losses are computed in one call.
_UNITS_AT_ONCE = 64

# The made-up table of statistics is small: a unit's effect on a sum does not depend on
# other units.
_CLASSES = 4
_FEATURES = 8
_STEP = 1e-3  # between the examples of a class, which have norm about 1
_CANARY = (-0.5, 0.75**0.5)  # its first two features: 120 degrees from its class
# Evaluations of each sum without noise, to average over the random pairs.
_EVALUATIONS = 64


@dataclass(frozen=True, eq=False)
class Training:
    """A run as an auditor needs it: the arguments of `Trainer`, without canaries.

    Fields that are not listed are the arguments of `Trainer` of the same name.

    Attributes:
      data: without canaries.
      budget: the claim: its step, its delta and its number of steps.
      start: makes the private statistics of a table that the run begins with, the
        budget's ``before``; None: there are none.
      make_trainer: `Trainer`, or one with an error that an audit should find.
    """

    learner: Any
    params: Any
    data: ExampleTable
    budget: PrivacyBudget
    shots: int
    optimizer: optax.GradientTransformation
    l2_clip_norm: float
    normalizer: float | None = None
    block_size: int | None = None
    noise: str = DISCRETE
    clipping: ClippingConfig | None = None
    start: Callable[[ExampleTable], PrivateStatistics] | None = None
    make_trainer: Callable[..., Trainer] = Trainer

    def trainer(self, data: ExampleTable, *, num_steps: int) -> Trainer:
        """Returns the unseeded trainer on the canaries' table, with the same noise."""
        budget = dataclasses.replace(
            self.budget,
            step=on_data(self.budget.step, data),
            num_steps=num_steps,
            permitted_steps=num_steps,
        )
        start = None if self.start is None else self.start(data)
        parts = vars(self) | {"data": data, "budget": budget, "start": start}
        make = parts.pop("make_trainer")
        return make(parts.pop("learner"), parts.pop("params"), **parts)


def training_of_config(
    config: TrainingConfig, base: Path | None = None, *, privacy_unit: str | None = None
) -> Training:
    """Returns the calibrated run of a training config, for audits.

    Args:
      config: of the run.
      base: folder that paths in it are relative to.
      privacy_unit: another unit than the config's, claimed to be protected by the
        config's noise.

    Raises:
      NotImplementedError: another privacy unit, for a run that begins with private
        statistics.
      ValueError: a run that claims nothing.
    """
    data = Tables(config, base).load("train")
    parts = run_parts(config, data, own=OwnParts(base=base))
    budget, step = parts["budget"], parts["budget"].step
    if budget.before and privacy_unit not in (None, step.privacy_unit):
        raise NotImplementedError(
            "a run that begins with private statistics can only be audited for the "
            f"unit that it protects, {step.privacy_unit!r}, got {privacy_unit!r}"
        )
    if not budget.is_private:
        raise ValueError(
            "epsilon must be finite for an audit, got inf: the run claims nothing"
        )
    if privacy_unit is not None:
        step = dataclasses.replace(step, privacy_unit=privacy_unit, small_units=None)
        parts["budget"] = dataclasses.replace(budget, step=step)
    if parts["start"] is not None:
        parts["start"] = functools.partial(statistics_of, config, step)
    return Training(data=data, **parts)


class TrainingAudit(NamedTuple):
    """The claim about a run, and what its canaries show.

    Attributes:
      kind: "gradient": the attacker sees every noised gradient; "input": only the first
        and the last parameters.
      privacy_unit: of the canaries.
      num_steps: of the run.
      claimed_rdp: epsilon of the run by Rényi DP; *upper bound*.
      claimed_exact: by the method "exact"; *upper bound*.
      guesses: what the attacker guessed, and the *lower bound* that follows.
    """

    kind: str
    privacy_unit: str
    num_steps: int
    claimed_rdp: float
    claimed_exact: float
    guesses: Guesses

    @property
    def is_violated(self) -> bool:
        """Whether the run disproves a claim, with the audit's confidence."""
        return self.guesses.disproves(min(self.claimed_rdp, self.claimed_exact))


def audit_run(
    training: Training,
    *,
    kind: str = GRADIENT,
    num_canaries: int = 100,
    num_steps: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> TrainingAudit:
    """Trains once with canaries that are in or out at random, and guesses which are in.

    Canaries share episodes and the clip norm of their clip unit, so an audit of one run
    stays far below an exact claim.

    Args:
      training: the run.
      kind: "gradient": the canaries' contributions are replaced by far too long ones
        (white box); "input": canaries are unusual examples (black box).
      num_canaries: each in a clip unit of its own.
      num_steps: instead of the run's; the claim is then about this number.
      confidence: of the bound.
      seed: chooses the canaries, and which are in. The training itself is never seeded.
      on_step: called after every step.

    Raises:
      ValueError: more canaries than there are units for them, a number out of range, or
        gradient canaries in a run of statistics only.
    """
    _validation.choice("kind", kind, KINDS)
    check_confidence(confidence)  # before the training
    steps, first = training.budget.num_steps, len(training.budget.before)
    if num_steps is not None:
        steps = first + _validation.whole_number("num_steps", num_steps)
    if kind == GRADIENT and steps == first:
        raise ValueError(
            "kind must be 'input', or 'step', for a run of private statistics only, "
            f"which has no gradients, got {kind!r}"
        )
    generator = np.random.default_rng(seed)
    step = training.budget.step
    shown = gradient_steps(training) if kind == GRADIENT else training
    make = gradient_canaries if kind == GRADIENT else input_canaries
    canaries = make(shown.data, step, num_canaries, generator)
    is_in = generator.random(canaries.number) < 0.5
    data = canaries.data(is_in)
    if kind == GRADIENT:
        tell = _counter(on_step, first, steps)
        scores = released_scores(shown, canaries, data, steps - first, tell).sum(axis=0)
    else:
        tell = _counter(on_step, 0, steps)
        scores = loss_decreases(shown, canaries, data, steps, generator, tell)
    # The largest for any choice of canaries.
    tables = dict.fromkeys(on_data(step, t) for t in (data, *canaries.extremes))
    runs = [dataclasses.replace(training.budget, step=s).run(steps) for s in tables]
    delta = training.budget.delta
    by_rdp, exactly = (
        max(float(epsilon(run, method=method, delta=delta)) for run in runs)
        for method in ("rdp", "exact")
    )
    guesses = best_guesses(scores, is_in, delta=delta, confidence=confidence)
    return TrainingAudit(kind, str(step.privacy_unit), steps, by_rdp, exactly, guesses)


def audit_steps(
    training: Training,
    *,
    num_draws: int = 2_000,
    deltas: tuple[float, ...] = game.DELTAS,
    confidence: float = 0.95,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> game.ReleaseAudit:
    """Audits a single step of the trainer, by the steps of two runs with one canary.

    Every step has a new sample, and a gradient canary's contribution does not depend on
    the parameters. So the steps of a run on data with the canary, and of one without,
    are independent samples of the step's mechanism. This tests the whole of
    `Trainer.step`: sampler, blocks, clipping, noise, keys. For sampling in epochs a
    whole epoch is audited and claimed instead of a step.

    Args:
      training: the run.
      num_draws: steps (or epochs) of each of the two runs, at least 100.
      deltas: at which the claim is tested; all bounds hold together.
      confidence: of the bounds.
      seed: chooses the canary. The training itself is never seeded.
      on_step: called after every step.

    Raises:
      NotImplementedError: a step with bands: its steps are not independent.
    """
    draws = _validation.whole_number("num_draws", num_draws, minimum=100)
    check_confidence(confidence)
    if training.budget.step.bands is not None:
        raise NotImplementedError(
            "audit_steps does not cover bands: the noise of a step is part of that of "
            "later ones, so a run's steps are not independent; use audit_run"
        )
    scheme = epoch_scheme(training.budget.step.design)
    length = 1 if scheme is None else int(block_lengths(scheme).sum())
    steps = draws * length
    training = gradient_steps(training)
    generator = np.random.default_rng(seed)
    canaries = gradient_canaries(training.data, training.budget.step, 1, generator)
    tell, parts, claims = _counter(on_step, 0, 2 * steps), [], []
    for data in canaries.extremes:
        found = released_scores(training, canaries, data, steps, tell)
        scores = found[:, 0].reshape(draws, -1).sum(axis=1)
        parts.append(np.split(scores, [int(CHOOSING_SHARE * draws)]))
        step = on_data(training.budget.step, data)
        claims.append(epsilon(step, num_steps=length, delta=deltas))
    choice, counted = zip(*parts, strict=True)
    bounds = score_bounds(choice, counted, deltas, confidence)
    return game.ReleaseAudit(np.max(claims, axis=0), bounds)


def gradient_steps(training: Training) -> Training:
    """Returns a run without its private statistics, on made-up features."""
    # No canary's gradient depends on features.
    if training.start is None:
        return training
    table, budget = training.data, dataclasses.replace(training.budget, before=())
    features = np.eye(1, training.start(table).dimensions, dtype=np.float32)
    data = table.with_features(features.repeat(table.num_examples, axis=0))
    return dataclasses.replace(training, data=data, budget=budget, start=None)


def _counter(on_step: OnStep | None, taken: int, total: int) -> Callable[[], None]:
    """Returns what is called after each step; so many were taken before."""
    numbers = itertools.count(taken + 1)
    return lambda: on_step(next(numbers), total) if on_step is not None else None


def on_data(step: GaussianStep, data: ExampleTable) -> GaussianStep:
    """Returns the step with the sizes of these data, if it states sizes."""
    # Stated sizes of levels within a unit do not hold if the unit is out; privacy does
    # not rest on them.
    if step.population is not None:
        return dataclasses.replace(step, population=data.population)
    design, unit = step.design, str(step.privacy_unit)
    if isinstance(design, IndependentEpisodes) or step.privacy_unit in OWNED:
        return step
    within = design.level_names[design.level_names.index(unit) + 1 :]
    for scheme in design.schemes:
        if scheme.name in within and isinstance(scheme, WithoutReplacement):
            changed = dataclasses.replace(scheme, population=None)
            design = design.with_scheme(changed)
    return dataclasses.replace(step, sampling=design)


def released_scores(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    tell: Callable[[], None],
) -> np.ndarray:
    """Takes unseeded gradient steps; returns (steps, canaries) scores of releases."""
    features, longest = training.data.features, training.l2_clip_norm
    shape, kind = features.shape[1:], str(features.dtype)
    if training.clipping is not None:
        _, longest = training.clipping.bounds(longest)
    learner = CanaryLearner(training.learner, shape, kind, canaries.number, longest)
    marked = dataclasses.replace(
        training,
        learner=learner,
        params=learner.params(training.params),
        # Its first state is the last released gradient.
        optimizer=optax.chain(optax.trace(decay=0.0), training.optimizer),
    )
    trainer = marked.trainer(data, num_steps=num_steps)
    deviation, released = trainer.noise_deviation, list[np.ndarray]()
    for _ in range(num_steps):
        trainer.step()
        gradient = trainer.state.optimizer_state[0].trace[CANARIES]
        sums = np.asarray(gradient, np.float64) * trainer.normalizer
        released.append(sums / deviation)
        deviation = trainer.noise_deviation  # of the next step
        tell()
    # Log-likelihood ratios: the clip unit contributes +1 with the canary, else -1.
    step, scores = trainer.budget.step, np.stack(released)
    shift = 1 / float(np.asarray(step.noise_multiplier))
    drawn, inner = _rates(step)
    up, down = shift * scores, -shift * scores
    with np.errstate(divide="ignore"):  # a rate of 0 has the logarithm -inf
        logs = np.log([1 - drawn, drawn, drawn * (1 - inner), drawn * inner])
    missed = logs[0] + 0.5 * shift**2
    log_with = np.logaddexp(np.logaddexp(missed, logs[2] + down), logs[3] + up)
    return log_with - np.logaddexp(missed, logs[1] + down)


def _rates(step: GaussianStep) -> tuple[float, float]:
    """Sampling rates of a canary's clip unit, and of the canary in it; 1 if unknown."""
    scheme, design = epoch_scheme(step.design), step.design
    if step.privacy_unit in OWNED or isinstance(scheme, ShuffledEpochs):
        return 1.0, 1.0
    rates = [float(np.max(one)) for one in step.path_rates.rates]
    if isinstance(scheme, RandomAllocation):
        rates[0] = float(np.asarray(scheme.times) / np.asarray(scheme.steps_per_epoch))
    if isinstance(design, GroupedClasses):
        return rates[0], math.prod(rates[2:])
    if isinstance(design, MultistageSampling) and step.clip_unit in design.level_names:
        level = design.level_names.index(str(step.clip_unit)) + 1
        return math.prod(rates[:level]), math.prod(rates[level:])
    return 1.0, math.prod(rates)


def loss_decreases(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    generator: np.random.Generator,
    tell: Callable[[], None],
) -> np.ndarray:
    """Trains with input canaries; returns how far the loss of each has fallen."""
    trainer = training.trainer(data, num_steps=num_steps)
    for _ in range(num_steps):
        trainer.step()
        tell()
    learner, first = training.learner, training.params
    if training.start is not None:
        statistics = training.start(data)
        learner = statistics.learner(learner)
        first = {"start": statistics.initial().released(), "model": first}
    table, step = canaries.table, on_data(training.budget.step, canaries.table)
    sampler = sampler_of(step, table)
    loss = contribution_loss(learner, sampler.slot_shape, shots=training.shots)

    @jax.jit
    def losses(params: Any, block: Block) -> Any:
        typed = functools.partial(as_trained, dtype=training_dtype(params))
        return jax.lax.map(lambda unit: loss(params, typed(unit)), block)

    owner = np.full(table.num_examples, -1)
    owner[canaries.rows] = canaries.owner
    falls, counts = np.zeros(canaries.number), np.zeros(canaries.number)
    for draw in itertools.islice(sampler.draws(generator), _MOST_DRAWS):
        holds = np.where(draw.mask, owner[draw.examples], -1)
        shown = np.unique(np.nonzero(holds >= 0)[0])
        part = jax.tree.map(operator.itemgetter(shown), draw)
        blocks = list(make_blocks(part, table, block_size=_UNITS_AT_ONCE))
        before, after = (
            np.concatenate([np.asarray(losses(params, one)) for one in blocks])
            for params in (first, trainer.params)
        )
        for row, fall in zip(holds[shown], before - after, strict=False):
            found = np.unique(row[row >= 0])
            falls[found] += float(fall)
            counts[found] += 1
        if np.all(counts >= _DRAWS_EACH):
            break
    return falls / np.maximum(counts, 1)


def audit_statistics(
    training: Training,
    *,
    num_draws: int = 2_000,
    deltas: tuple[float, ...] = game.DELTAS,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> game.ReleaseAudit:
    """Audits all private statistics of a run together, with one canary, many times.

    They are released with the run's noise from a generated table of a few classes, each
    as large as the data's largest: a unit's effect on a sum does not depend on other
    units. The canary changes every sum about as much as any unit can; the attacker adds
    up the likelihood ratios. Each statistic is computed from the initial state.

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
    tables = (_table(training, config, is_in, seed) for is_in in (False, True))
    without_and_with = list(map(training.start, tables))
    noises = [float(step.noise_multiplier) for step in steps]
    pairs = np.random.default_rng()

    def sums(is_in: bool, scale: float) -> list[np.ndarray]:
        own = without_and_with[is_in]
        state, fresh = own.initial(), Keys(None)
        return [
            own.noised_sum(state, index, pairs, fresh.new("noise", index), scale * one)
            for index, one in enumerate(noises)
        ]

    # Differences of sums without noise, by release, over the random pairs.
    evaluated = [(sums(True, 0.0), sums(False, 0.0)) for _ in range(_EVALUATIONS)]
    each = zip(*(map(operator.sub, *both) for both in evaluated), strict=True)
    directions = [np.mean(differences, axis=0) for differences in each]
    norms = map(contribution_norm, steps)
    variances = [(a * b) ** 2 for a, b in zip(noises, norms, strict=True)]

    def score(released: list[np.ndarray]) -> float:
        parts = zip(released, directions, variances, strict=True)
        return float(sum(np.sum(total * way) / v for total, way, v in parts))

    return game.audit_release(
        lambda _, with_unit: sums(with_unit, 1.0),
        claimed=game.claimed_epsilons(training.budget.run(len(steps)), deltas=deltas),
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
    """A table of a few classes; the canary is the last example, or the last class."""
    # Examples of a class are nearly equal, so all random pairs have nearly the same
    # sum. The canary's content is far from them; its replacement's is not.
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
    people = np.arange(len(features)) % max((own.num_people or len(features)) - 1, 1)
    people[-1] = len(people)  # the canary is all that its owner has
    if not is_in and relation != "replace_one":
        gone = size if is_class else 1
        sizes[-1] -= gone
        features, targets = features[:-gone], targets[:-gone]
    tree = Population((np.array([_CLASSES]), sizes), tuple(data.level_names[-2:]))
    owners = Owners.from_ids(people[: len(features)])
    features = features.astype(np.float32)
    return ExampleTable(features, targets, tree, owners, True, owners)
