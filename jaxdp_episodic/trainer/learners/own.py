"""Models and learners of one's own, in place of those that a config can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array

from jaxdp_episodic.trainer.learners.models import LinenApply, split_model


def apply_and_params(
    model: Any, input_shape: tuple[int, ...], *, seed: int = 0
) -> tuple[Callable[[Any, Array], Array], Any]:
    """Returns a model of one's own as a pure function, and its initial parameters.

    It is a module of ``flax.nnx``; one of ``flax.linen``, whose parameters are made
    here, by a seed which is public; or a pair ``(apply, params)`` of any framework.
    """
    if isinstance(model, nnx.Module):
        return split_model(model)
    if isinstance(model, linen.Module):
        inputs = jnp.zeros((1, *input_shape), jnp.float32)
        made: Any = model.init(jax.random.key(seed), inputs)
        others = sorted(made.keys() - {"params"})
        if others:
            raise ValueError(
                f"model must hold parameters alone, got the collection {others[0]!r}: "
                "batch statistics couple the examples of different clip units; use "
                "GroupNorm or LayerNorm, or close over those of public data: model = "
                "(lambda params, inputs: module.apply({'params': params, "
                f"{others[0]!r}: constants}}, inputs), params), in evaluation mode"
            )
        return LinenApply(model), made["params"] if "params" in made else {}
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        return model
    raise TypeError(
        "model must be a module of flax.nnx or flax.linen, or a pair (apply, params), "
        f"got a {type(model).__name__}"
    )


def learner_of(learner: Any, apply: Callable[[Any, Array], Array]) -> Any:
    """Returns a learner of one's own for a model."""
    is_learner = hasattr(learner, "predict") and not isinstance(learner, type)
    made = learner(apply) if callable(learner) and not is_learner else learner
    missing = [
        name for name in ("is_regression", "loss", "predict") if not hasattr(made, name)
    ]
    if missing:
        raise TypeError(
            "learner must be a function of apply that returns a learner, or one: see "
            f"Learner; got a {type(made).__name__} without {missing[0]}"
        )
    return made
