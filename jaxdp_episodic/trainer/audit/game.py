"""The audit game: a mechanism is run with a protected unit and without, and compared.

It uses no theorem of the accountant, so it finds wrong theorems, rates and samplers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EPISODE,
    ORIGINAL,
    OWNED,
    GroupedClasses,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import (
    STEP,
    AnyStep,
    ComposedSteps,
    GaussianStep,
    gaussian_parts,
    parts_of,
)
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.trainer.audit.bounds import (
    CHOOSING_SHARE,
    ReleaseAudit,
    check_confidence,
    score_bounds,
)
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.run.checks import check_owners, sampler_of

Contribute = Callable[[Draw], np.ndarray]
"""Returns the (J,) contributions of a draw's clip units, in clip norms."""

Release = Callable[[jax.Array, bool], Any]
"""``release(key, with_unit)`` returns a release, a pytree of arrays."""

Score = Callable[[Any], Any]
"""Returns one number for a release, large if the unit seems to be in the data."""

# Deltas at which claims are tested: with few calls a large delta shows more.
DELTAS = (1e-5, 1e-3, 1e-2, 1e-1)
# Most different sums in a likelihood ratio; more change it little.
_MOST_SUMS = 512
# Contributions that are tried for clip units without the protected unit.
_OTHERS = (-1.0, 0.0)
# Most examples of a made-up table: each draw visits all of its groups.
_MOST_EXAMPLES = 1_000_000
# Releases whose likelihood ratios are computed in one call: 40 MB.
_ROWS_AT_ONCE = 10_000
# Children of a unit if the design states no number of them.
_FEW = 2


def claimed_epsilons(
    step: AnyStep, num_steps: int | None = None, deltas: Sequence[float] = DELTAS
) -> np.ndarray:
    """Returns the exact epsilons of a run at these deltas (*upper bounds*)."""
    return np.asarray(epsilon(step, num_steps=num_steps, delta=list(deltas)))


DrawScores = Callable[[int, Score | None], Sequence[Any]]
"""Returns so many scores with the unit and without; releases if the score is None."""


def _play(
    draws: Sequence[DrawScores],
    fit: Callable[[Any, Any], Score],
    claimed: Any,
    deltas: Any,
    num_draws: int,
    confidence: float,
) -> ReleaseAudit:
    """Fits scores to first releases, chooses the best of ``draws``, and counts more."""
    levels = np.atleast_1d(_validation.open_unit_array("deltas", list(deltas)))
    claims = np.atleast_1d(_validation.nonnegative_array("claimed", list(claimed)))
    if claims.shape != levels.shape or claims.ndim != 1:
        raise ValueError(
            f"claimed must have one epsilon a delta, got shapes {claims.shape} and "
            f"{levels.shape}"
        )
    check_confidence(confidence)
    number = _validation.whole_number("num_draws", num_draws, minimum=100)
    choosing, found = int(CHOOSING_SHARE * number), []
    for draw in draws:
        there, gone = draw(choosing, None)
        score = fit(there, gone)
        choice = score(there), score(gone)
        shown = score_bounds(choice, choice, levels, confidence)
        found.append((sum(one.epsilon for one in shown), draw, score, choice))
    _, draw, score, choice = max(found, key=lambda game: game[0])
    counted = draw(number - choosing, score)
    return ReleaseAudit(claims, score_bounds(choice, counted, levels, confidence))


def audit_release(
    release: Release,
    *,
    claimed: Sequence[float] | np.ndarray,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    score: Score | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    is_jax: bool = False,
    draws_at_once: int = 4096,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Calls a mechanism many times with and without a unit; bounds epsilon from below.

    It uses no knowledge of the mechanism, so it finds errors of code: too little noise,
    no clipping, a unit sampled too often. Several deltas are tested; their bounds hold
    together. The first calls choose the events and, if none is given, the score (the
    direction in which the means differ); the other calls are counted.

    Args:
      release: ``release(key, with_unit)``. Calls must be independent given their keys;
        one with its own randomness, such as a trainer, may ignore the key.
      claimed: (k,) claimed epsilon at each delta; see `claimed_epsilons`.
      deltas: (k,) each in (0, 1).
      num_draws: calls with the unit, and as many without, at least 100.
      score: returns a number for a release, large if the unit seems to be in the data;
        it must not depend on the calls. Best is the likelihood ratio of the claimed
        mechanism.
      confidence: of all bounds together, in [0.5, 1).
      seed: of the keys.
      is_jax: whether release and score are JAX functions; they are then vectorized over
        keys and compiled.
      draws_at_once: how many of these are vectorized.
      on_draws: called now and then with the number of new calls, out of twice
        ``num_draws``.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range, or a score that is NaN.
    """
    numpy: Any = jnp if is_jax else np
    fresh = iter(jax.random.split(jax.random.key(seed), 4))

    def one_call(key: jax.Array, is_in: bool) -> Any:
        released = release(key, is_in)
        if score is not None:
            return score(released)
        return numpy.concatenate([numpy.ravel(a) for a in jax.tree.leaves(released)])

    call = one_call
    if is_jax:
        call = jax.jit(jax.vmap(one_call, in_axes=(0, None)), static_argnums=1)

    def called(number: int, is_in: bool, scored: Score | None) -> np.ndarray:
        key, size = next(fresh), min(draws_at_once, number) if is_jax else 1
        keys = jax.random.split(key, -(-number // size) * size)
        # Split by NumPy: JAX would compile for seconds to index an array of keys.
        data, found = np.asarray(jax.random.key_data(keys)), []
        for rows in data.reshape(-1, size, data.shape[-1]):
            some: Any = rows if is_jax else rows[0]
            some = jax.random.wrap_key_data(some, impl=jax.random.key_impl(key))
            made = np.asarray(call(some, is_in), np.float64).reshape(size, -1)
            found.append(made if scored is None else scored(made))
            if on_draws is not None:
                on_draws(size)
        return np.concatenate(found)[:number]

    def draw(number: int, scored: Score | None) -> list[np.ndarray]:
        return [called(number, is_in, scored) for is_in in (True, False)]

    def fit(there: np.ndarray, gone: np.ndarray) -> Score:
        direction = np.ones(1)
        if score is None:
            direction = there.mean(axis=0) - gone.mean(axis=0)
        return lambda rows: rows @ direction

    return _play([draw], fit, claimed, deltas, num_draws, confidence)


class World(NamedTuple):
    """One of two neighbouring data sets, as its sampler and its contributions.

    Attributes:
      sampler: samples from its data.
      contribute: returns what each sampled clip unit adds to the sum.
    """

    sampler: EpisodeSampler
    contribute: Contribute

    def runs(
        self, number: int, num_steps: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns the (number, num_steps) sums of independent runs, in clip norms."""
        sums = np.zeros((number, num_steps))
        for run in sums:
            draws = itertools.islice(self.sampler.draws(generator), num_steps)
            for place, draw in enumerate(draws):
                found = np.asarray(self.contribute(draw), np.float64)
                if np.any(np.abs(found) > 1):
                    raise ValueError("contributions must be at most 1 clip norm")
                if draw.holds_null is not None:
                    found = np.where(draw.holds_null, 0.0, found)
                run[place] = found.sum()
        return sums


Part = tuple[tuple[World, World], float, int]
"""Equal steps of a run: both worlds, noise multiplier > 0, and number of steps."""


def audit_mechanism(
    step: AnyStep,
    *,
    num_steps: int | None = None,
    data: ExampleTable | None = None,
    unit: int = 0,
    others: float | None = None,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Simulates a described run with and without a unit; bounds epsilon from below.

    A clip unit that holds the protected unit contributes +1 clip norm. Without the unit
    it holds the unit's replacement and contributes -1 (``replace_one``), or is null
    (``zero_out``), or is sampled from data without the unit (``add_remove``). Other
    clip units contribute ``others``: if that is negative, a unit that was sampled
    instead of the protected one shows that.

    Args:
      step: one setting, all fields scalars, with noise; or a composed run.
      num_steps: of the run, at most a few; None for a composed run.
      data: the data to sample from. None: a generated table, as small as possible.
      unit: place of the protected unit in its level; of a person, in the list of
        people. With a `Population` choose a unit in the smallest groups.
      others: in [-1, 1]; for clip units of a public list only those that could hold the
        unit contribute. None: -1 or 0, whichever the first runs favour.
      deltas: at which the claim is tested; all bounds hold together.
      num_draws: runs with the unit, and as many without, at least 100.
      confidence: of all bounds together, in [0.5, 1).
      seed: of the sampling and of the noise.
      on_draws: called now and then with the number of new runs, out of `total_draws`.

    Returns:
      The claim and the bounds, *lower bounds* of epsilon.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range, arrays in the step, no noise, or data that do
        not fit.
      NotImplementedError: a step for which no table can be generated: give ``data``.
    """
    steps = _checked_parts(step, num_steps)
    claimed = claimed_epsilons(step, num_steps, deltas)
    if others is not None and not -1 <= others <= 1:
        raise ValueError(f"others must lie in [-1, 1], got {others!r}")
    drawn = [made_up(one) if data is None else (one, data) for one, _ in steps]
    games = [
        [
            (worlds_of(*one, unit, value), _noise(one[0]), count)
            for one, (_, count) in zip(drawn, steps, strict=True)
        ]
        for value in (_OTHERS if others is None else (others,))
    ]
    return _simulate(games, seed, on_draws, claimed, deltas, num_draws, confidence)


def total_draws(num_draws: int) -> int:
    """Returns how many runs `audit_mechanism` draws, with the unit and without."""
    return 2 * (num_draws + int(CHOOSING_SHARE * num_draws) * (len(_OTHERS) - 1))


def audit_worlds(
    with_unit: World,
    without: World,
    *,
    noise_multiplier: float,
    claimed: Sequence[float] | np.ndarray,
    num_steps: int = 1,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Simulates two neighbouring data sets with any contributions; bounds epsilon.

    The first runs choose the events and the score, the likelihood ratio of the mixtures
    of Gaussians around their sums; the other runs are counted. Arguments and errors are
    those of `audit_mechanism`.
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be > 0, got {noise_multiplier!r}")
    count = _validation.whole_number("num_steps", num_steps)
    games = [[((with_unit, without), noise_multiplier, count)]]
    return _simulate(games, seed, on_draws, claimed, deltas, num_draws, confidence)


def _simulate(
    games: Sequence[Sequence[Part]],
    seed: int,
    on_draws: Callable[[int], None] | None,
    *how: Any,
) -> ReleaseAudit:
    """Plays games whose releases are each part's sums, without noise and with it."""
    generator = np.random.default_rng(seed)

    def draw(parts: Sequence[Part], number: int, score: Score | None) -> list[Any]:
        sides: list[Any] = [[], []]
        for place, side in enumerate(sides):
            for worlds, noise, count in parts:
                sums = worlds[place].runs(number, count, generator) / noise
                side.append((sums, sums + generator.normal(size=sums.shape)))
        if on_draws is not None:
            on_draws(2 * number)
        return sides if score is None else list(map(score, sides))

    def fit(there: Any, gone: Any) -> Score:
        is_epoch = [w.sampler.steps_per_epoch is not None for (w, _), *_ in games[0]]
        ratios = [
            likelihood_ratio(a, b, is_joint=joint)
            for (a, _), (b, _), joint in zip(there, gone, is_epoch, strict=True)
        ]
        return lambda side: sum(
            ratio(noised) for ratio, (_, noised) in zip(ratios, side, strict=True)
        )

    return _play([functools.partial(draw, parts) for parts in games], fit, *how)


def worlds_of(
    step: GaussianStep, data: ExampleTable, unit: int, others: float
) -> tuple[World, World]:
    """Returns the data with a unit, and without it; see `audit_mechanism`."""
    check_owners(step, data)
    if step.privacy_unit in OWNED:
        owners = data.owned(step.privacy_unit)
        assert owners is not None  # `check_owners`
        rows = owners.codes == unit
    else:
        names = list(data.level_names)
        _validation.choice("privacy_unit", step.privacy_unit, names)
        rows = data.places(names.index(str(step.privacy_unit)) + 1) == unit
    if not np.any(rows):
        raise ValueError(
            f"unit must be a {step.privacy_unit} with an example in the data, "
            f"got {unit!r}"
        )

    reacting = _rows_that_react(step, data, rows)

    def contribute(own: np.ndarray, value: float, others_of: np.ndarray) -> Contribute:
        def contributions(draw: Draw) -> np.ndarray:
            inner = tuple(range(1, draw.mask.ndim))
            holds, reacts = (
                (one[draw.examples] & draw.mask).any(axis=inner)
                for one in (own, others_of)
            )
            return np.where(holds, value, np.where(reacts, others, 0.0))

        return contributions

    there = World(sampler_of(step, data), contribute(rows, 1.0, reacting))
    if step.neighboring_relation == "replace_one":
        return there, World(there.sampler, contribute(rows, -1.0, reacting))
    # The accounted sizes are those with the unit.
    if _leaves_the_list(step, data):
        kept = np.ones(len(data.population.children_counts[-1]), bool)
        kept[data.class_places[rows]] = False
        left = data.of_classes(kept)
    else:
        left = data.take(np.flatnonzero(~rows))
    gone = contribute(np.zeros(left.num_examples, bool), 0.0, reacting[~rows])
    return there, World(sampler_of(step, left, is_smaller=True), gone)


def _leaves_the_list(step: GaussianStep, data: ExampleTable) -> bool:
    """Whether a unit that is out leaves the tree; if not, it stays and is empty."""
    names = list(data.level_names)
    if step.privacy_unit in OWNED or step.privacy_unit == names[-1]:
        return False  # examples have no places that could stay
    is_class = step.privacy_unit == names[-2]
    if step.neighboring_relation == "zero_out" and not is_class:
        raise NotImplementedError(
            "an audit under zero_out is for examples, people or the units that hold "
            f"examples, got {step.privacy_unit!r} of {tuple(names)}"
        )
    is_tree = isinstance(step.design, MultistageSampling)
    return is_class and (is_tree or step.neighboring_relation == "zero_out")


def _rows_that_react(
    step: GaussianStep, data: ExampleTable, own: np.ndarray
) -> np.ndarray:
    """Returns the rows, (R,) bool, whose clip units contribute without the unit."""
    # Units that are drawn independently would only add noise. If one replaces another
    # in the draw, the units below the same parent show whether it was drawn.
    design = step.design
    if not isinstance(design, MultistageSampling) or step.clip_unit == STEP:
        return np.ones(len(own), bool)
    level = design.level_names.index(str(step.clip_unit))
    if not isinstance(design.levels[level], WithoutReplacement | ShuffledEpochs):
        level += 1
    places = data.places(level) if level else np.zeros(len(own))
    return np.isin(places, places[own])


def made_up(step: GaussianStep) -> tuple[GaussianStep, ExampleTable]:
    """Returns the step on a made-up table without features, and that table."""
    design: Any = step.design
    if step.population is not None:
        return step, _bare(step.population)
    if isinstance(design, PeopleBlocks):
        raise NotImplementedError("data must be given for an audit of PeopleBlocks")
    schemes = [one for one in design.schemes if one.name != EPISODE]
    sizes = [_number(scheme) for scheme in schemes]
    names = tuple(scheme.name for scheme in schemes)
    if isinstance(design, GroupedClasses):
        names = CLASS, names[-1]
        sizes = [int(np.asarray(design.num_classes)), sizes[-1]]
    rows = math.prod(sizes)
    if rows > _MOST_EXAMPLES:
        raise NotImplementedError(
            f"data must be given for an audit of {rows:,} examples, more than "
            f"{_MOST_EXAMPLES:,}"
        )
    if step.neighboring_relation == "zero_out":  # the number of slots changes no rate
        for scheme, size in zip(schemes, sizes[-len(schemes) :], strict=True):
            if isinstance(scheme, Poisson) and scheme.population is None:
                stated = dataclasses.replace(scheme, population=size)
                design = design.with_scheme(stated)
        step = dataclasses.replace(step, sampling=design)
    counts = (np.full(math.prod(sizes[:i]), n) for i, n in enumerate(sizes))
    table = _bare(Population(tuple(counts), names))
    if step.privacy_unit not in OWNED:
        return step, table
    kind = "originals" if step.privacy_unit == ORIGINAL else "owners"
    owners: dict[str, Any] = {kind: _one_owner(step, sizes)}
    return step, dataclasses.replace(table, **owners)


def _bare(tree: Population) -> ExampleTable:
    rows = tree.num_units(tree.num_levels)
    return ExampleTable(np.zeros((rows, 1), np.float32), None, tree)


def _number(scheme: Any) -> int:
    """Number of children of a unit, by what a scheme states."""
    stated = scheme.population
    if stated is None and isinstance(scheme, WithoutReplacement):
        stated = scheme.size
    if stated is None and isinstance(scheme, ShuffledEpochs):
        stated = _FEW * np.asarray(scheme.steps_per_epoch)
    # If units are drawn independently, the number of others does not matter.
    return _FEW if stated is None else int(np.asarray(stated))


def _one_owner(step: GaussianStep, sizes: list[int]) -> Owners:
    """Owners of the examples: person 0 has as many as allowed, all others one each."""
    numbers = {} if step.people is None else step.people.numbers
    limits = [numbers.get(name, 1) for name in ("tasks", "classes", "examples")]
    places = np.indices(sizes).reshape(len(sizes), -1)
    own = np.all(places < np.array(limits[-len(sizes) :], int)[:, None], axis=0)
    codes = np.where(own, 0, np.cumsum(~own))
    return Owners(codes, np.arange(codes.max() + 1))


def _checked_parts(step: Any, num_steps: int | None) -> list[tuple[GaussianStep, int]]:
    """The different steps of a run of one setting, and their counts."""
    steps = gaussian_parts(step, "an audit")
    if step.shape:
        raise ValueError(
            f"step must be one setting, its fields scalars, got shape {step.shape}"
        )
    for one in steps:
        if not 0 < _noise(one) < math.inf:
            raise ValueError(
                "noise_multiplier must be > 0 and finite for an audit (without noise "
                f"every claim is infinite), got {_noise(one):g}"
            )
    least = 0 if isinstance(step, ComposedSteps) else 1
    if least == 0 and num_steps is not None:
        raise ValueError(
            f"num_steps must be None for a composed run, got {num_steps!r}"
        )
    _, given = parts_of(step, num_steps)
    counts = [_validation.whole_number("num_steps", n, minimum=least) for n in given]
    if not any(counts):
        raise ValueError("the run must have at least one step to audit, got none")
    return [(one, n) for one, n in zip(steps, counts, strict=True) if n]


def _noise(step: GaussianStep) -> float:
    return float(np.asarray(step.noise_multiplier))


def likelihood_ratio(
    with_unit: np.ndarray, without: np.ndarray, *, is_joint: bool
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the log-likelihood ratio of releases, from (n, t) sums of each side."""
    # Independent steps: their ratios add up. Steps of an epoch are dependent.
    mixtures = []
    for sums in (with_unit, without):
        rows = sums if is_joint else sums.reshape(-1, 1)
        means, counts = np.unique(rows, axis=0, return_counts=True)
        most = np.argsort(-counts, kind="stable")[:_MOST_SUMS]
        logs = np.log(counts[most] / counts[most].sum())
        mixtures.append((means[most], logs - 0.5 * (means[most] ** 2).sum(axis=1)))

    def log_density(rows: np.ndarray, mixture: Any) -> np.ndarray:
        return np.asarray(logsumexp(rows @ mixture[0].T + mixture[1], axis=1))

    def ratio(released: np.ndarray) -> np.ndarray:
        blocks = released.reshape(-1, mixtures[0][0].shape[1])
        starts = range(_ROWS_AT_ONCE, len(blocks), _ROWS_AT_ONCE)
        found = [
            log_density(rows, mixtures[0]) - log_density(rows, mixtures[1])
            for rows in np.split(blocks, starts)
        ]
        return np.concatenate(found).reshape(len(released), -1).sum(axis=1)

    return ratio
