"""Builds the trainer and the evaluations of a run from its config."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp_episodic._validation import prefixed
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses, checked_sampling
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.bands import choose_bands
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.trainer.config.training_adaptive import Rule
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
)
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.sources import Omniglot
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.stored_features import INVERTED
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners import learners, models
from jaxdp_episodic.trainer.learners.adapted import adapted, begin_with, parameters_file
from jaxdp_episodic.trainer.learners.episode import code_of
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.learners.optimizers import built_optimizer
from jaxdp_episodic.trainer.run.adaptive import (
    AdaptiveTrainer,
    adaptive_plan,
    shared_statistics,
)
from jaxdp_episodic.trainer.run.checks import check_held_out, check_owners, sampler_of
from jaxdp_episodic.trainer.run.evaluation import Evaluation, PrivateValidation
from jaxdp_episodic.trainer.run.ledger import described_part
from jaxdp_episodic.trainer.run.release import OWN
from jaxdp_episodic.trainer.run.selection import choosing_split
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics


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
                    "inverted": code_of(data) == INVERTED,
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
    budget, checks, rule = None, {}, own.rule
    if config.adaptive is not None:
        budget, checks = adaptive_plan_of(config, tables)
        if (config.adaptive.rule is None) == (rule is None):
            raise ValueError(
                "give exactly one of adaptive.rule (in the config) and rule (a "
                "function, to run_training), got "
                f"{'neither' if rule is None else 'both'}"
            )
        rule = config.adaptive.rule if rule is None else rule
    elif rule is not None:
        raise ValueError("rule is for a config with adaptive, got one without")
    parts = run_parts(config, data, budget, own=own)
    parts |= {"rule": rule, "checks": checks, "truncation": tables.truncation}
    make: Any = Trainer if budget is None else AdaptiveTrainer
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


def adaptive_plan_of(
    config: TrainingConfig, tables: Tables
) -> tuple[AdaptiveBudget, dict[str, PrivateValidation]]:
    """Returns `adaptive_plan` for the data that the config names."""
    assert config.adaptive is not None
    check = config.adaptive.check
    with prefixed("adaptive.check"):
        held_out = None if check is None else tables.load(check.split)
    return adaptive_plan(config, tables.load(TRAIN), held_out)


def run_parts(
    config: TrainingConfig,
    data: ExampleTable,
    budget: AdaptiveBudget | None = None,
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
    if budget is not None:
        gradient_steps = max(budget.most(name) for name in budget.training)
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
        with prefixed("noise"):
            step = choose_bands(step, num_steps=config.num_steps, **target, **how).step
    return plan_budget(
        step,
        epsilon=config.epsilon,
        delta=config.delta,
        num_steps=0 if config.learner.kind in CLOSED_FORM else config.num_steps,
        before=before,
    )


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
