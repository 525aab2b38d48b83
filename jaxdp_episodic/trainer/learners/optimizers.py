"""Optimizers of the outer loop, and averages: post-processing, without privacy cost."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import OptimizerConfig, checked_decay
from jaxdp_episodic.trainer.gradient.precision import training_dtype


@functools.lru_cache(maxsize=8)  # equal configs share one compiled update
def built_optimizer(
    config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
    """Returns the optax optimizer for a run of that many steps."""
    peak, warmup = config.learning_rate, min(config.warmup_steps, num_steps - 1)
    if config.schedule == "cosine":
        later = optax.cosine_decay_schedule(peak, max(num_steps - warmup, 1))
    else:
        later = optax.constant_schedule(peak)
    schedule = later
    if warmup:
        rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
        schedule = optax.join_schedules([rise, later], [warmup])
    if config.kind == "sgd":
        optimizer = optax.sgd(schedule, momentum=0.9)
    elif config.kind == "adamw":
        optimizer = optax.adamw(schedule, weight_decay=config.weight_decay)
    elif config.noise_floor is not None:
        optimizer = noise_corrected_adam(schedule, floor=config.noise_floor)
    else:
        optimizer = optax.adam(schedule)
    return optimizer if config.ema is None else averaged(optimizer, config.ema)


def noise_corrected_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    floor: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam with the known variance of the noise removed from second moments.

    A noised coordinate's second moment is its own plus the noise's variance s^2, which
    is public: `Trainer` passes s as ``noise_deviation`` to every update. Adam's divisor
    becomes ``sqrt(max(v - s^2, floor * s^2)) + eps``. Where the gradient is all noise,
    the floor decides, and steps are ``1 / sqrt(floor)`` times Adam's. Without noise
    this is `optax.adam`.

    Reference: Tang, Shpilevskiy, Lécuyer (2024), arXiv:2312.14334 (DP-AdamBC).

    Args:
      learning_rate: as in `optax.adam`.
      floor: > 0, a multiple of the noise's variance.
      b1: as in `optax.adam`.
      b2: as in `optax.adam`.
      eps: as in `optax.adam`.

    Raises:
      ValueError: a floor that is not positive and finite, or another number below 0.
      TypeError: what is not a number, or an update without ``noise_deviation``.
    """
    least = _validation.one("floor", floor, _validation.positive_array)
    for name, value in {"b1": b1, "b2": b2, "eps": eps}.items():
        if not _validation.is_traced(value):  # as by inject_hyperparams
            _validation.one(name, value, _validation.nonnegative_array)
    adam = optax.scale_by_adam(b1, b2)

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        if "noise_deviation" not in others:
            raise TypeError("update needs the noise_deviation of the gradient")
        _, state = adam.update(updates, state)
        deviation = jnp.asarray(others["noise_deviation"], training_dtype(state.nu))
        variance = jnp.square(deviation)
        changes = jax.tree.map(
            lambda m, v: (
                m / (jnp.sqrt(jnp.maximum(v - variance, least * variance)) + eps)
            ),
            optax.tree.bias_correction(state.mu, b1, state.count),
            optax.tree.bias_correction(state.nu, b2, state.count),
        )
        return changes, state

    scaled = optax.GradientTransformationExtraArgs(adam.init, update)
    chained = optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))
    return optax.GradientTransformationExtraArgs(chained.init, chained.update)


class Averaged(NamedTuple):
    """State of an optimizer wrapped by `averaged`."""

    inner: Any  # state of the wrapped optimizer
    sums: Any  # pytree, float32 or wider: weighted sum of past parameters
    weight: Array  # sum of the weights; the average is sums / weight


def averaged(
    optimizer: optax.GradientTransformation, decay: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, also keeping an exponential average of the parameters.

    After t steps the average weights the parameters of i steps ago by ``decay^i``.
    Weights are normalized to sum to 1, so the initial parameters do not enter it.
    `Trainer.params` returns the average; gradients are taken at the last parameters.

    Args:
      optimizer: an optax optimizer.
      decay: in [0, 1); 0 averages nothing.

    Raises:
      ValueError: a decay out of range.
    """
    rate = checked_decay(decay)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Averaged:
        dtype = training_dtype(params)
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        return Averaged(optimizer.init(params), sums, jnp.zeros((), dtype))

    def update(
        updates: Any, state: Any, params: Any = None, **others: Any
    ) -> tuple[Any, Averaged]:
        changes, inner = optimizer.update(updates, state.inner, params, **others)
        changed = optax.apply_updates(params, changes)
        sums = jax.tree.map(
            lambda s, p: rate * s + (1 - rate) * p.astype(s.dtype), state.sums, changed
        )
        return changes, Averaged(inner, sums, rate * state.weight + (1 - rate))

    return optax.GradientTransformationExtraArgs(init, update)


def average_of(params: Any, optimizer_state: Any) -> Any:
    """Returns the average kept by `averaged`, if there is one, else ``params``."""
    if not isinstance(optimizer_state, Averaged) or not optimizer_state.weight > 0:
        return params
    weight = optimizer_state.weight
    return jax.tree.map(
        lambda s, p: (s / weight).astype(p.dtype), optimizer_state.sums, params
    )
