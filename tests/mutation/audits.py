"""Checks that audit: the noised gradient, and the accountant."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_release
from jaxdp_episodic.trainer.audit.game import made_up, worlds_of
from jaxdp_episodic.trainer.config.training_parts import DISCRETE, GAUSSIAN
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from mutation.verdicts import Effort, Verdict, of_bounds
from oracles.worlds import divergence

DELTAS = (1e-3, 1e-2, 1e-1)
CLIP, NOISE, DIVISOR = 0.01, 2.0, 4.0
_LAYER = np.array([1_000.0, 0.0])  # loud

# Everybody is drawn, so sampling hides nothing. One unit changes the sum by C if the
# unit itself is clipped, by 2C if it is an example of an episode.
ONCE = jde.GaussianStep(
    jde.Poisson("unit", sampling_probability=1.0), noise_multiplier=NOISE
)
_WAYS = 5
EPISODE = jde.GaussianStep(
    jde.GroupedClasses(
        num_classes=_WAYS,
        ways=_WAYS,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        examples=jde.WithoutReplacement("example", size=2, population=2),
    ),
    noise_multiplier=NOISE,
)


class Rows(NamedTuple):
    """Clip units whose contribution is their content."""

    contribution: Any
    unit_mask: Any


def _dot(params: Any, unit: Rows) -> jax.Array:
    """A loss whose gradient is the unit's contribution."""
    products = jax.tree.map(lambda p, c: jnp.sum(p * c), params, unit.contribution)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def _audit_gradient(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    blocks: dict[bool, Any],
    step: jde.GaussianStep,
    score: Callable[[Any], Any],
    effort: Effort,
    noise: str = GAUSSIAN,
) -> Verdict:
    """Audits `PrivateGradient` on two fixed blocks, with the unit and without.

    The score is one number of a release, large if the unit seems to be present; the
    claim is the epsilon of one such ``step``.
    """
    gradient = private_gradient.PrivateGradient(loss, noise=noise)
    multiplier = float(step.noise_multiplier) if noise == DISCRETE else NOISE
    settings = {"l2_clip_norm": CLIP, "normalizer": DIVISOR}
    settings["noise_multiplier"] = multiplier
    # The sum of a block is computed once.
    summed, sums = gradient._sum, {}

    def known_sum(params: Any, blocks: list[Any], clip: Any) -> Any:
        place = id(blocks[0])
        if place not in sums:
            sums[place] = summed(params, blocks, clip)
        return sums[place]

    gradient._sum = known_sum

    numbers = itertools.count()

    def release(key: jax.Array, is_in: bool) -> Any:
        drawn = gradient.noise(params, next(numbers).to_bytes(32, "little"), multiplier)
        released, _ = gradient(params, [blocks[is_in]], drawn, **settings)
        return jax.device_get(released)

    audit = audit_release(
        release,
        claimed=jde.epsilon(step, num_steps=1, delta=list(DELTAS)),
        deltas=DELTAS,
        num_draws=effort.releases,
        score=score,
    )
    return of_bounds(audit.bounds, audit.claimed)


def _audit_rows(
    others: dict[str, np.ndarray],
    unit: dict[str, np.ndarray],
    score: Callable[[Any], Any],
    effort: Effort,
) -> Verdict:
    """Audits rows of contributions; the last row is the unit's."""
    params, blocks = _in_and_out(others, unit)
    return _audit_gradient(_dot, params, blocks, ONCE, score, effort)


def _in_and_out(
    others: dict[str, np.ndarray], unit: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[bool, Rows]]:
    """Zero parameters, and the rows with and without the last unit."""
    number = len(next(iter(others.values())))
    rows = {name: np.vstack([others[name], unit[name]]) for name in unit}
    rows = {name: row.astype(np.float32) for name, row in rows.items()}
    there = np.ones(number + 1, np.float32)
    blocks = {True: Rows(rows, there), False: Rows(rows, there.copy())}
    blocks[False].unit_mask[-1] = 0
    params = {name: np.zeros(row.shape[1], np.float32) for name, row in rows.items()}
    return params, blocks


def loud_unit(effort: Effort) -> Verdict:
    """One unit against three others, all of them much longer than the clip norm."""
    others, unit = np.outer(-0.1 * np.ones(3), _LAYER), {"a": _LAYER}
    return _audit_rows({"a": others}, unit, lambda out: out["a"][0], effort)


def hardened_unit(effort: Effort) -> Verdict:
    """A loud unit against the discrete noise, at twice the others' multiplier."""
    params, blocks = _in_and_out({"a": np.zeros((1, 2))}, {"a": _LAYER})
    step = dataclasses.replace(ONCE, noise_multiplier=2 * NOISE)
    return _audit_gradient(
        _dot, params, blocks, step, lambda out: out["a"][0], effort, DISCRETE
    )


def silent_unit(effort: Effort) -> Verdict:
    """A unit with zero contribution beside another: only the count reveals it."""
    nothing = np.zeros(256)
    others, unit = {"a": nothing[None]}, {"a": nothing}
    return _audit_rows(others, unit, lambda out: -np.sum(out["a"] ** 2), effort)


def two_layers(effort: Effort) -> Verdict:
    """A unit that pulls two layers apart; the attacker looks at their difference."""
    others, unit = dict.fromkeys("ab", np.zeros((1, 2))), {"a": _LAYER, "b": -_LAYER}
    return _audit_rows(others, unit, lambda out: out["a"][0] - out["b"][0], effort)


def _protonet_block(*, with_unit: bool) -> Block:
    """One episode of 1 shot and 1 query; the unit is the only example of class 0.

    Every other query is nearest to its own class, until the unit stands nearer to all
    of them: all their gradients change sign.
    """
    inputs = np.zeros((1, _WAYS, 2, _WAYS - 1), np.float32)
    inputs[0, 1:, 0] = np.eye(_WAYS - 1)
    inputs[0, 1:, 1] = 0.1 * np.eye(_WAYS - 1)
    mask = np.ones((1, _WAYS, 2), np.float32)
    mask[0, 0] = [float(with_unit), 0.0]
    targets = np.broadcast_to(np.arange(_WAYS, dtype=np.float32)[:, None], (_WAYS, 2))
    return Block(inputs, targets[None] * mask, mask, np.ones(1, np.float32))


def support_example(effort: Effort) -> Verdict:
    """A support example of a ProtoNet episode that is clipped as a whole."""
    learner: Any = ProtoNet(lambda params, inputs: params["w"] * inputs, ways=_WAYS)
    return _audit_gradient(
        contribution_loss(learner, (_WAYS, 2), shots=1),
        {"w": np.ones(1, np.float32)},
        {is_in: _protonet_block(with_unit=is_in) for is_in in (True, False)},
        EPISODE,
        lambda out: out["w"][0],
        effort,
    )


def clipped_by_slot(loss: Any, params: Any, unit: Block, clip: jax.Array) -> Any:
    """A fault: each class's queries are a separate contribution."""

    def of_class(place: jax.Array) -> Any:
        is_support = jnp.arange(2) < 1
        is_own = jnp.arange(_WAYS) == place
        kept = jnp.where(is_support | is_own[:, None], unit.slot_mask, 0.0)
        contribution = jax.grad(loss)(params, unit._replace(slot_mask=kept))
        return private_gradient.clip_by_norm(contribution, clip)

    clipped, norm, finite = jax.vmap(of_class)(jnp.arange(_WAYS))
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), clipped)
    return total, jnp.max(norm), jnp.all(finite)


def _described(
    step: jde.GaussianStep, delta: float, draws: int, num_steps: int = 1
) -> Verdict:
    """The accountant's claim about steps against simulated steps."""
    claimed = float(jde.epsilon(step, num_steps=num_steps, delta=delta))
    worlds = worlds_of(*made_up(step), 0, -1.0)
    noise = float(step.noise_multiplier)
    found = divergence(worlds, noise, claimed, draws, num_steps)
    # About three standard errors of a mean of this many draws.
    slack = 3 * np.sqrt(delta * (1 - delta) / draws)
    words = f"delta {found:.4f} drawn, {delta:g} claimed at epsilon {claimed:.3f}"
    return Verdict(bool(found > delta + slack), words)


def swapped_example(effort: Effort) -> Verdict:
    """Without replacement another example takes an example's place: 2C."""
    scheme = jde.WithoutReplacement("example", size=10, population=20)
    return _described(
        jde.GaussianStep(scheme, noise_multiplier=2.0), 0.05, effort.draws
    )


def classmates(effort: Effort) -> Verdict:
    """Examples of drawn tasks, clipped one by one: their task's draw is visible."""
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("task", size=1, population=4),
        jde.WithoutReplacement("example", size=10, population=20),
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=0.8, clip_unit="example", privacy_unit="example"
    )
    return _described(step, 0.05, 5 * effort.draws)


def episodes_of_epochs(effort: Effort) -> Verdict:
    """Every example in its class's episode, which picks a step of an epoch of four."""
    sampling = jde.GroupedClasses(
        num_classes=_WAYS,
        ways=_WAYS,
        episodes=jde.RandomAllocation("episode", steps_per_epoch=4),
        examples=jde.WithoutReplacement("example", size=2, population=2),
    )
    step = jde.GaussianStep(sampling, noise_multiplier=1.0)
    return _described(step, 0.1, effort.draws, num_steps=4)
