"""The training parameters of ``jax_privacy`` 2.0, with many examples of one user."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.interop.event_tree import refuse_unknown
from jaxdp_episodic.files.optional import check_version

# Versions whose parameters were read here; later ones have none.
_VERSIONS = ("2.0",)
_DISTRIBUTION = "jax-privacy"
_FIELDS = (
    "noise_multipliers num_samples delta batch_size batch_size_scale_schedule "
    "is_finite_guarantee batch_sizes examples_per_user cycle_length sampling_method "
    "truncated_batch_size"
)
_LEVEL = "example"
_METHODS = ("POISSON", "FIXED_BATCH_SIZE")


def from_dp_params(
    dp_params: Any, *, num_updates: int, neighboring_relation: str = "add_remove"
) -> ComposedSteps:
    """Returns the run that ``DpParams`` describe: examples drawn, each clipped.

    With ``examples_per_user`` the run protects a person who owns so many examples at
    most (`PersonBounds`), as ``DpsgdTrainingUserLevelAccountant`` does, else an
    example. What that accountant assumes must be true: nobody owns more.

    * ``POISSON``: nobody reacts to whether a user's examples are drawn, so its mixture
      of Gaussians is exact under add_remove and zero_out (docs/theory.md, "People",
      Theorem M).
    * ``FIXED_BATCH_SIZE``: other examples take the place of those that are not drawn.

    Args:
      dp_params: of ``jax_privacy.accounting``.
      num_updates: whole number >= 0, steps of the run.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
      NotImplementedError: cycles or truncated batches (`training_config` is for
        these), a field or a version that is not known here.
    """
    check_version(_DISTRIBUTION, _VERSIONS)
    if not hasattr(dp_params, "noise_multipliers"):
        shown = _validation.shown(dp_params)
        raise TypeError(f"dp_params must be DpParams of jax_privacy, got {shown}")
    refuse_unknown(dp_params, _FIELDS)
    updates = _validation.whole_number("num_updates", num_updates, minimum=0)
    _validation.choice(
        "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
    )
    if dp_params.cycle_length not in (None, 1) or dp_params.truncated_batch_size:
        raise NotImplementedError(
            "DpParams with a cycle_length or a truncated_batch_size are covered by "
            "DpsgdTrainingAccountant(training_config()), without examples_per_user"
        )
    noises = _schedule("noise_multipliers", dp_params.noise_multipliers)
    batches = _schedule("batch_sizes", dp_params.batch_sizes)
    # What begins after the last update happens 0 times.
    starts = sorted({min(start, updates) for start, _ in (*noises, *batches)})
    parts = []
    for start, end in zip(starts, [*starts[1:], updates], strict=True):
        noise = _at(noises, start) if dp_params.is_finite_guarantee else 0.0
        step = _step(dp_params, noise, _at(batches, start), neighboring_relation)
        parts.append((step, end - start))
    return compose(*parts)


def _step(dp_params: Any, noise: float, batch: float, relation: str) -> GaussianStep:
    """One step: how examples are drawn, and whose are protected."""
    method = _validation.choice(
        "sampling_method", dp_params.sampling_method.name, _METHODS
    )
    number = dp_params.num_samples
    scheme: Any
    if method == "POISSON":
        scheme = Poisson(_LEVEL, sampling_probability=batch / number)
    else:
        scheme = WithoutReplacement(_LEVEL, size=batch, population=number)
    people = {}
    if dp_params.examples_per_user is not None:
        bounds = PersonBounds(examples=dp_params.examples_per_user)
        people = {"privacy_unit": PERSON, "people": bounds}
    return GaussianStep(
        scheme, noise_multiplier=noise, neighboring_relation=relation, **people
    )


def _schedule(name: str, value: Any) -> list[tuple[int, float]]:
    """When each value begins: of one number at the first step."""
    pairs = value if isinstance(value, list | tuple) else [(0, value)]
    found = sorted(
        (int(start), float(np.asarray(_validation.nonnegative_array(name, number))))
        for start, number in pairs
    )
    if not found or found[0][0] != 0:
        raise ValueError(f"{name} must begin at step 0, got {_validation.shown(value)}")
    return found


def _at(schedule: list[tuple[int, float]], step: int) -> float:
    return next(value for start, value in reversed(schedule) if start <= step)
