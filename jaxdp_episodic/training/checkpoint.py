"""Checkpoints: everything that a run is, in one atomic commit.

A checkpoint holds parameters, optimizer state, the number of steps charged, a mark of
the ledger, the entropy of the sampler and the noise key, and a description of the run.
It is secret: with the noise key the noise can be subtracted from what was released.
What may leave the house is made by `jaxdp_episodic.training.report`, without a key.

Orbax writes into a temporary folder and renames it when it is complete, so a run that
is killed at any moment leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets as system_entropy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdp_episodic import _validation
from jaxdp_episodic.report.ledger_file import LedgerMark

FORMAT = 2
_KEPT = 2
# How Orbax calls what is not complete.
_UNFINISHED = ".orbax-checkpoint-tmp"
# What a checkpoint's description must hold besides its format.
_META = ("charged_steps", "sampler_entropy", "noise_key", "ledger", "run")


class Secrets(NamedTuple):
    """What makes a run reproducible, and must never be released.

    Attributes:
      sampler_entropy: whole number of up to 256 bits, from which the draws follow.
      noise_key: (2,) uint32, key data of the noise.
    """

    sampler_entropy: int
    noise_key: np.ndarray


class Snapshot(NamedTuple):
    """One checkpoint.

    Attributes:
      state: pytree of arrays: parameters and optimizer state.
      charged_steps: steps charged to the budget when it was taken.
      secrets: see there.
      run: what the run is; see `refuse_other_run`.
      ledger: the run's ledger as it was, which it must contain for ever; None if there
        is no ledger.
    """

    state: Any
    charged_steps: int
    secrets: Secrets
    run: Mapping[str, Any]
    ledger: LedgerMark | None = None


class RunMismatchError(ValueError):
    """A checkpoint belongs to a run with other settings."""


class Checkpoints:
    """The checkpoints of one run, in one folder; a context manager.

    Args:
      folder: made if missing, with mode 700.
      keep: how many of the latest are kept.
    """

    def __init__(self, folder: Path, *, keep: int = _KEPT) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        with _quiet():
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Number of charged steps of the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, snapshot: Snapshot) -> None:
        """Commits one checkpoint; when this returns it is complete.

        Raises:
          OSError: no space, or no permission. Earlier checkpoints are untouched; what
            was written of this one is removed, at the latest with the next opening.
        """
        ledger = snapshot.ledger
        meta = {
            "format": FORMAT,
            "charged_steps": snapshot.charged_steps,
            "sampler_entropy": f"{snapshot.secrets.sampler_entropy:x}",
            "noise_key": [int(word) for word in snapshot.secrets.noise_key],
            "ledger": None if ledger is None else list(ledger),
            "run": snapshot.run,
        }
        with self._or_os_error(snapshot.charged_steps):
            self._manager.save(
                snapshot.charged_steps,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(snapshot.state),
                    meta=ocp.args.JsonSave(meta),
                ),
                force=True,
            )
            self._manager.wait_until_finished()
        _sync_folder(self.folder)

    def remove_unfinished(self) -> None:
        """Removes what processes that were killed left of checkpoints.

        Only for whoever holds the folder: another process may be writing one.
        """
        for path in self.folder.glob("*" + _UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _or_os_error(self, step: int) -> Iterator[None]:
        """Orbax's many kinds of errors of a disk as one, without what was written."""
        try:
            with _quiet(logging.CRITICAL):
                yield
        except Exception as error:
            self.remove_unfinished()
            code = getattr(error, "errno", None) or errno.EIO
            reason = str(error).partition("[")[0].strip() or type(error).__name__
            if f"os_error_code='{errno.ENOSPC}'" in str(error):
                code, reason = errno.ENOSPC, os.strerror(errno.ENOSPC)
            raise OSError(
                code, f"checkpoint of step {step} could not be written: {reason}"
            ) from error

    def restore(self, like: Any, run: Mapping[str, Any]) -> Snapshot:
        """Returns the latest checkpoint, if it is one of this run.

        Args:
          like: a state of the same structure, shapes and types.
          run: description of the run that wants to go on.

        Raises:
          FileNotFoundError: no complete checkpoint.
          RunMismatchError: a checkpoint of another run; the message lists what differs.
          ValueError: a checkpoint that is damaged or of an unknown format.
        """
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self.folder}")
        with _quiet():
            meta = self._meta(step)
            refuse_other_run(saved=meta["run"], wanted=run)
            try:
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))
                )
            except Exception as error:  # Orbax raises many kinds for a damaged file
                raise ValueError(
                    f"checkpoint {self.folder / str(step)} is damaged: {error}"
                ) from error
        if meta["charged_steps"] != step:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} says that "
                f"{meta['charged_steps']} steps were charged: it was renamed or edited"
            )
        try:
            secrets = Secrets(
                int(meta["sampler_entropy"], 16), np.array(meta["noise_key"], np.uint32)
            )
            mark = meta["ledger"]
            ledger = None if mark is None else LedgerMark(*mark)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} is damaged: {error}"
            ) from error
        return Snapshot(restored["state"], step, secrets, meta["run"], ledger)

    def _meta(self, step: int) -> dict[str, Any]:
        path = self.folder / str(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
            meta = restored["meta"]
        except Exception as error:  # as above
            raise ValueError(f"checkpoint {path} is damaged: {error}") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(
                f"checkpoint {path}: format must be {FORMAT}, "
                f"got {meta.get('format') if isinstance(meta, dict) else meta!r}"
            )
        missing = [name for name in _META if name not in meta]
        if missing or not isinstance(meta["run"], dict):
            raise ValueError(
                f"checkpoint {path} is damaged: "
                + (f"without {', '.join(missing)}" if missing else "run is no object")
            )
        return meta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _quiet():
            self._manager.close()


def refuse_other_run(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to go on with a run whose description differs, and shows how.

    Args:
      saved: description in the checkpoint.
      wanted: description of the run that wants to go on. Nested dictionaries of plain
        values, as in JSON.

    Raises:
      RunMismatchError: they differ anywhere.
    """
    old, new = _flat(saved), _flat(json.loads(json.dumps(wanted)))
    missing = "(nothing)"
    differences = [
        f"{key}: {old.get(key, missing)} in the checkpoint, {new.get(key, missing)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing)
    ]
    if differences:
        raise RunMismatchError(
            "the checkpoint is of another run: " + "; ".join(differences)
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists as one dictionary of dotted keys."""
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{k}" if prefix else str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(f"{prefix}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flat(item, key).items()}


def new_secrets(seed: int | None) -> Secrets:
    """Returns fresh secrets; those of a seed, which somebody knows, are none.

    Raises:
      TypeError: a seed that is no number.
      ValueError: one that is negative, or several.
    """
    if seed is None:
        key = np.frombuffer(system_entropy.token_bytes(8), np.uint32)
        return Secrets(system_entropy.randbits(256), key)
    array = _validation.integer_array("seed", seed, minimum=0)
    if array.ndim:
        raise ValueError(f"seed must be a number, got {seed!r}")
    entropy = int(array)
    sampler, noise = np.random.SeedSequence(entropy).spawn(2)
    words = sampler.generate_state(8, np.uint32)
    return Secrets(
        int.from_bytes(words.tobytes(), "little"), noise.generate_state(2, np.uint32)
    )


def as_arrays(state: Any) -> Any:
    """The state with every leaf a JAX array, which is what Orbax stores."""
    return jax.tree.map(jax.numpy.asarray, state)


def _sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet(most: int = logging.ERROR) -> Iterator[None]:
    """Keeps Orbax's notices of every save off the screen, this level excepted."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(most)
    try:
        yield
    finally:
        logger.setLevel(level)
