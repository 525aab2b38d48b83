"""A run's randomness: keys that are used once, and the streams they expand to.

A key is 32 bytes. In a private run each key comes fresh from the operating system,
serves one draw or one step's noise, and is then forgotten. It is never stored, so it
cannot be read from disk or used twice.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np
from randomgen import ChaCha

from jaxdp_episodic import _validation

# Length of a key in bytes: ChaCha20 takes 256 bits.
KEY_BYTES = 32
# ChaCha rounds: the number in RFC 8439, the full security margin.
_ROUNDS = 20


def generator(key: bytes) -> np.random.Generator:
    """Returns NumPy's generator on the ChaCha20 stream of 32 secret bytes."""
    # Someone who sees part of the stream but not the key cannot, by any known attack,
    # distinguish the rest from independent fair bits. Bernstein (2008), "ChaCha, a
    # variant of Salsa20"; RFC 8439.
    if not isinstance(key, bytes):
        raise TypeError(f"key must be bytes, got {type(key).__name__}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key must have {KEY_BYTES} bytes, got {len(key)}")
    number = int.from_bytes(key, "little")
    stream: Any = ChaCha(key=number, rounds=_ROUNDS)  # implements NumPy's interface
    return np.random.Generator(stream)


class Keys:
    """The source of a run's keys: fresh entropy, or with a seed *not private*."""

    def __init__(self, seed: int | None) -> None:
        self.is_seeded = seed is not None
        self._seed = 0
        if seed is not None:
            self._seed = _validation.whole_number("seed", seed, minimum=0)

    def new(self, purpose: str, number: int) -> bytes:
        """Returns 32 bytes for one use, such as the draw of a step."""
        if not self.is_seeded:
            return secrets.token_bytes(KEY_BYTES)
        return _hashed(purpose, self._seed, number)


def step_generator(entropy: int, step: int) -> np.random.Generator:
    """Returns the generator of one draw, a function of its arguments.

    A private run needs an entropy of at least 128 random bits, as secret as the draws.
    """
    for name, value in {"entropy": entropy, "step": step}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number >= 0, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be a whole number >= 0, got {value}")
    return generator(_hashed("draw", int(entropy), int(step)))


def _hashed(purpose: str, entropy: int, number: int) -> bytes:
    """Returns SHA3-256 of all three; spaces separate them unambiguously."""
    return hashlib.sha3_256(f"{purpose} {number} {entropy:x}".encode()).digest()
