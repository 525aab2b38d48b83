"""Strategies of ``jax_privacy`` that draw users, and for each some of its examples."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxdp_episodic.accountant.describe.schemes import MultistageSampling
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.interop.event_tree import unknown_fields

USERS = "UserSelectionStrategy"
"""The class of a strategy that applies another one to users."""

LEVEL = "user"
"""The level of a run that draws, clips and protects users."""

_FIELDS = "base_strategy examples_per_user_per_batch shuffle_per_user"
# Strategies whose draw of one user depends on whether another one was drawn.
_FIXED_SIZE = ("FixedBatchSampling",)


def base_strategy(strategy: Any) -> Any:
    """Returns what draws: of users the strategy that is applied to them.

    Raises:
      NotImplementedError: users in batches whose size is fixed or cut, or a field that
        is not known.
    """
    if type(strategy).__name__ != USERS:
        return strategy
    refuse_unknown(strategy, _FIELDS)
    base = strategy.base_strategy
    cut = getattr(base, "truncated_batch_size", None) is not None
    if cut or type(base).__name__ in _FIXED_SIZE:
        how = " with truncated_batch_size" if cut else ""
        raise NotImplementedError(
            f"{USERS} of {type(base).__name__}{how} is not covered: examples come in "
            "cycles, so what a user gives shows when it was drawn before, and with it "
            "who took the other places; covered: strategies that draw each user "
            "independently"
        )
    return base


def drawn_by(strategy: Any, run: ComposedSteps) -> ComposedSteps:
    """Returns a run of records as one of what the strategy draws, by its name."""
    if type(strategy).__name__ != USERS:
        return run
    return compose(
        *(
            (_of_users(step), count)
            for step, count in zip(run.steps, run.counts, strict=True)
        )
    )


def _of_users(step: Any) -> GaussianStep:
    """A step that draws and clips users in place of examples."""
    design = step.design
    assert isinstance(design, MultistageSampling)  # all that base strategies become
    (scheme,) = design.levels
    return dataclasses.replace(
        step,
        sampling=dataclasses.replace(scheme, name=LEVEL),
        clip_unit=LEVEL,
        privacy_unit=LEVEL,
    )


def refuse_unknown(thing: Any, known: str) -> None:
    """Refuses another library's object with fields that were not read here, by name.

    Raises:
      NotImplementedError: one has such fields.
    """
    unknown = unknown_fields(thing, known)
    if unknown:
        raise NotImplementedError(
            f"{type(thing).__name__} is not covered with {unknown}; known fields: "
            f"{known.replace(' ', ', ')}"
        )
