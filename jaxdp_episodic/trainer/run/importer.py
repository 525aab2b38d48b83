"""Imports runs of version 0.2 into ``run.sqlite``.

They were a ledger, a journal of releases, Orbax checkpoints, a log, the best parameters
and the running epoch, each in files of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accountant.report.ledger_file import (
    OLD_LEDGER,
    STORE,
    LedgerError,
    old_rows,
)
from jaxdp_episodic.files.atomic import sync_folder
from jaxdp_episodic.trainer.run.ledger import refuse_other_state
from jaxdp_episodic.trainer.run.mechanisms import array_types
from jaxdp_episodic.trainer.run.run_files import read_log
from jaxdp_episodic.trainer.run.store import BEST, EPOCH, RunStore, new_store

_HEAD = struct.Struct("<QQQ8s8s")  # step, checkpoint, length, run, hash of these
_FORMAT = 5  # of checkpoints
KEPT = "imported"  # folder for the imported files


def import_old_run(folder: Path, like: Any) -> None:
    """Makes ``run.sqlite`` from a run of version 0.2, then moves its files aside."""
    if not (folder / OLD_LEDGER).exists():
        return
    if not (folder / STORE).exists():
        _make_store(folder, like)
    (folder / "epoch").unlink(missing_ok=True)  # a secret
    (folder / KEPT).mkdir(exist_ok=True)
    # The ledger last: as long as it is there the import is not finished.
    for file in ("journal", "checkpoints", "log.jsonl", "best.npz", OLD_LEDGER):
        if (folder / file).exists():
            shutil.move(folder / file, folder / KEPT / file)


def _make_store(folder: Path, like: Any) -> None:
    try:
        texts, charges = old_rows(folder / OLD_LEDGER)
        run = json.loads(texts[0][2])["run"]
        meta, state = _checkpoint(folder / "checkpoints", like)
        name, _, size, digest = meta["ledger"]
        with open(folder / OLD_LEDGER, "rb") as file:
            seen = hashlib.sha256(file.read(size)).hexdigest()
        if name != run or seen != digest:
            raise LedgerError(
                f"{folder}: the ledger is not the checkpoint's, or is an older copy"
            )
        releases = _releases(folder / "journal", name, meta["charged_steps"])
        kept = list(_kept(folder, name))
        log = folder / "log.jsonl"
        records = read_log(log) if log.exists() else []
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise LedgerError(f"the run in {folder} is damaged: {error!r}") from error
    temporary = folder / f"{STORE}.importing"
    new_store(temporary, texts, charges)
    with closing(RunStore(temporary)) as store:
        for record in records:
            store.note(record)
        taken = meta["charged_steps"]
        arrays = jax.device_get(jax.tree.leaves(state))
        store.save(taken, arrays, meta["run"], array_types(like), taken)
        for number, released in releases:
            store.release(number, released)
        for kind, number, found in kept:
            store.keep(kind, number, found)
    if temporary.with_name(temporary.name + "-wal").exists():
        raise OSError(f"{temporary} could not be written as a whole: is the disk full?")
    temporary.replace(folder / STORE)
    sync_folder(folder)


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
        if checksum != hashlib.sha256(text).hexdigest() or meta["format"] != _FORMAT:
            raise LedgerError(f"checkpoint {folder / str(step)} is damaged or edited")
        if meta["charged_steps"] != step or meta["ledger"] is None:
            raise LedgerError(f"checkpoint {folder / str(step)} was renamed or edited")
        refuse_other_state(meta["state"], array_types(like))
        # Planned runs had no scores.
        fields = like._asdict()
        if not jax.tree.leaves(like.scores):
            del fields["scores"]
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(fields))
        found = manager.restore(step, args=wanted)["state"]
        return meta, like._replace(**found)


def _releases(path: Path, run: str, after: int) -> list[tuple[int, list[np.ndarray]]]:
    """The journal's later releases; a last record that was cut off is ignored."""
    found: list[tuple[int, list[np.ndarray]]] = []
    data = path.read_bytes() if path.exists() else b""
    chain = hashlib.sha256(b"jaxdp-episodic journal 2 " + run.encode()).digest()
    of_run, place = chain[:8], 0
    while place + _HEAD.size <= len(data):
        head = data[place : place + _HEAD.size]
        step, base, length, name, check = _HEAD.unpack(head)
        end = place + _HEAD.size + length
        if not any(data[place:]):
            break  # space that was reserved and not written
        if check != hashlib.sha256(head[:-8]).digest()[:8]:
            raise LedgerError(f"journal {path}: the record at byte {place} is damaged")
        if name != of_run or base > after:
            raise LedgerError(f"journal {path} is of another run or checkpoint")
        released = data[place + _HEAD.size : end]
        chain = hashlib.sha256(chain + head + released).digest()
        if data[end : end + 32] != chain:
            if end + 32 < len(data):
                raise LedgerError(f"journal {path}: step {step} is damaged")
            break
        if step > after:
            arrays, file = [], io.BytesIO(released)
            while file.tell() < length:
                arrays.append(np.lib.format.read_array(file, allow_pickle=False))
            found.append((step, arrays))
        place = end + 32
    return found


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
