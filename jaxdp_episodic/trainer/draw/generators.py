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
    """Returns NumPy's generator on the ChaCha20 stream of a key.

    Someone who sees part of the stream but not the key cannot, by any known attack,
    distinguish the rest from independent fair bits.

    Args:
      key: 32 secret bytes, used for nothing else.

    Raises:
      TypeError, ValueError: any other key.

    Reference: Bernstein (2008), "ChaCha, a variant of Salsa20"; RFC 8439.
    """
    if not isinstance(key, bytes):
        raise TypeError(f"key must be bytes, got {type(key).__name__}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key must have {KEY_BYTES} bytes, got {len(key)}")
    number = int.from_bytes(key, "little")
    stream: Any = ChaCha(key=number, rounds=_ROUNDS)  # implements NumPy's interface
    return np.random.Generator(stream)


class Keys:
    """The source of a run's keys.

    Without a seed each key is fresh entropy from the operating system. With a seed
    (whole number >= 0) a key is a function of seed, purpose and step: repeatable, and
    *not private*.
    """

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

    For your own loops that must repeat a draw; `Trainer` does not need it.

    Args:
      entropy: whole number >= 0 of any size. For a private run use at least 128 random
        bits, and keep them secret as long as the draws.
      step: whole number >= 0; different steps have independent streams.

    Raises:
      TypeError: an argument that is not a whole number.
      ValueError: a negative argument.
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
