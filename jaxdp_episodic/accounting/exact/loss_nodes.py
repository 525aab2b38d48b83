"""Steps of a run as the contour's kernels take them: the laws of their losses.

One jitted kernel for each kind of step, for both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.accounting.exact.mgf import Steps
from jaxdp_episodic.accounting.rdp.kernels import StepGroup
from jaxdp_episodic.accounting.run import ANTIPODAL, EPISODES, SAMPLED
from jaxdp_episodic.losses.loss_laws import (
    NUM_NODES,
    LossLaw,
    antipodal_law,
    sampled_law,
    swapped_law,
)
from jaxdp_episodic.numerics.combinatorics import log_binomial

# Height of the checking path, and by how many nats it is cut later: other nodes. Much
# lower, the terms of rare large losses would fall off too slowly on contours that lean
# as the law itself allows, and the check be what is off.
_CHECK_HEIGHT, _CHECK_CUT = 0.9, -8.0
# No law is cut nearer than where the density is e^-18 of its peak.
_LEAST_CUT = -18.0
# Above this rate most losses are not at one place.
_LARGEST_SPIKE_RATE = 0.99


@functools.cache
def steps_kernel(
    kind: str, num_terms: int, num_nodes: int = NUM_NODES
) -> Callable[..., Steps]:
    """The jitted `Steps` of a kind; ``num_terms`` of independent episodes, else 1.

    The kernel takes a `StepGroup` (K, n), ``backward`` (n,) 1 or 0, and ``log_cut``
    (n,): the logarithm of the density at which the laws are cut.
    """

    def kernel(group: StepGroup, backward: Array, log_cut: Array) -> Steps:
        sizes = (num_terms, num_nodes)
        return _steps(kind, sizes, group, backward, log_cut)

    return jax.jit(kernel)


def _steps(
    kind: str,
    sizes: tuple[int, int],
    group: StepGroup,
    backward: Array,
    log_cut: Array,
) -> Steps:
    shape = group.count.shape
    fields, back, cut = (
        jax.tree.map(lambda a: jnp.broadcast_to(a, shape).reshape(-1), arrays)
        for arrays in (group, backward, log_cut)
    )
    # What the unit is not even drawn for need not be waited for.
    cut = cut - jnp.log(fields.outer_rate)
    # The law and the one that checks it.
    cuts = jnp.minimum(jnp.stack([cut, cut + _CHECK_CUT]), _LEAST_CUT)
    heights = jnp.stack([jnp.ones_like(cut), jnp.full_like(cut, _CHECK_HEIGHT)])
    laws = _laws(kind, sizes, fields, back, cuts, heights)
    law, check = (jax.tree.map(lambda a, i=i: a[i], laws) for i in (0, 1))
    always = (group.outer_rate >= 1) & (kind == SAMPLED)
    rate = group.rate
    gaussian = (rate >= 1) & (kind == SAMPLED)
    spiked = always & (rate < _LARGEST_SPIKE_RATE)
    sign = 1 - 2 * backward
    zero = jnp.zeros_like(rate)
    spike = jnp.log1p(-jnp.where(spiked, rate, 0.0))
    blurred = (group.outer_rate < 1) & (kind == SAMPLED)
    return Steps(
        law,
        check,
        group.count,
        group.outer_rate,
        jnp.where(spiked, sign * spike, zero),
        jnp.where(gaussian, group.shift, zero),
        jnp.where(blurred, group.outer_rate * rate, zero),
    )


def _laws(
    kind: str,
    sizes: tuple[int, int],
    group: StepGroup,
    backward: Array,
    log_cut: Array,
    height: Array,
) -> LossLaw:
    """Laws of (m,) steps, cut (2, m); ``sizes`` are numbers of terms and of nodes."""
    rate, shift, path = group.rate, group.shift, (log_cut, height, sizes[1])
    if kind == SAMPLED:
        return sampled_law(rate, shift, backward, *path)
    if kind == ANTIPODAL:
        return antipodal_law(rate, group.inner_rate, shift, *path)
    if kind != EPISODES:
        return swapped_law(rate, shift, *path)
    return _episodes_law(sizes, group, log_cut, height)


def _episodes_law(
    sizes: tuple[int, int], group: StepGroup, log_cut: Array, height: Array
) -> LossLaw:
    """Mixture over the number k of draws of swaps of k contributions.

    ``num_episodes`` of the group is the number of terms, ``inner_rate`` that of the
    episodes.
    """
    num_terms, num_nodes = sizes
    size = group.count.shape[0]
    terms = jnp.arange(1, num_terms + 1, dtype=log_cut.dtype)[:, None]
    k = jnp.minimum(terms, group.num_episodes)
    log_absent = jnp.log1p(-group.rate)
    episodes = group.inner_rate
    any_rate = -jnp.expm1(episodes * log_absent)
    rest = episodes - k
    log_weight = log_binomial(episodes, k) + k * jnp.log(group.rate)
    log_weight += jnp.where(rest > 0, rest * log_absent, 0.0) - jnp.log(any_rate)
    # Rarer than what is cut off anyway: left out.
    used = (terms <= group.num_episodes) & (log_weight > log_cut[:, None])
    weight = jnp.where(used, jnp.exp(log_weight), 0.0)
    log_cut = jnp.minimum(log_cut[:, None] - log_weight, _LEAST_CUT)

    def flat(a: Array) -> Array:
        """(..., terms, m) to (..., terms m), of any shape that broadcasts."""
        wide = jnp.broadcast_to(a, (*a.shape[:-2], num_terms, size))
        return wide.reshape(*a.shape[:-2], -1)

    shift = k * group.shift
    laws = swapped_law(
        flat(any_rate[None]),
        flat(shift),
        flat(log_cut),
        flat(height[:, None]),
        num_nodes,
    )
    return jax.vmap(_mixed)(laws, weight, used)


def _mixed(law: LossLaw, weight: Array, used: Array) -> LossLaw:
    """The mixture of the laws of all terms, (J, terms m), with (terms, m) weights."""
    num_terms, size = weight.shape

    def apart(a: Array) -> Array:
        """(J, terms m) to (J, terms, m)."""
        return a.reshape(-1, num_terms, size)

    def nodes(a: Array) -> Array:
        """(J, terms, m) to (terms J, m): those of no weight come last."""
        return jnp.swapaxes(a, 0, 1).reshape(-1, size)

    def mixed(a: Array) -> Array:
        return jnp.sum(a.reshape(num_terms, size) * weight, axis=0)

    def smallest(a: Array) -> Array:
        return jnp.min(jnp.where(used, a.reshape(num_terms, size), jnp.inf), axis=0)

    return LossLaw(
        (nodes(apart(law.loss[0])), nodes(apart(law.loss[1]))),
        (nodes(apart(law.weight[0]) * weight), nodes(apart(law.weight[1]) * weight)),
        mixed(law.mass),
        mixed(law.size),
        smallest(law.right),
        smallest(law.left),
        nodes(apart(law.end_log_weight) + jnp.log(weight)),
        nodes(apart(law.end_loss)),
    )
