"""Accounts execution plans, strategies and parameters of ``jax_privacy``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    PERSON,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import PersonBounds
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.interop.dp_accounting import (
    RELATIONS,
    EpisodicAccountant,
)
from jaxdp_episodic.accountant.interop.dp_event import (
    from_dp_event,
    gaussian,
    joint,
    refuse_unknown,
)
from jaxdp_episodic.files.optional import check_version, require

_events = require(
    "dp_accounting.dp_event", purpose="an execution plan", extra="jax-privacy"
)
_DISTRIBUTION = "jax-privacy"
# Versions whose ``DpParams`` are covered; later versions have none.
_PARAMS_VERSIONS = ("2.0",)
# Versions whose strategies and plans are covered; 2.1 was not released.
_VERSIONS = ("2.0", "2.2", "2.3")
# Fields that are covered: of parameters, of plans, of strategies.
_PARAMS_FIELDS = (
    "noise_multipliers num_samples delta batch_size batch_size_scale_schedule "
    "is_finite_guarantee batch_sizes examples_per_user cycle_length sampling_method "
    "truncated_batch_size"
)
_PLAN_FIELDS = (
    "clipped_grad batch_selection_strategy noise_addition_transform dp_event "
    "neighboring_relation"
)
_STRATEGIES = {
    "BallsInBinsSampling": "iterations cycle_length",
    "CyclicPoissonSampling": (
        "sampling_prob iterations truncated_batch_size cycle_length partition_type"
    ),
    "FixedBatchSampling": "batch_size iterations replace",
    "RandomAllocationSampling": "total_participations iterations cycle_length",
}
# The strategy that applies another strategy to users.
_USERS = "UserSelectionStrategy"
_USER_FIELDS = "base_strategy examples_per_user_per_batch shuffle_per_user"
# The levels of examples, and of users that are drawn, clipped and protected.
_LEVEL = "example"
_USER_LEVEL = "user"

# As proposed to dp_accounting, for versions that do not have it.
_PROPOSED = dataclasses.make_dataclass(
    "RandomAllocationDpEvent", ("event", "num_selected", "num_steps"), frozen=True
)
_PROPOSED.__module__ = __name__  # so that it can be pickled
RandomAllocationDpEvent: Any = getattr(_events, "RandomAllocationDpEvent", _PROPOSED)


def from_dp_params(
    dp_params: Any, *, num_updates: int, neighboring_relation: str = "add_remove"
) -> ComposedSteps:
    """Returns the run that ``DpParams`` describe; each sampled example is clipped.

    With ``examples_per_user`` the run protects a person who owns at most that many
    examples (`PersonBounds`); otherwise it protects an example.

    Args:
      dp_params: of ``jax_privacy.accounting``.
      num_updates: whole number >= 0, the number of steps.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
      NotImplementedError: cycles or truncated batches (see `training_config`), an
        unknown field or an unknown version.
    """
    check_version(_DISTRIBUTION, _PARAMS_VERSIONS)
    if not hasattr(dp_params, "noise_multipliers"):
        shown = _validation.shown(dp_params)
        raise TypeError(f"dp_params must be DpParams of jax_privacy, got {shown}")
    refuse_unknown(dp_params, _PARAMS_FIELDS)
    updates = _validation.whole_number("num_updates", num_updates, minimum=0)
    _validation.choice(
        "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
    )
    if dp_params.cycle_length not in (None, 1) or dp_params.truncated_batch_size:
        raise NotImplementedError(
            "DpParams with a cycle_length or a truncated_batch_size are covered by "
            "DpsgdTrainingAccountant(training_config()), without examples_per_user"
        )
    method = _validation.choice(
        "sampling_method",
        dp_params.sampling_method.name,
        ("POISSON", "FIXED_BATCH_SIZE"),
    )
    whom: dict[str, Any] = {"neighboring_relation": neighboring_relation}
    if dp_params.examples_per_user is not None:
        bounds = PersonBounds(examples=dp_params.examples_per_user)
        whom |= {"privacy_unit": PERSON, "people": bounds}
    noises, batches = (
        _schedule(name, getattr(dp_params, name))
        for name in ("noise_multipliers", "batch_sizes")
    )
    # Values that start after the last update are used in no step.
    starts = sorted({min(start, updates) for start in (*noises, *batches)})
    number, parts = dp_params.num_samples, []
    for start, end in itertools.pairwise([*starts, updates]):
        noise, batch = (
            each[max(n for n in each if n <= start)] for each in (noises, batches)
        )
        if method == "POISSON":
            scheme = Poisson(_LEVEL, sampling_probability=batch / number)
        else:
            scheme = WithoutReplacement(_LEVEL, size=batch, population=number)
        noise = noise if dp_params.is_finite_guarantee else 0.0
        step = GaussianStep(scheme, noise_multiplier=noise, **whom)
        parts.append((step, end - start))
    return compose(*parts)


def _schedule(name: str, value: Any) -> dict[int, float]:
    """Returns values by their first steps; a single number holds from step 0 on."""
    pairs = value if isinstance(value, list | tuple) else [(0, value)]
    check = _validation.nonnegative_array
    found = {int(n): _validation.one(name, one, check) for n, one in pairs}
    if not found or min(found) != 0:
        raise ValueError(f"{name} must begin at step 0, got {_validation.shown(value)}")
    return found


def from_execution_plan(
    plan: Any,
    *,
    neighboring_relation: str | None = None,
    noise_multiplier: Any = None,
    num_bands: Any = 1,
    num_examples: Any = None,
) -> ComposedSteps:
    """Returns the run of an execution plan of ``jax_privacy``.

    The plan's ``batch_selection_strategy``, the object that samples, is accounted. The
    plan's ``dp_event`` gives the noise, and must describe the same sampling. See
    docs/jax_privacy.md for the strategies, and what of each is covered. In a
    ``UserSelectionStrategy`` each user is clipped and protected with all of its
    examples, and the level of the run is "user": docs/proofs.md, "A unit's contribution
    may depend on its own samples".

    Args:
      plan: a ``BandMFConfig`` or ``BandMFExecutionPlanConfig``, a ``DPExecutionPlan``,
        or only a batch selection strategy, which needs ``noise_multiplier``.
      neighboring_relation: "add_remove", "replace_one" or "zero_out"; None: the
        relation of the plan, if it states one.
      noise_multiplier: only with a strategy: standard deviation of the noise over the
        clip norm of an example, times the largest column norm of the strategy matrix if
        noise is correlated.
      num_bands: only with a strategy: of the strategy matrix; 1 for independent noise.
      num_examples: only with a strategy: size of the data set, if it is public.

    Returns:
      A composed run, which every question accepts.

    Raises:
      TypeError: another kind of object.
      ValueError: an argument that is missing, given twice or out of range, or a
        ``dp_event`` of another sampling than the strategy's.
      NotImplementedError: a strategy, or a relation for it, that no theorem covers; an
        unknown field or version.
    """
    check_version(_DISTRIBUTION, _VERSIONS)
    if hasattr(plan, "batch_iterator"):
        relation, strategy = neighboring_relation, plan
        if relation is None or noise_multiplier is None:
            raise ValueError(
                "neighboring_relation and noise_multiplier must be given with a "
                f"strategy alone, got {relation!r} and {noise_multiplier!r}"
            )
        check, size = _validation.nonnegative_array, num_examples
        noise = _validation.one("noise_multiplier", noise_multiplier, check)
        bands = _validation.whole_number("num_bands", num_bands)
        if size is not None:
            size = _validation.whole_number("num_examples", size, minimum=0)
        event = _event(_base_strategy(plan), noise, relation, size, bands)
    else:
        alone = {"noise_multiplier": noise_multiplier, "num_examples": num_examples}
        for name, value in alone.items():
            if value is not None:
                raise ValueError(
                    f"{name} must be None with a plan, which has it, got {value!r}"
                )
        relation, strategy, event = _of_plan(plan, neighboring_relation)
    run = from_dp_event(event, neighboring_relation=relation)
    if type(strategy).__name__ != _USERS:
        return run
    steps = []
    for step in run.gaussian_steps:  # users draw nothing else
        (scheme,) = step.design.schemes
        of_users = dataclasses.replace(scheme, name=_USER_LEVEL)
        steps.append(gaussian(of_users, step.noise_multiplier, relation))
    return ComposedSteps(tuple(steps), run.counts)


def _of_plan(plan: Any, relation: str | None) -> tuple[str, Any, Any]:
    """Returns relation, strategy and event of a plan, or of a config that makes one."""
    made_for, norms = None, 1.0
    if hasattr(plan, "make"):
        plan = plan.make()
    elif hasattr(plan, "plan"):  # version 2.0
        made_for = RELATIONS[plan.accountant.neighboring_relation]
        # A config's noise is relative to the sensitivity, an event's to the clip norm.
        norms = 2.0 if made_for == "replace_one" else 1.0
        plan = plan.plan
    try:
        strategy, event = plan.batch_selection_strategy, plan.dp_event
    except AttributeError:
        raise TypeError(
            "plan must be an execution plan, a config of one or a batch selection "
            f"strategy, got {_validation.shown(plan)}"
        ) from None
    refuse_unknown(plan, _PLAN_FIELDS)
    if hasattr(plan, "neighboring_relation"):
        made_for = RELATIONS[plan.neighboring_relation]
    if relation is None and made_for is None:
        raise ValueError(
            "neighboring_relation must be given with a plan that does not state it, "
            "got None"
        )
    relation = str(made_for if relation is None else relation)
    if isinstance(event, _events.NonPrivateDpEvent):
        return relation, strategy, event
    drawn, inner = _base_strategy(strategy), getattr(event, "event", event)
    size = getattr(inner, "source_dataset_size", None)
    if isinstance(inner, _events.TruncatedSubsampledGaussianDpEvent):
        # The event is for one of the equal groups; the remainder is never drawn.
        size = inner.dataset_size * drawn.cycle_length
    noise = getattr(getattr(inner, "event", inner), "noise_multiplier", None)
    if noise is None:
        raise NotImplementedError(
            "an execution plan is covered with Gaussian noise and one kind of step, "
            f"got {event!r}"
        )
    described = _event(drawn, noise, relation, size)
    if described != event:
        raise ValueError(
            "dp_event must describe what batch_selection_strategy samples, "
            f"{described!r}, got {event!r}"
        )
    return relation, strategy, _event(drawn, norms * noise, relation, size)


def _base_strategy(strategy: Any) -> Any:
    """Returns the strategy that draws; for users, the one applied to them."""
    if type(strategy).__name__ != _USERS:
        return strategy
    refuse_unknown(strategy, _USER_FIELDS)
    base = strategy.base_strategy
    cut = getattr(base, "truncated_batch_size", None) is not None
    # Then the draws of different users are not independent.
    if cut or type(base).__name__ == "FixedBatchSampling":
        how = " with truncated_batch_size" if cut else ""
        raise NotImplementedError(
            f"{_USERS} of {type(base).__name__}{how} is not covered: a user's examples,"
            " taken in cycles, reveal how often the user, and so others, were sampled "
            "before; covered: strategies that sample each user independently"
        )
    return base


def _event(
    strategy: Any, noise: float, relation: str, size: int | None, num_bands: int = 1
) -> Any:
    """Returns the event of all iterations of a strategy."""
    name = type(strategy).__name__
    if name not in _STRATEGIES:
        raise NotImplementedError(
            f"{name} is not covered; covered: {', '.join(_STRATEGIES)}, and {_USERS} of"
            " those that sample users independently"
        )
    refuse_unknown(strategy, _STRATEGIES[name])
    if name == "CyclicPoissonSampling":
        return _cyclic_poisson(strategy, noise, relation, size, num_bands)
    if num_bands > 1:
        raise NotImplementedError(
            f"{name} with num_bands={num_bands} is not covered: the rounds of one "
            "record may overlap"
        )
    if name == "FixedBatchSampling":
        how = "With" if strategy.replace else "Without"
        sampled = getattr(_events, f"Sampled{how}ReplacementDpEvent")
        event = _events.GaussianDpEvent(noise)
        step = sampled(_required(name, size), strategy.batch_size, event)
        return _events.SelfComposedDpEvent(step, strategy.iterations)
    if name == "BallsInBinsSampling":
        selected, steps = 1, strategy.cycle_length
        cycles = math.ceil(strategy.iterations / steps)
    else:
        selected, steps, cycles = _participations(strategy)
    if cycles == 0 or steps == 0:
        return _events.NoOpDpEvent()
    if cycles > 1 and relation == "replace_one":
        raise NotImplementedError(
            "the same secret steps in every cycle are covered under replace_one for "
            f"one cycle alone, got {cycles} cycles of cycle_length={steps}"
        )
    event = _events.GaussianDpEvent(joint([(noise, cycles)]))
    return RandomAllocationDpEvent(event, selected, steps)


def _cyclic_poisson(
    strategy: Any, noise: float, relation: str, size: int | None, num_bands: int
) -> Any:
    """Returns the event of Poisson sampling from groups that take turns."""
    cycle, most = strategy.cycle_length, strategy.truncated_batch_size
    if num_bands > cycle:
        raise NotImplementedError(
            f"CyclicPoissonSampling with num_bands={num_bands} is not covered: they "
            f"must be at most cycle_length={cycle}, or one record's rounds overlap"
        )
    partition = _validation.choice(
        "partition_type", strategy.partition_type.name, ("EQUAL_SPLIT", "INDEPENDENT")
    )
    splits = cycle > 1 and partition == "EQUAL_SPLIT"
    if splits and relation == "add_remove":
        raise NotImplementedError(
            "CyclicPoissonSampling of an EQUAL_SPLIT is not covered under add_remove: "
            "one record more moves others to other groups; INDEPENDENT is"
        )
    if most is not None and cycle > 1 and not splits:
        raise NotImplementedError(
            "CyclicPoissonSampling with truncated_batch_size and INDEPENDENT groups is "
            "not covered: their sizes are random; EQUAL_SPLIT is"
        )
    rate = strategy.sampling_prob
    if most is None:
        step = _events.PoissonSampledDpEvent(rate, _events.GaussianDpEvent(noise))
    else:
        group = _required("truncated_batch_size", size) // cycle
        step = _events.TruncatedSubsampledGaussianDpEvent(group, rate, most, noise)
    return _events.SelfComposedDpEvent(step, math.ceil(strategy.iterations / cycle))


def _participations(strategy: Any) -> tuple[int, int, int]:
    """Returns a record's steps in a cycle, the steps of a cycle, and the cycles."""
    selected, steps = strategy.total_participations, strategy.iterations
    cycle = getattr(strategy, "cycle_length", None)
    if cycle is None or not steps:
        return selected, steps, 1
    length = _validation.whole_number("cycle_length", cycle)
    cycles, rest = divmod(steps, length)
    each, uneven = divmod(selected, max(cycles, 1))
    if rest or uneven:
        raise NotImplementedError(
            "RandomAllocationSampling with a cycle_length is covered if iterations are "
            "whole cycles and total_participations a multiple of their number, got "
            f"{steps!r}, {selected!r} and cycle_length={cycle!r}"
        )
    return each, length, cycles


def _required(what: str, size: int | None) -> int:
    if size is None:
        raise ValueError(f"num_examples must be given with {what}, got None")
    return size


def training_config(
    neighboring_relation: str = "add_remove", method: str = "exact"
) -> Any:
    """Returns a ``DpAccountantConfig`` for the training accountants of version 2.0.

    For example ``DpsgdTrainingAccountant(training_config())``. It is a
    ``PldAccountantConfig``, as jax_privacy requires for truncated batches; the options
    of that class are not used.

    Raises:
      ImportError: ``jax_privacy`` is not installed.
      NotImplementedError: an unknown version, or one without training accountants.
    """
    check_version(_DISTRIBUTION, _VERSIONS)
    theirs = require(
        "jax_privacy.accounting", purpose="training_config", extra="jax-privacy"
    )
    if not hasattr(theirs, "PldAccountantConfig"):
        raise NotImplementedError(
            "this version of jax_privacy has no training accountants; pass "
            "accountant_fn=EpisodicAccountant to its calibration"
        )

    class EpisodicAccountantConfig(theirs.PldAccountantConfig):
        def create_accountant(self) -> Any:
            return EpisodicAccountant(neighboring_relation, method)

    config = EpisodicAccountantConfig()
    config.create_accountant()  # refuses wrong arguments here
    return config
