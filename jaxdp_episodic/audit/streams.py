"""Random numbers for simulations of 10^10 steps: many small generators side by side.

xoshiro128++ costs a fraction of threefry and passes the batteries of tests (BigCrush,
PractRand) that a simulation needs. Each lane is a generator of its own whose 128-bit
state comes from threefry: that two lanes overlap has a probability below
``lanes^2 2^-94`` for 2^32 numbers each. It is for audits only; nothing that is released
is ever made with it.

Reference: Blackman and Vigna (2021), "Scrambled Linear Pseudorandom Number Generators",
ACM TOMS 47(4), arXiv:1805.01407, xoshiro128++.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

State = tuple[Array, Array, Array, Array]


def seeded(key: Array, lanes: int) -> State:
    """Returns the states of so many generators, each (lanes,) uint32."""
    words = jax.random.bits(key, (4, lanes), jnp.uint32)
    # The one state that stays where it is.
    stuck = jnp.all(words == 0, axis=0)
    return words[0], words[1], words[2], jnp.where(stuck, jnp.uint32(1), words[3])


def next_bits(state: State) -> tuple[Array, State]:
    """Returns 32 fresh bits of every lane, (lanes,) uint32, and the next states."""
    s0, s1, s2, s3 = state
    bits = _rotated(s0 + s3, 7) + s0
    moved = s1 << 9
    s2 = s2 ^ s0
    s3 = s3 ^ s1
    s1 = s1 ^ s2
    s0 = s0 ^ s3
    s2 = s2 ^ moved
    return bits, (s0, s1, s2, _rotated(s3, 11))


def normal_pairs(state: State) -> tuple[tuple[Array, Array], State]:
    """Returns two independent standard normal numbers of every lane, float32.

    Box and Muller's (1958) radius is made from 32 bits, so the tails reach 6.66
    deviations and chances above 1e-7 are right to 1 %; float32 numbers made from 23
    bits, as `jax.random.normal` makes them, end at 5.4.
    """
    first, state = next_bits(state)
    second, state = next_bits(state)
    # (bits + 1/2) / 2^32 in float32: relative precision where it is small.
    uniform = (first.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # It rounds to 1 at most, where the logarithm is 0.
    radius = jnp.sqrt(-2.0 * jnp.log(uniform))
    angle = second.astype(jnp.float32) * jnp.float32(2 * math.pi * 2.0**-32)
    return (radius * jnp.cos(angle), radius * jnp.sin(angle)), state


def _rotated(word: Array, places: int) -> Array:
    return (word << places) | (word >> (32 - places))
