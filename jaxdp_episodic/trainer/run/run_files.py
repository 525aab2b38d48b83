"""The lock on a run's folder, the log in the run's file, runs of version 0.2.

Each record of the log has public values (step, epsilon, clip norm: functions of
settings and releases) and private parts, which `releasable_records` leaves out:

* ``"private"``: computed from training data without noise; nothing in the run depends
  on it
* ``"held_out"``, ``"stages"``: scores on held-out people, whom epsilon does not cover
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic.files import atomic
from jaxdp_episodic.files.json_file import json_lines
from jaxdp_episodic.trainer.run.ledger import refuse_other_state
from jaxdp_episodic.trainer.run.ledger_file import (
    OLD_LEDGER,
    STATE,
    STORE,
    LedgerError,
    RunFile,
    old_rows,
    run_file,
)
from jaxdp_episodic.trainer.run.mechanisms import array_types
from jaxdp_episodic.trainer.run.store import BEST, EPOCH, RunStore, new_store

_OLD = (OLD_LEDGER, "journal", "log.jsonl", "checkpoints")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_lent: ContextVar[frozenset[Path]] = ContextVar("lent", default=frozenset())


def files_of_a_run(folder: Path) -> list[str]:
    """Returns which files in a folder belong to a run with a charge or a state."""
    found = [name for name in _OLD if (folder / name).exists()]
    if not (folder / STORE).exists():
        return found
    try:
        with RunFile(folder / STORE) as file:
            is_begun = any(file.charges()) or any(file.texts(STATE))
    except LedgerError:
        is_begun = True  # it is damaged, but must not be overwritten
    return [STORE, *found] if is_begun else found


def was_only_begun(folder: Path) -> bool:
    """Returns whether a run in the folder ended before its first charge."""
    return (folder / STORE).exists() and not files_of_a_run(folder)


def refuse_without_run(folder: Path) -> None:
    """Raises FileNotFoundError if a folder has no run with a state."""
    found = files_of_a_run(folder)
    if STORE in found or "checkpoints" in found:
        return
    there = "no run: begin one there, without resume"
    if found:
        files = " and ".join(found)
        there = f"only {files} of a run, which cannot go on: begin another"
    raise FileNotFoundError(f"no complete checkpoint in {folder}, which has {there}")


def refuse_other_files(folder: Path) -> None:
    """Refuses a folder in which a new run would mix with another."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    found = files_of_a_run(folder)
    if found:
        raise FileExistsError(
            f"{folder} holds a run; resume it, or name another folder "
            f"({' and '.join(found)} would be mixed with the new run's)"
        )


@contextmanager
def locked(folder: Path, *, lends: bool = False) -> Iterator[None]:
    """Locks a folder, which is made if missing; BlockingIOError: a run holds it.

    With ``lends`` a trainer that is called meanwhile in this context may use the lock.
    """
    path, lent = folder.resolve(), _lent.get()
    with ExitStack() as stack:
        if path in lent:  # to this trainer, and to no other that it calls
            stack.callback(_lent.reset, _lent.set(lent - {path}))
        else:
            try:
                stack.enter_context(atomic.locked(folder))
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    why = "is on a file system without locks: name a local one"
                    raise OSError(error.errno, f"{folder} {why}") from None
                raise
        if lends:
            stack.callback(_lent.reset, _lent.set(lent | {path}))
        yield


PRIVATE = "private"
HELD_OUT = "held_out"
STAGES = "stages"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's log; ``path`` is its folder or file."""
    with run_file(path) as file:
        return file.log()


_NOT_PUBLIC = (PRIVATE, HELD_OUT, STAGES)


def releasable_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the public part of each record that has one."""
    public = map(public_record, records)
    return [record for record in public if record.keys() - {"step"}]


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the public part of a record."""
    return {key: value for key, value in record.items() if key not in _NOT_PUBLIC}


def contributions_in_log(
    records: Sequence[Mapping[str, Any]],
) -> tuple[int, int] | None:
    """Returns how many contributions a log's steps drew, and how many were complete."""
    noted = [r[PRIVATE] for r in records if "num_complete" in r.get(PRIVATE, {})]
    if not noted:
        return None
    drawn = sum(int(one["num_units"]) for one in noted)
    return drawn, sum(int(one["num_complete"]) for one in noted)


class StepProgress(NamedTuple):
    """A logged step, as ``on_step`` receives it.

    Attributes:
      step: number of completed steps.
      num_steps: number of steps that the run takes.
      public: the step's public record, for trackers that others see. Empty if epsilons
        were computed from private sizes: then nothing is public before the release.
      private_record: the step's full record, with "private", "held_out" and "stages".
    """

    step: int
    num_steps: int
    public: Mapping[str, Any]
    private_record: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of ``public`` except the step, as trackers take them."""
        found = {k: v for k, v in self.public.items() if isinstance(v, int | float)}
        return {name: float(v) for name, v in found.items() if name != "step"}


# --- Runs of version 0.2 ---

# They were a ledger, a journal of releases since the checkpoint, Orbax checkpoints, a
# log, the best parameters and the running epoch, each in files of its own.
_FORMAT = 5  # of checkpoints
KEPT = "imported"  # folder for the imported files


def import_old_run(folder: Path, like: Any) -> None:
    """Makes ``run.sqlite`` from a run of version 0.2, then moves its files aside.

    The journal is not read. A killed run gives up the steps after its checkpoint.
    """
    if not (folder / OLD_LEDGER).exists():
        return
    if not (folder / STORE).exists():
        _make_store(folder, like)
    (folder / "epoch").unlink(missing_ok=True)  # a secret
    (folder / KEPT).mkdir(exist_ok=True)
    # The ledger last: as long as it is there the import is not finished.
    for file in ("best.npz", *reversed(_OLD)):
        if (folder / file).exists():
            shutil.move(folder / file, folder / KEPT / file)


def _make_store(folder: Path, like: Any) -> None:
    temporary, log = folder / f"{STORE}.importing", folder / "log.jsonl"
    try:
        texts, charges = old_rows(folder / OLD_LEDGER)
        meta, state = _checkpoint(folder / "checkpoints", like)
        run, _, size, digest = meta["ledger"]
        with open(folder / OLD_LEDGER, "rb") as file:
            seen = hashlib.sha256(file.read(size)).hexdigest()
        if run != json.loads(texts[0][2])["run"] or seen != digest:
            raise LedgerError(
                f"{folder}: the ledger is not the checkpoint's, or is an older copy"
            )
        new_store(temporary, texts, charges)
        with closing(RunStore(temporary)) as store:
            for _, record, _ in json_lines(log) if log.exists() else ():
                if isinstance(record, dict):  # else a write was interrupted
                    store.note(record)
            taken = meta["charged_steps"]
            arrays = jax.device_get(jax.tree.leaves(state))
            store.save(taken, arrays, meta["run"], array_types(like), taken)
            for kind, number, kept in _kept(folder, run):
                store.keep(kind, number, kept)
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise LedgerError(f"the run in {folder} is damaged: {error!r}") from error
    temporary.replace(folder / STORE)
    atomic.sync_folder(folder)


def _checkpoint(folder: Path, like: Any) -> tuple[dict[str, Any], Any]:
    # here, as it takes a second and only old runs need it
    import orbax.checkpoint as ocp

    with closing(ocp.CheckpointManager(folder.resolve())) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {folder}")
        wanted: Any = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = manager.restore(step, args=wanted)["meta"]
        checksum = meta.pop("sha256", None)
        text = json.dumps(meta, sort_keys=True).encode()
        is_whole = checksum == hashlib.sha256(text).hexdigest()
        stated = meta["format"], meta["charged_steps"], meta["ledger"] is None
        if not is_whole or stated != (_FORMAT, step, False):
            raise LedgerError(f"checkpoint {folder / str(step)} is damaged or renamed")
        refuse_other_state(meta["state"], array_types(like))
        # Planned runs had no scores.
        fields = like._asdict()
        if not jax.tree.leaves(like.scores):
            del fields["scores"]
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(fields))
        found = manager.restore(step, args=wanted)["state"]
        return meta, like._replace(**found)


def _kept(folder: Path, run: str) -> Iterator[tuple[str, int, list[np.ndarray]]]:
    """The running epoch and the best parameters, if there are any."""
    epoch, best = folder / "epoch", folder / "best.npz"
    if epoch.exists():
        content = epoch.read_bytes()
        digest, content = content[:32], content[32:]
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            if hashlib.sha256(content).digest() != digest or str(found["run"]) != run:
                raise LedgerError(f"{epoch} is damaged, or another run's")
            yield EPOCH, int(found["epoch"]), [np.frombuffer(content, np.uint8)]
    if best.exists():
        with np.load(best, allow_pickle=False) as found:
            params = [found[name] for name in found.files if name.startswith("params")]
            yield BEST, int(found["step"]), params
