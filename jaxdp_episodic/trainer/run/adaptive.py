"""Adaptive runs: their trainer, and the calibrated budget of a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxdp_episodic._validation import prefixed
from jaxdp_episodic.accountant.describe.menu import RuleBook
from jaxdp_episodic.accountant.describe.step import GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.accountant.questions.strategies import default_prices
from jaxdp_episodic.trainer.config.training_adaptive import CHECK, AdaptiveConfig, Rule
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import CLASSIFIER, statistics_steps
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.evaluation import PrivateValidation
from jaxdp_episodic.trainer.run.trainer import Trainer


class AdaptiveTrainer(Trainer):
    """A private run that chooses each next step from what it has released.

    The options and their budget are fixed before the first step. An option is a step
    that trains, or a noisy score of held-out data. The rule sees releases and public
    facts only, so the guarantee is that of the worst possible rule. Everything else is
    as in `Trainer`.

    Args:
      learner: as of `Trainer`.
      params: as of `Trainer`.
      data: the private training data.
      budget: the options, and how often each may be taken. Options that train may
        differ in noise and sampling; those of ``budget.first`` are the steps of
        ``start``.
      rule: called before each release with a `Released`; returns the name of an option,
        or None to end the run. The run also ends when the budget permits no further
        option.
      checks: the validation of each option of ``budget.checks``.
      **arguments: as of `Trainer`, the same for all options.

    Raises:
      TypeError, ValueError: as of `Trainer`; or an option is not the step of its check,
        or of its statistic.
    """

    def __init__(
        self,
        learner: Any,
        params: Any,
        *,
        data: ExampleTable,
        budget: AdaptiveBudget,
        rule: Rule,
        checks: Mapping[str, PrivateValidation] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        if not isinstance(budget, AdaptiveBudget):
            raise TypeError(f"budget must be an AdaptiveBudget, got {type(budget)}")
        more = {"rule": rule, "checks": checks, **arguments}
        super().__init__(learner, params, data=data, budget=budget, **more)


# Relative tolerance of the common noise multiplier, as in `calibration`.
_TOLERANCE = 1e-7


def adaptive_plan(
    config: TrainingConfig, data: ExampleTable, held_out: ExampleTable | None
) -> tuple[AdaptiveBudget, dict[str, PrivateValidation]]:
    """Returns the calibrated budget of a config, and its checks on ``held_out``."""
    adaptive = config.adaptive
    assert adaptive is not None
    step, statistics = config.step_on(data.population), shared_statistics(config, data)
    stated, check, apart = adaptive.check, None, list[AdaptiveRun]()
    if stated is not None:
        assert held_out is not None
        # A classifier clips examples in training, and episodes when it is scored.
        is_classifier = config.learner.kind == CLASSIFIER
        like = dataclasses.replace(
            config.step,
            sampling=stated.sampling,
            noise_multiplier=None,
            clip_unit=None if is_classifier else config.step.clip_unit,
        )
        with prefixed("adaptive.check"):
            # Not a replaced config: a classifier's refuses steps of episodes.
            check = config.step_on(held_out.population, like)
        if stated.apart:
            check = _alone(check, stated.number, config)
            apart = [AdaptiveRun({CHECK: check}, quotas={CHECK: stated.number})]
    made = _with_quotas if adaptive.has_quotas else _with_prices
    run = made(config, adaptive, step, None if apart else check, statistics)
    checks = {}
    if stated is not None:
        assert held_out is not None
        with prefixed("adaptive.check"):
            checks[CHECK] = PrivateValidation(
                held_out,
                (apart or [run])[0].options[CHECK],
                shots=config.learner.shots,
                error_bound=stated.error_bound,
                normalizer=stated.normalizer,
                fixed=stated.fixed,
                noise=config.noise_law,
            )
    runs, first = (run, *apart), tuple(statistics)
    return AdaptiveBudget(runs, config.delta, first, tuple(checks)), checks


def shared_statistics(
    config: TrainingConfig, data: ExampleTable
) -> dict[str, tuple[GaussianStep, float]]:
    """Returns the steps of the private statistics, and their shares of the budget."""
    if config.start is None:
        return {}
    step = config.step_on(data.population)
    steps = statistics_steps(
        data.level_names,
        config.start,
        privacy_unit=str(step.privacy_unit),
        neighboring_relation=step.neighboring_relation,
    )
    pairs = zip(steps, config.start_shares, strict=True)
    return {f"statistic {i + 1}": pair for i, pair in enumerate(pairs)}


def _with_quotas(
    config: TrainingConfig,
    adaptive: AdaptiveConfig,
    step: GaussianStep,
    check: GaussianStep | None,
    statistics: Mapping[str, tuple[GaussianStep, float]],
) -> AdaptiveRun:
    """Options with a quota each: the budget is the cost of all of them together."""
    number = adaptive.check.number if adaptive.check is not None else 0
    before = list(statistics.values())
    if check is not None:
        before += [(check, adaptive.check_share / number)] * number
    planned = _planned(config, step, before)
    options = dict(zip(statistics, planned.before, strict=False))
    quotas = dict.fromkeys(options, 1)
    if check is not None:
        options[CHECK], quotas[CHECK] = planned.before[-1], number
    of, most = adaptive.options, int(config.num_steps or 0)
    steps = {name: (one.noise, one.most or most) for name, one in of.items()}
    fixed = [(options[name], quotas[name]) for name in options]
    noise = _common_noise(config, planned.step, list(steps.values()), fixed)
    for name, (factor, count) in steps.items():
        options[name], quotas[name] = _with_noise(planned.step, noise * factor), count
    return AdaptiveRun(options, quotas=quotas)


def _with_prices(
    config: TrainingConfig,
    adaptive: AdaptiveConfig,
    step: GaussianStep,
    check: GaussianStep | None,
    statistics: Mapping[str, tuple[GaussianStep, float]],
) -> AdaptiveRun:
    """Options with a price each, paid from one budget."""
    epsilon, delta = config.epsilon, config.delta
    first: dict[str, GaussianStep] = {}
    if config.num_steps is not None:
        planned = _planned(config, step, list(statistics.values()))
        step = planned.step
        first = dict(zip(statistics, planned.before, strict=True))
    noise = float(step.noise_multiplier)
    options = {
        name: _with_noise(step, noise * one.noise)
        for name, one in adaptive.options.items()
    }
    rules = RuleBook.in_order(list(options)) if adaptive.only_lower else None
    if check is not None and adaptive.check is not None:
        if rules is not None:
            raise ValueError(
                "adaptive.check.apart must be true with only_lower: otherwise the "
                "scores would be options of the same order"
            )
        # With this noise all scores alone would cost their share.
        alone = _alone(check, adaptive.check.number, config)
        noise = float(alone.noise_multiplier) / math.sqrt(adaptive.check_share)
        options[CHECK] = _with_noise(alone, noise)
    if not first:
        return AdaptiveRun(options, epsilon=epsilon, delta=delta, rules=rules)
    # The order permits each statistic once and first, so its price is arbitrary.
    rules = (rules or RuleBook.freely(list(options))).preceded_by(list(first))
    prices, _ = default_prices(options, epsilon, delta, blocks=False)
    run = AdaptiveRun(
        {**first, **options},
        prices={**dict.fromkeys(first, 1), **prices},
        epsilon=epsilon,
        delta=delta,
        rules=rules,
    )
    if not (run.budget or 0) >= len(first) + min(prices.values()):
        raise ValueError(
            f"epsilon={epsilon:g} and delta={delta:g} allow no step after the "
            "statistics: give them a smaller share"
        )
    return run


def _planned(
    config: TrainingConfig, step: GaussianStep, before: list[tuple[GaussianStep, float]]
) -> PrivacyBudget:
    """The calibrated plan of a config's steps after others, with shares of epsilon."""
    target: Any = {"epsilon": config.epsilon, "delta": config.delta}
    return plan_budget(step, **target, num_steps=config.num_steps, before=before)


def _alone(step: GaussianStep, number: int, config: TrainingConfig) -> GaussianStep:
    """The step with the noise at which ``number`` such steps alone meet the target."""
    if math.isinf(config.epsilon):
        return _with_noise(step, 0.0)
    noise = calibrate_noise_multiplier(
        step, epsilon=config.epsilon, delta=config.delta, num_steps=number
    )
    return _with_noise(step, float(noise))


def _common_noise(
    config: TrainingConfig,
    step: GaussianStep,
    steps: list[tuple[float, int]],  # factor of the noise, number
    fixed: list[tuple[GaussianStep, int]],
) -> float:
    """The smallest noise multiplier at which all options together meet the target."""
    own, factors = float(step.noise_multiplier), [factor for factor, _ in steps]
    if math.isinf(config.epsilon) or set(factors) == {1.0}:
        return own

    def fits(noise: float) -> bool:
        parts = [(_with_noise(step, noise * factor), n) for factor, n in steps]
        run = compose(*fixed, *parts)
        return float(epsilon_of(run, delta=config.delta)) <= config.epsilon

    # If all factors were 1 it would be the step's own, so these two bracket it.
    low, high = own / max(factors) * (1 - 1e-3), own / min(factors) * (1 + 1e-3)
    if not fits(high):
        raise ValueError(f"no noise keeps the options within epsilon={config.epsilon}")
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_noise(step: GaussianStep, noise: float) -> Any:
    return dataclasses.replace(step, noise_multiplier=noise)
