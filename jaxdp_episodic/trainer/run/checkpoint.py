"""The state of a run, and checkpoints: everything that it is, in one atomic commit.

A checkpoint holds parameters, optimizer state, the number of steps that they contain, a
mark of the ledger and a description of the run. All of it follows from what was
released: no key of any noise or draw is in it. It is private all the same, as it names
the data; what may leave the house is made by `jaxdp_episodic.trainer.run.report`.

Orbax writes into a temporary folder and renames it when it is complete, so a run that
is killed at any moment leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxdp_episodic.accountant.report.ledger_content import LedgerMark
from jaxdp_episodic.files.atomic import sync_folder, sync_tree
from jaxdp_episodic.files.json_file import differences
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners.optimizers import average_of
from jaxdp_episodic.trainer.run.description import RunMismatchError, refuse_other_run

FORMAT = 5  # of a checkpoint; others are refused
_KEPT = 2  # latest checkpoints in a folder
# Suffix of Orbax's folders that are not complete.
_UNFINISHED = ".orbax-checkpoint-tmp"
# Errors of Orbax while writes of an earlier save go on: the folder that it removed and
# makes again exists, or is not empty.
_FOLDER_ERRORS = (errno.EEXIST, errno.ENOTEMPTY)
_TRIES = 40  # of a save that meets them
_PAUSE = 0.05  # seconds between two tries
# Fields of a checkpoint's description besides its format and checksum.
_META = ("charged_steps", "ledger", "run", "state")


class Snapshot(NamedTuple):
    """One checkpoint."""

    state: Any  # pytree of arrays: parameters and optimizer state
    charged_steps: int  # steps that it contains, those given up included
    run: Mapping[str, Any]  # what the run is; see `described_run`
    # The run's ledger as it was, which it must contain for ever; None if there is no
    # ledger.
    ledger: LedgerMark | None = None


class TrainingState(NamedTuple):
    """What changes from step to step."""

    params: Any  # pytree of float arrays
    optimizer_state: Any  # of the optax optimizer
    start: Any = ()  # what the private statistics came to; () without
    # Of the next step, float32, where it follows a quantile; () elsewhere.
    clip_norm: Any = ()


def released_params(state: TrainingState) -> Any:
    """Returns the parameters to evaluate and release: the last, or an average.

    With private statistics: ``{"start": what they released, "model": …}``.
    """
    model = average_of(state.params, state.optimizer_state)
    if not state.start:
        return model
    return {"start": state.start.released(), "model": model}


def initial_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    start: Any = (),
    clip_norm: float | None = None,
) -> TrainingState:
    """Returns the state before the first step; None: the clip norm never changes.

    Gradients are float32 or float64, and so is what the optimizer keeps, also of
    parameters of lower precision: it would change its type at the first step, and come
    back rounded from a checkpoint.
    """
    dtype = training_dtype(params)

    def widened(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    kept = optimizer.init(jax.tree.map(widened, params))
    first = () if clip_norm is None else jnp.asarray(clip_norm, jnp.float32)
    return TrainingState(params, as_arrays(kept), start, first)


class Checkpoints:
    """The checkpoints of one run, in one folder; a context manager.

    Args:
      folder: made if missing, with mode 700; the two latest are kept.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        # Of several processes the first one alone: the others hold no run.
        several: dict[str, Any] = {"active_processes": {0}}
        several["barrier_sync_key_prefix"] = "jaxdp-episodic"
        self._is_one_of_several = jax.process_count() > 1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT,
            enable_async_checkpointing=False,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, **(several if self._is_one_of_several else {})
            ),
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
            was written of this one is removed, at the latest with the next one.
        """
        ledger, state = snapshot.ledger, snapshot.state
        if self._is_one_of_several:  # Orbax takes arrays for shared among processes
            state = jax.tree.map(np.asarray, state)
        meta = {
            "format": FORMAT,
            "charged_steps": snapshot.charged_steps,
            "ledger": None if ledger is None else list(ledger),
            "run": snapshot.run,
            "state": _kinds(state),
        }
        meta["sha256"] = _checksum(meta)
        with self._or_os_error(snapshot.charged_steps):
            self._commit(
                snapshot.charged_steps,
                ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
        # When one of its writes fails Orbax does not wait for the others: they may have
        # made the temporary folder again after it was removed.
        self.remove_unfinished()
        # Orbax syncs arrays alone, and the journal is emptied once this is on the disk.
        sync_tree(self.folder / str(snapshot.charged_steps))
        sync_folder(self.folder)

    def _commit(self, step: int, content: Any) -> None:
        """Saves by Orbax, once the writes of an interrupted save before it are over.

        After a full disk, or Ctrl-C, nothing waits for them, and this save would fail
        by a folder that is not empty. Where the checkpoint is complete, and an older
        one could not be removed, nothing is tried again.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                self._manager.save(step, args=content, force=True)
                self._manager.wait_until_finished()
                return
            except OSError as error:
                is_there = step in self._manager.all_steps()
                if error.errno not in _FOLDER_ERRORS or is_there or not tries_left:
                    raise
            self.remove_unfinished()
            time.sleep(_PAUSE)

    def remove_unfinished(self) -> None:
        """Removes what processes that were killed, or full disks, left of checkpoints.

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
            words = getattr(error, "strerror", None) or str(error).partition("[")[0]
            reason = words.strip() or type(error).__name__
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
          RunMismatchError: a checkpoint of another run, or of another model or
            optimizer; the message lists what differs.
          ValueError: a checkpoint that is damaged or of an unknown format.
        """
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self.folder}")
        path = self.folder / str(step)
        with _quiet():
            meta = self._meta(step)
            refuse_other_run(saved=meta["run"], wanted=run)
            _refuse_other_state(meta["state"], _kinds(like))
            with _or_damaged(path):
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))
                )
        if meta["charged_steps"] != step:
            raise ValueError(
                f"checkpoint {path} says that {meta['charged_steps']} steps were "
                "charged: it was renamed or edited"
            )
        with _or_damaged(path):
            mark = meta["ledger"]
            ledger = None if mark is None else LedgerMark(*mark)
        return Snapshot(restored["state"], step, meta["run"], ledger)

    def _meta(self, step: int) -> dict[str, Any]:
        path = self.folder / str(step)
        with _or_damaged(path):
            restored = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
            meta = restored["meta"]
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(
                f"checkpoint {path}: format must be {FORMAT}, "
                f"got {meta.get('format') if isinstance(meta, dict) else meta!r}"
            )
        if meta.pop("sha256", None) != _checksum(meta):
            raise ValueError(
                f"checkpoint {path} is damaged or edited: the checksum of its meta is "
                "another"
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

    def __exit__(self, *exception: object) -> None:
        with _quiet():
            self._manager.close()


def _checksum(meta: Mapping[str, Any]) -> str:
    """SHA-256 of what is said of a checkpoint, however its keys are ordered."""
    text = json.dumps(meta, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kinds(state: Any) -> dict[str, str]:
    """Types and shapes of a state's arrays, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in leaves
    }


def _refuse_other_state(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses arrays other than those of this run's state."""
    found = differences(saved, wanted, "in the checkpoint", "now")
    if found:
        first = "; ".join(f"{key}: {words}" for key, words in list(found.items())[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunMismatchError(
            "the checkpoint is of another model or optimizer: resume with the run's "
            f"own ({first}{more})"
        )


@contextmanager
def _or_damaged(path: Path) -> Iterator[None]:
    """Orbax's many kinds of errors of a damaged file as one."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}") from error


def as_arrays(state: Any) -> Any:
    """The state with every leaf a JAX array, which is what Orbax stores."""
    return jax.tree.map(jnp.asarray, state)


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
