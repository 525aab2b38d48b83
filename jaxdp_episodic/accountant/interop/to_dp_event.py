"""Runs as events of ``dp_accounting``, where there is an event."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes
from jaxdp_episodic.accountant.describe.disjoint import refuse_disjoint
from jaxdp_episodic.accountant.describe.schemes import (
    OWNED,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import AnyStep, ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.interop.event_tree import RELEASED_AS
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.people import PeopleLoss
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from jaxdp_episodic.files.optional import require

dp_event = require(
    "dp_accounting.dp_event", purpose="to_dp_event", extra="dp-accounting"
)


def to_dp_event(step: AnyStep) -> Any:
    """Returns the ``dp_accounting`` event of a step or a run.

    Events do not say what neighbours are: an accountant that is given one needs the
    run's relation. `from_dp_event` reads it back as the same run, but for names of
    levels; of a `ZeroConcentratedDP` that is Gaussian the divergences alone are left,
    of a mixture of Gaussians the mixture.

    Args:
      step: a step, a release or a run, of one setting each. A `GaussianStep` must draw,
        clip and protect the units of one level, examples or whole tasks; or protect a
        person, or a unit above what is clipped, whose number of contributions nobody
        reacts to: their pair is a ``MixtureOfGaussiansDpEvent``. Where others take a
        person's place, as in episodes, that event would be too small.

    Raises:
      TypeError: not a step.
      ValueError: a step of many settings.
      NotImplementedError: a step, a release or a sampling that no event describes, or
        none of the installed version.
    """
    if not isinstance(step, AnyStep):
        raise TypeError(f"step must be a GaussianStep or a composed run, got {step!r}")
    if step.shape:
        raise ValueError(f"step must be one setting, got an array of {step.shape}")
    refuse_disjoint(step, "to_dp_event")
    is_run = isinstance(step, ComposedSteps)
    parts = zip(step.steps, step.counts, strict=True) if is_run else [(step, 1)]
    events = []
    for part, count in parts:
        event = _event(part)
        repeats, rest = divmod(int(count), getattr(event, "num_steps", 1))
        if rest:
            raise NotImplementedError(
                f"{type(event).__name__} is an epoch of {event.num_steps} steps, got "
                f"{count} steps of it"
            )
        if repeats == 1:
            events.append(event)
        elif repeats:
            events.append(dp_event.SelfComposedDpEvent(event, repeats))
    if not events:
        return dp_event.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)


def _event(step: Any) -> Any:
    """The event of one step."""
    if isinstance(step, GaussianStep):
        return _gaussian(step)
    for name, (cls, fields) in RELEASED_AS.items():
        if isinstance(step, cls) and hasattr(dp_event, name):
            given = {theirs: getattr(step, ours) for theirs, ours in fields.items()}
            lists = {k: v.tolist() for k, v in given.items() if np.ndim(v)}
            event = getattr(dp_event, name)(**given | lists)
            if "sampling_probability" in fields:
                return event
            return _sampled(getattr(step, "sampling_probability", 1), event)
    raise NotImplementedError(
        f"{type(step).__name__} has no event in the installed dp_accounting"
    )


def _gaussian(step: GaussianStep) -> Any:
    """A Gaussian release about a draw of the units that are clipped and protected."""
    event = dp_event.GaussianDpEvent(step.noise_multiplier)
    design: Any = step.design
    each = design.sampling if isinstance(design, IndependentEpisodes) else design
    # A person may be in many places, so that no draw of units is theirs alone.
    in_tree = isinstance(each, MultistageSampling) and step.privacy_unit not in OWNED
    if step.population is None and in_tree:
        top: Any = each.levels[0]
        kind = type(top)
        if each is not design:
            is_one = len(each.levels) == 1 and kind is WithoutReplacement
            if is_one and top.size == 1:
                return dp_event.SampledWithReplacementDpEvent(
                    top.population, design.num_episodes, event
                )
        elif step.clip_unit == step.privacy_unit == top.name:
            if kind is Poisson:
                return _sampled(top.sampling_probability, event)
            if kind is WithoutReplacement:
                if top.size <= top.population and not top.population_is_exact:
                    return dp_event.SampledWithoutReplacementDpEvent(
                        top.population, top.size, event
                    )
                if top.population_is_exact and top.size >= top.population:
                    return event
            # With more times their event draws a subset of all steps, ours one step
            # of each block.
            if kind is RandomAllocation and top.times == 1:
                if hasattr(dp_event, "RandomAllocationDpEvent"):
                    return dp_event.RandomAllocationDpEvent(
                        event, 1, int(top.steps_per_epoch)
                    )
    mixture = _mixture(step)
    if mixture is not None:
        return mixture
    raise NotImplementedError(
        f"{design!r} with clip_unit={step.clip_unit!r} and "
        f"privacy_unit={step.privacy_unit!r} has no event in dp_accounting; covered: "
        "one level that is drawn, clipped and protected, by sizes that the specs say, "
        "and people, or units, whose contributions are Poisson sampled and clipped one "
        "by one, under add_remove or zero_out"
    )


def _mixture(step: GaussianStep) -> Any:
    """A pair that is a mixture of Gaussians as an event; None of others."""
    pairs = dominating_pairs(step)
    if len(pairs) != 1 or math.prod(pairs[0].shape) != 1:
        return None
    pair: Any = pairs[0].map(np.ravel)
    if isinstance(pair, GaussianMixtureLoss):
        shares = np.exp(np.concatenate(pair.log_weights))
        numbers = np.concatenate(pair.shifts) * step.noise_multiplier
        is_whole = bool(pair.outer_rate == 1) and np.all(np.isfinite(numbers))
        numbers = np.append(0.0, np.rint(numbers))
        chances = np.append(1 - pair.rate, pair.rate * shares)
    elif type(pair) is PeopleLoss:
        weights = np.concatenate(pair.log_weights)
        count = np.concatenate(pair.counts)[np.argmax(weights)]
        is_one = np.sum(weights > -np.inf) == 1
        is_whole = is_one and bool((pair.outer_rate == 1) & (pair.cover_rate == 1))
        numbers = np.arange(count + 1)
        rate = pair.inner_rate * np.concatenate(pair.shares)[np.argmax(weights)]
        chances = np.exp(log_binomial_mass(numbers, count, rate))
    else:
        return None
    if not is_whole:
        return None
    return dp_event.MixtureOfGaussiansDpEvent(
        step.noise_multiplier, numbers.tolist(), chances.tolist()
    )


def _sampled(probability: Any, event: Any) -> Any:
    if np.equal(probability, 1):
        return event
    return dp_event.PoissonSampledDpEvent(float(probability), event)
