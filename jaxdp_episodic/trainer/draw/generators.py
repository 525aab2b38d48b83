"""The randomness of a run: keys that are used once, and the streams they expand to.

A key is 32 bytes. Of a private run each is fresh from the operating system, made for
one draw or for one step's noise, and forgotten with it: what is on no disk cannot be
read from one, and what is never made twice cannot be used twice.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np
from randomgen import ChaCha

from jaxdp_episodic import _validation

# Bytes of a key: ChaCha20 takes 256 bits.
KEY_BYTES = 32
# Of ChaCha: the number of RFC 8439, with the full margin against attacks.
_ROUNDS = 20


def generator(key: bytes) -> np.random.Generator:
    """Returns the random generator of a key: NumPy's on the stream of ChaCha20.

    Whoever sees part of the stream, and not the key, cannot tell the rest from fair
    coins by any attack known.

    The key has 32 secret bytes, used for nothing else; what else is refused.

    Reference: Bernstein (2008), "ChaCha, a variant of Salsa20"; RFC 8439.
    """
    if not isinstance(key, bytes):
        raise TypeError(f"key must be bytes, got {type(key).__name__}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key must have {KEY_BYTES} bytes, got {len(key)}")
    number = int.from_bytes(key, "little")
    stream: Any = ChaCha(key=number, rounds=_ROUNDS)  # NumPy knows it by its methods
    return np.random.Generator(stream)


class Keys:
    """Where a run's keys come from.

    Without a seed each key is fresh entropy of the operating system. A seed, a whole
    number >= 0, makes every key a function of it, its purpose and its step: repeatable,
    and *not private*.
    """

    def __init__(self, seed: int | None) -> None:
        self.is_seeded = seed is not None
        self._seed = 0
        if seed is not None:
            self._seed = _validation.whole_number("seed", seed, minimum=0)

    def new(self, purpose: str, number: int) -> bytes:
        """Returns 32 bytes for one use, such as "draw" of a step."""
        if not self.is_seeded:
            return secrets.token_bytes(KEY_BYTES)
        return _hashed(purpose, self._seed, number)


def step_generator(entropy: int, step: int) -> np.random.Generator:
    """Returns the generator of one draw, a function of its arguments.

    For loops of your own that must repeat a draw; `Trainer` does not need it.

    Args:
      entropy: whole number >= 0 of any size; for a private run 128 random bits or more,
        which stay secret as long as the draws.
      step: whole number >= 0; different steps have independent streams.

    Raises:
      TypeError: an argument that is not a whole number.
      ValueError: a negative one.
    """
    for name, value in {"entropy": entropy, "step": step}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number >= 0, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be a whole number >= 0, got {value}")
    return generator(_hashed("draw", int(entropy), int(step)))


def _hashed(purpose: str, entropy: int, number: int) -> bytes:
    """SHA3-256 of all three, which spaces keep apart."""
    return hashlib.sha3_256(f"{purpose} {number} {entropy:x}".encode()).digest()
