"""Builds a run from its config: its budget, its trainer and its evaluations."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    PeopleBlocks,
    checked_sampling,
)
from jaxdp_episodic.accountant.describe.runs import RuleBook
from jaxdp_episodic.accountant.describe.step import GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.bands import choose_bands
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.accountant.questions.strategies import default_prices
from jaxdp_episodic.trainer.config.training_adaptive import CHECK, AdaptiveConfig, Rule
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import (
    ALL,
    AUTO,
    BAYES,
    CLASSIFIER,
    CLOSED_FORM,
    COSINE,
    LOGITS,
    MIXED,
    PLDA,
    PROTONET,
    LearnerConfig,
    NoiseConfig,
    statistics_steps,
)
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.sources import Omniglot
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.table import INVERTED, ExampleTable
from jaxdp_episodic.trainer.learners import learners, models
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.learners.models import adapted, begin_with, parameters_file
from jaxdp_episodic.trainer.learners.optimizers import built_optimizer
from jaxdp_episodic.trainer.run.checks import check_held_out, check_owners, sampler_of
from jaxdp_episodic.trainer.run.evaluation import Evaluation, PrivateValidation
from jaxdp_episodic.trainer.run.ledger import described_part
from jaxdp_episodic.trainer.run.loop import choosing_split
from jaxdp_episodic.trainer.run.release import OWN
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics


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
        _validation.instance("budget", budget, AdaptiveBudget, "an AdaptiveBudget")
        more = {"rule": rule, "checks": checks, **arguments}
        super().__init__(learner, params, data=data, budget=budget, **more)


class OwnParts(NamedTuple):
    """The user's own model, learner, optimizer and rule; None: the config's.

    ``base`` is the folder that paths in the config are relative to.
    """

    model: Any = None
    learner: Any = None
    optimizer: optax.GradientTransformation | None = None
    rule: Rule | None = None
    base: Path | None = None

    def settings(self, config: TrainingConfig) -> dict[str, Any]:
        """Returns model and optimizer as plain values; refuses unused parts."""
        named = {"model": self.model, "learner": self.learner}
        named["optimizer"] = self.optimizer
        own = {name: part for name, part in named.items() if part is not None}
        if own and config.learner.kind in CLOSED_FORM:
            raise ValueError(
                f"{next(iter(own))} must not be given with learner.kind="
                f"{config.learner.kind!r}, which takes no gradient steps"
            )
        model: Any = config.model
        if model is None:
            described = "none"
        elif model.parameters is None:
            described = model.described() if model.train == ALL else model.to_dict()
        else:  # the initial parameters by the checksum of their file
            file = parameters_file(model.parameters, self.base)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            described = model.to_dict() | {"parameters": digest}
        of_config = {"model": described, "optimizer": config.optimizer.to_dict()}
        return of_config | {name: {OWN: described_part(p)} for name, p in own.items()}


NO_PARTS = OwnParts()


def built_model(
    config: TrainingConfig,
    input_shape: tuple[int, ...],
    ways: int | None,
    num_classes: int,
    own: OwnParts,
) -> tuple[Any, Any]:
    """Returns ``(learner, params)`` of a config, with the user's own parts if any."""
    if config.start is not None and config.start.kind == MIXED:
        return MixedModel.of(config.start), {}
    learner, model = config.learner, config.model
    features, apply, params = None, learners.as_they_are, {}
    if model is None and own.model is None:
        pass  # the features as they are: statistics alone, or "bayes"
    elif own.model is None:
        outputs = num_outputs(config, ways, num_classes)
        assert model is not None
        embeds = learner.kind == PROTONET
        model = dataclasses.replace(model, skip=model.skips(config.step.sampling))
        module = models.built_module(model, input_shape, outputs, embeds=embeds)
        if model.parameters is not None:
            begin_with(module, parameters_file(model.parameters, own.base))
        module, wrt = adapted(module, model.train, model.rank, model.seed)
        apply, params = models.split_model(module, wrt=wrt)
        if learner.kind == CLASSIFIER:
            features, _ = models.split_model(module, "hidden", wrt=wrt)
    else:
        seed = 0 if model is None else model.seed
        apply, params = models.apply_and_params(own.model, input_shape, seed=seed)
        needs_features = learner.kind == CLASSIFIER and learner.embed != LOGITS
        if needs_features and own.learner is None:
            raise ValueError(
                f"learner.embed must be {LOGITS!r} with a model of your own, got "
                f"{learner.embed!r}; or give a learner of your own"
            )
    if own.learner is not None:
        return models.learner_of(own.learner, apply), params
    made = _learner(learner, apply, features, ways)
    if isinstance(made, learners.BayesianRegression):
        example = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
        size = jax.eval_shape(apply, params, example).size
        scale, noise = learner.prior_scale, learner.noise_scale
        params = made.initial(params, size, scale=scale, noise=noise)
    return made, params


def num_outputs(config: TrainingConfig, ways: int | None, num_classes: int) -> int:
    """Returns the number of outputs of the config's model."""
    assert config.model is not None
    embedding = config.model.embedding
    outputs = {PROTONET: embedding, BAYES: embedding, CLASSIFIER: num_classes}
    return outputs.get(config.learner.kind, ways or 1)


_LEARNERS = {
    PROTONET: learners.ProtoNet,
    PLDA: learners.ProtoNet,
    CLASSIFIER: learners.Classifier,
    BAYES: learners.BayesianRegression,
    "maml": learners.MAML,
    "anil": learners.ANIL,
}


def _learner(config: LearnerConfig, apply: Any, features: Any, ways: int | None) -> Any:
    """The learner of a config: its fields are the config's keys, and these."""
    cls: Any = _LEARNERS[config.kind]
    given = {**vars(config), "apply": apply, "features": features}
    given |= {"ways": int(ways or 1), "task_loss": config.loss}
    if config.kind == PLDA:
        given["distance"] = COSINE
    return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})


# Keys of a source that say how files become examples; they name no path and no unit.
_SOURCE_KEYS = ("type", "size", "grey", "groups", "label", "features", "target")
FEATURES = "features"  # folder in a run's folder, for cached features


class Tables:
    """The data of a run by split, with their features."""

    def __init__(
        self,
        config: TrainingConfig,
        base: Path | None,
        *,
        folder: Path | None = None,
        features: FixedFeatures | None = None,
        keeps_features: bool = True,
    ) -> None:
        self._config, self.base = config, base
        self._loaded: dict[str, ExampleTable] = {}
        self.truncation: Truncation | None = None
        self.examples: dict[str, Any] = {}
        self.has_own_features = features is not None
        self.features = (
            FixedFeatures.of(config.features, base) if features is None else features
        )
        cache = config.features.cache
        self._cache = None if folder is None else folder / FEATURES
        if cache is not None and keeps_features:
            self._cache = (base or Path()) / cache

    def load(self, split: str) -> ExampleTable:
        """Returns a split, loaded once; refuses held-out data equal to training's."""
        if split not in self._loaded:
            if split == TRAIN:
                data, self.truncation = self._config.training_data(self.base)
                self.examples = {
                    "example_shape": list(data.features.shape[1:]),
                    "dtype": str(data.features.dtype),
                    "inverted": getattr(data.features, "encoding", None) == INVERTED,
                }
            else:
                data = self._config.data.load(split, self.base)
            if self.features is not None:
                cache = None if self._cache is None else self._cache / split
                if cache is not None and split == TRAIN:  # before a cache is written
                    step = self._config.step_on(data.population)
                    check_owners(step, data)
                    sampler_of(step, data)
                data = self.features.table(data, cache=cache)
            self._loaded[split] = data
            # The splits of the package's own data have different classes by
            # construction.
            if split != TRAIN and hasattr(self._config.data, "path"):
                check_held_out(split, data, self.load(TRAIN))
        return self._loaded[split]


def assembled(
    config: TrainingConfig,
    tables: Tables,
    own: OwnParts = NO_PARTS,
    *,
    evaluates: bool = True,
) -> tuple[Trainer, dict[str, Evaluation], int]:
    """Returns trainer, evaluations (if asked for) and the number of parameters."""
    data, own = tables.load(TRAIN), own._replace(base=tables.base)
    evaluations = _evaluations(config, tables) if evaluates else {}
    settings = {
        **own.settings(config),
        "features": tables.features.described() if tables.features else "none",
        "start": "none" if config.start is None else config.start.to_dict(),
    }
    rule = own.rule
    if config.adaptive is not None:
        if (config.adaptive.rule is None) == (rule is None):
            raise ValueError(
                "give exactly one of adaptive.rule (in the config) and rule (a "
                "function, to run_training), got "
                f"{'neither' if rule is None else 'both'}"
            )
        rule = config.adaptive.rule if rule is None else rule
    elif rule is not None:
        raise ValueError("rule is for a config with adaptive, got one without")
    budget, checks = budget_of(config, tables.load)
    parts = run_parts(config, data, budget, own=own)
    parts |= {"rule": rule, "checks": checks, "truncation": tables.truncation}
    make: Any = Trainer if config.adaptive is None else AdaptiveTrainer
    trainer: Trainer = make(data=data, seed=config.seed, settings=settings, **parts)
    trainer.recipe = _recipe(config, tables, own, settings["model"])
    size = sum(leaf.size for leaf in jax.tree.leaves(parts["params"]))
    return trainer, evaluations, size


def checked_run(config: TrainingConfig, base: Path | None) -> tuple[Trainer, Tables]:
    """Returns trainer and data of a new run, fully checked; writes nothing."""
    tables = Tables(config, base, keeps_features=False)
    trainer, evaluations, _ = assembled(config, tables)
    wanted = config.evaluation
    choosing_split(trainer, evaluations, None if wanted is None else wanted.select)
    return trainer, tables


def _recipe(
    config: TrainingConfig, tables: Tables, own: OwnParts, model: Any
) -> dict[str, Any]:
    """How to use the run's release: settings and shapes only."""
    if config.model is not None and own.model is None:
        num_classes = len(tables.load(TRAIN).population.children_counts[-1])
        model = {
            **config.model.described(),
            "outputs": num_outputs(config, _ways(config), num_classes),
            "skip": config.model.skips(config.step.sampling),
            "embeds": config.learner.kind == PROTONET,
        }
    given, examples = config.data.to_dict(), dict(tables.examples)
    source = {key: given[key] for key in _SOURCE_KEYS if key in given}
    if examples.pop("inverted") or isinstance(config.data, Omniglot):
        source["inverted"] = True
    features = None
    if tables.features is not None:
        is_own = tables.has_own_features
        kind = OWN if is_own else config.features.kind
        features = {"kind": kind, **tables.features.described()}
    return {
        "model": model if isinstance(model, dict) else {},
        "features": features,
        "source": source,
        **examples,
    }


def run_parts(
    config: TrainingConfig,
    data: ExampleTable,
    budget: PrivacyBudget | AdaptiveBudget | None = None,
    *,
    own: OwnParts = NO_PARTS,
) -> dict[str, Any]:
    """Returns the arguments of a `Trainer` that a config determines."""
    if budget is None and config.adaptive is not None:
        raise NotImplementedError(
            "a config with adaptive has no plan: audit its steps by the same config "
            "without adaptive"
        )
    planned = plan(config, data) if budget is None else budget
    start = statistics_of(config, planned.step, data)
    shape = data.features.shape[1:] if start is None else (start.dimensions,)
    num_classes = len(data.population.children_counts[-1])
    learner, params = built_model(config, shape, _ways(config), num_classes, own)
    gradient_steps = max(planned.num_steps - len(planned.before), 1)
    if isinstance(planned, AdaptiveBudget):
        gradient_steps = max(planned.most(name) for name in planned.training)
    return {
        "learner": learner,
        "params": params,
        "budget": planned,
        "shots": 0 if config.learner.kind == CLASSIFIER else config.learner.shots,
        "optimizer": own.optimizer or built_optimizer(config.optimizer, gradient_steps),
        "l2_clip_norm": 1.0 if config.l2_clip_norm is None else config.l2_clip_norm,
        "clipping": config.clipping,
        "normalizer": config.normalizer,
        "block_size": config.block_size,
        "noise": config.noise_law,
        "start": start,
    }


def plan(config: TrainingConfig, data: ExampleTable) -> PrivacyBudget:
    """Returns the calibrated budget of a config for these data."""
    step, noise = config.step_on(data.population), config.noise
    before = tuple(shared_statistics(config, data).values())
    if isinstance(noise, NoiseConfig) and noise.bands == AUTO:
        target = {"epsilon": config.epsilon, "delta": config.delta}
        how = {"horizon": noise.horizon, "level": noise.groups, "before": before}
        with _validation.prefixed("noise"):
            step = choose_bands(step, num_steps=config.num_steps, **target, **how).step
    number = 0 if config.learner.kind in CLOSED_FORM else config.num_steps
    return _planned(config, step, number, before)


def statistics_of(
    config: TrainingConfig, step: GaussianStep, data: ExampleTable
) -> PrivateStatistics | None:
    """Returns the private statistics that a run starts with, if any."""
    if config.start is None:
        return None
    is_block = isinstance(step.design, PeopleBlocks)  # its slots are those of a block
    slots = None if is_block else step.design.schemes[-1].population
    return PrivateStatistics(
        data,
        config.start,
        privacy_unit=str(step.privacy_unit),
        neighboring_relation=step.neighboring_relation,
        slots=None if slots is None else int(np.asarray(slots)),
        people=step.people,
        noise=config.noise_law,
        shots=config.learner.shots,
    )


def _ways(config: TrainingConfig) -> int | None:
    """Classes an episode; None for regression, or without episodes."""
    if config.learner.is_regression:
        return None
    if config.learner.kind == CLASSIFIER:
        return None if config.evaluation is None else config.evaluation.ways
    design = config.step.sampling
    if isinstance(design, GroupedClasses):
        return int(np.asarray(design.ways))
    # The last level but one draws the classes of an episode.
    levels = checked_sampling(design).schemes
    size = getattr(levels[-2], "size", None) if len(levels) > 1 else None
    if size is None:
        raise ValueError(
            "classification needs a sampling whose last level but one draws a fixed "
            "number of classes (ways): GroupedClasses, or WithoutReplacement there"
        )
    return int(size)


def _evaluations(config: TrainingConfig, tables: Tables) -> dict[str, Evaluation]:
    if (wanted := config.evaluation) is None:
        return {}
    shape = tables.load(TRAIN).features.shape[1:]
    for split in wanted.splits:
        if (found := tables.load(split).features.shape[1:]) != shape:
            raise ValueError(
                f"features must be of shape {shape} as in training, got those of "
                f"{split!r} of shape {found}"
            )
    return {
        split: Evaluation(
            tables.load(split),
            ways=_ways(config) if wanted.ways is None else wanted.ways,
            shots=config.learner.shots if wanted.shots is None else wanted.shots,
            queries=wanted.queries,
            num_episodes=wanted.num_episodes,
        )
        for split in wanted.splits
    }


# --- The budget of an adaptive run ---

# Relative tolerance of the common noise multiplier, as in `calibration`.
_TOLERANCE = 1e-7


def budget_of(
    config: TrainingConfig, load: Callable[[str], ExampleTable]
) -> tuple[PrivacyBudget | AdaptiveBudget, dict[str, PrivateValidation]]:
    """Returns a config's calibrated budget and its checks; ``load`` loads a split."""
    adaptive, data = config.adaptive, load(TRAIN)
    if adaptive is None:
        return plan(config, data), {}
    step, statistics = config.step_on(data.population), shared_statistics(config, data)
    made = _with_quotas if adaptive.has_quotas else _with_prices
    stated, first = adaptive.check, tuple(statistics)
    if stated is None:
        run = made(config, adaptive, step, None, statistics)
        return AdaptiveBudget((run,), config.delta, first), {}
    # A classifier clips examples in training, and episodes when it is scored.
    is_classifier = config.learner.kind == CLASSIFIER
    like = dataclasses.replace(
        config.step,
        sampling=stated.sampling,
        noise_multiplier=None,
        clip_unit=None if is_classifier else config.step.clip_unit,
    )
    with _validation.prefixed("adaptive.check"):
        held_out = load(stated.split)
        # Not a replaced config: a classifier's refuses steps of episodes.
        check = config.step_on(held_out.population, like)
    runs = [made(config, adaptive, step, None if stated.apart else check, statistics)]
    if stated.apart:
        check = _planned(config, check, stated.number).step
        runs.append(AdaptiveRun({CHECK: check}, quotas={CHECK: stated.number}))
    with _validation.prefixed("adaptive.check"):
        validation = PrivateValidation(
            held_out,
            cast(GaussianStep, runs[-1].options[CHECK]),
            shots=config.learner.shots,
            error_bound=stated.error_bound,
            normalizer=stated.normalizer,
            fixed=stated.fixed,
            noise=config.noise_law,
        )
    budget = AdaptiveBudget(tuple(runs), config.delta, first, (CHECK,))
    return budget, {CHECK: validation}


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
    planned = _planned(config, step, config.num_steps, before)
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
        planned = _planned(config, step, config.num_steps, list(statistics.values()))
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
        alone = _planned(config, check, adaptive.check.number).step
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
    config: TrainingConfig,
    step: GaussianStep,
    num_steps: int | None,
    before: Sequence[tuple[GaussianStep, float]] = (),
) -> PrivacyBudget:
    """The calibrated plan of so many steps after others, with shares of epsilon."""
    target: Any = {"epsilon": config.epsilon, "delta": config.delta}
    return plan_budget(step, **target, num_steps=num_steps, before=before)


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
