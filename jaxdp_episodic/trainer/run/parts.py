"""What a run trains: the model and the learner of its config, or its user's own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic.trainer.config.rules import Rule
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import (
    BAYES,
    CLASSIFIER,
    CLOSED_FORM,
    COSINE,
    LOGITS,
    MIXED,
    PLDA,
    PROTONET,
    LearnerConfig,
)
from jaxdp_episodic.trainer.learners.bayesian import BayesianRegression
from jaxdp_episodic.trainer.learners.learners import ANIL, MAML, Classifier, ProtoNet
from jaxdp_episodic.trainer.learners.models import built_module, split_model
from jaxdp_episodic.trainer.learners.own import apply_and_params, learner_of
from jaxdp_episodic.trainer.learners.untrained import as_they_are
from jaxdp_episodic.trainer.run.description import described_part
from jaxdp_episodic.trainer.statistics.mixed import MixedModel

OWN = "own"  # key of a description of what no config names


class OwnParts(NamedTuple):
    """The user's own model, learner, optimizer and rule; None: the config's."""

    model: Any = None
    learner: Any = None
    optimizer: optax.GradientTransformation | None = None
    rule: Rule | None = None

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
        of_config: dict[str, Any] = {
            "model": "none" if config.model is None else config.model.to_dict(),
            "optimizer": config.optimizer.to_dict(),
        }
        return of_config | {name: {OWN: described_part(p)} for name, p in own.items()}


NO_PARTS = OwnParts()


def built_model(
    config: TrainingConfig,
    input_shape: tuple[int, ...],
    ways: int | None,
    num_classes: int,
    own: OwnParts,
) -> tuple[Any, Any]:
    """Returns ``(learner, params)`` of a config, or with the user's own parts."""
    if config.start is not None and config.start.kind == MIXED:
        return MixedModel.of(config.start), {}
    learner, model = config.learner, config.model
    features, apply, params = None, as_they_are, {}
    if model is None and own.model is None:
        pass  # of statistics alone, as they project; or "bayes"
    elif own.model is None:
        outputs = num_outputs(config, ways, num_classes)
        assert model is not None
        embeds = learner.kind == PROTONET
        model = dataclasses.replace(model, skip=model.skips(config.step.sampling))
        module = built_module(model, input_shape, outputs, embeds=embeds)
        apply, params = split_model(module)
        if learner.kind == CLASSIFIER:
            features, _ = split_model(module, "hidden")
    else:
        seed = 0 if model is None else model.seed
        apply, params = apply_and_params(own.model, input_shape, seed=seed)
        needs_features = learner.kind == CLASSIFIER and learner.embed != LOGITS
        if needs_features and own.learner is None:
            raise ValueError(
                f"learner.embed must be {LOGITS!r} with a model of your own, got "
                f"{learner.embed!r}; or give a learner of your own"
            )
    if own.learner is not None:
        return learner_of(own.learner, apply), params
    made = _learner(learner, apply, features, ways)
    if isinstance(made, BayesianRegression):
        example = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
        size = jax.eval_shape(apply, params, example).size
        scale, noise = learner.prior_scale, learner.noise_scale
        params = made.initial(params, size, scale=scale, noise=noise)
    return made, params


def num_outputs(config: TrainingConfig, ways: int | None, num_classes: int) -> int:
    """Returns how many outputs the config's model has."""
    assert config.model is not None
    embedding = config.model.embedding
    outputs = {PROTONET: embedding, BAYES: embedding, CLASSIFIER: num_classes}
    return outputs.get(config.learner.kind, ways or 1)


def _learner(config: LearnerConfig, apply: Any, features: Any, ways: int | None) -> Any:
    if config.kind == CLASSIFIER:
        return Classifier(
            apply,
            features=features,
            embed=config.embed,
            ways=int(ways or 1),
            distance=config.distance,
        )
    if config.kind in (PROTONET, PLDA):
        return ProtoNet(
            apply,
            ways=int(ways or 1),
            distance=COSINE if config.kind == PLDA else config.distance,
            temperature=config.temperature,
            resplits=config.resplits,
        )
    if config.kind == BAYES:
        return BayesianRegression(apply, rank=config.rank)
    inner = {
        "inner_steps": config.inner_steps,
        "inner_learning_rate": config.inner_learning_rate,
        "first_order": config.first_order,
        "checkpoint": config.checkpoint,
        "task_loss": config.loss,
    }
    if config.kind == "maml":
        return MAML(apply, **inner)
    return ANIL(apply, head=config.head, **inner)
