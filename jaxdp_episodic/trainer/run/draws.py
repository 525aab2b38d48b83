"""The draws of a run's steps: each by a key of its own, epochs drawn at their start.

Who takes part in which step of an epoch is the one secret that must outlive a step. It
is kept in the run's file while the epoch runs, and overwritten then.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.trainer.draw.generators import Keys, generator
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.gradient.processes import Processes
from jaxdp_episodic.trainer.learners.episode import Block
from jaxdp_episodic.trainer.run.store import EPOCH, RunStore

# Of each step of an epoch: who takes part; see `EpisodeSampler.begin_epoch`.
Epoch = list[np.ndarray]


class DrawSecret(NamedTuple):
    """What the draw of one step follows from."""

    key: bytes  # of its generator, for this draw alone
    # Of a sampling by epochs, who takes part in the step; else None.
    members: np.ndarray | None


class PreparedStep(NamedTuple):
    """What a step needs beyond the parameters, made ahead by another thread."""

    step: int  # its number
    blocks: list[Block]  # of its draw
    noise: Any  # for its sum; in the first process alone
    complete: int  # contributions of its draw, in all processes


class RunDraws:
    """What each step of a run draws; the first epoch begins with step ``first``."""

    def __init__(
        self, sampler: EpisodeSampler, keys: Keys, processes: Processes, first: int
    ) -> None:
        self._sampler, self._keys, self._processes = sampler, keys, processes
        self._first, self._length = first, sampler.steps_per_epoch
        self._epochs: dict[int, Epoch] = {}  # by number: the running one and the next
        self._kept: int | None = None  # number of the one that is kept
        self._lost: tuple[int, Path] | None = None  # one that is gone

    def secret(self, step: int) -> DrawSecret:
        """Returns what a step's draw follows from: new each call, the same in all."""
        key, members = b"", None
        if self._processes.is_first:
            key = self._keys.new("draw", step)
            if self._length is not None:
                number, index = divmod(step - self._first, self._length)
                members = self._epoch(number)[index]
        self._processes.meet()  # the first may evaluate for long, or have failed
        return DrawSecret(
            self._processes.shared_bytes(key),
            None if self._length is None else self._shared(members),
        )

    def draw(self, secret: DrawSecret) -> Draw:
        """Returns the draw of a secret; safe in any thread."""
        return self._sampler.draw(generator(secret.key), secret.members)

    def keep(self, store: RunStore, step: int) -> None:
        """Writes the epoch of the next step to the run's file, or raises OSError."""
        if self._length is None or step < self._first:
            return
        number = (step - self._first) // self._length
        if self._kept == number:
            return
        epoch = self._epoch(number)
        for old in [n for n in self._epochs if n < number]:
            del self._epochs[old]
        file = io.BytesIO()
        lengths = np.array([len(rows) for rows in epoch])
        np.savez(file, lengths=lengths, units=np.concatenate(epoch))
        store.keep(EPOCH, number, [np.frombuffer(file.getvalue(), np.uint8)])
        self._kept = number

    def end(self, store: RunStore, step: int, *, is_last: bool) -> None:
        """Erases the epoch after its last step, or the run's."""
        if self._length is None or step < self._first:
            return
        if is_last or (step - self._first + 1) % self._length == 0:
            store.forget(EPOCH)
            self._kept = None

    def take_up(self, store: RunStore, step: int) -> None:
        """Reads the epoch of a resumed run, which cannot go on without it."""
        if self._length is None or self._keys.is_seeded or step < self._first:
            return
        number, index = divmod(step - self._first, self._length)
        if index == 0:
            return  # it has released nothing, and is drawn afresh
        kept = store.kept(EPOCH)
        if kept is None or kept[0] != number:
            self._lost = number, store.path
            return
        file = io.BytesIO(kept[1][0].tobytes())
        with np.load(file, allow_pickle=False) as found:
            ends = np.cumsum(found["lengths"])[:-1]
            self._epochs[number] = np.split(found["units"], ends)
        self._kept = number

    def _epoch(self, number: int) -> Epoch:
        if self._lost is not None and self._lost[0] == number:
            raise FileNotFoundError(
                f"the epoch in {self._lost[1]} is gone: who takes part in which step "
                f"of epoch {number + 1}, which has begun, is not known: it cannot go on"
            )
        if number not in self._epochs:
            key = self._keys.new("epoch", number)
            self._epochs[number] = self._sampler.begin_epoch(generator(key))
        return self._epochs[number]

    def _shared(self, members: Any) -> np.ndarray:
        if self._processes.count == 1:
            return members
        file = io.BytesIO()
        if members is not None:
            np.save(file, members)
        return np.load(io.BytesIO(self._processes.shared_bytes(file.getvalue())))
