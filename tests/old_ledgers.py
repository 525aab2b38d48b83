"""Ledgers and runs as version 0.2 wrote them."""

import contextlib
import hashlib
import io
import json
import struct
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from jaxdp_episodic.trainer.run.state import array_types


def old_ledger(path, step, processes, *, delta=1e-5, tail=b"", **header):
    """Writes one; of each process its name (None: it had none) and its charges."""
    text = b""

    def line(record):
        body = json.dumps(record, separators=(",", ":")).encode()[:-1]
        digest = hashlib.sha256(text + body).hexdigest()
        return body + f',"hash":"{digest}"}}\n'.encode()

    first = {"format": "jaxdp-episodic ledger", "version": 1, "run": "ab" * 16}
    first |= {"epsilon": 8.0, "delta": delta, "seeded": False, **header}
    text += line(first)
    text += line({"step": step.to_dict()})
    charged = 0
    for name, number in processes:
        process = {} if name is None else {"process": name}
        text += line({"opened": {"machine": "x", **process}, "charged": charged})
        text += b"1\n" * number
        charged += number
    text += line({"charged": charged})
    path.write_bytes(text + tail)
    return path


class OldState(NamedTuple):
    """What the version before kept of a run that does not choose."""

    params: Any
    optimizer_state: Any
    start: Any
    clip_norm: Any


def old_run(folder, run, step, *, charged, released):
    """Writes a folder of a trainer's run, as a kill left it after steps by hand.

    Args:
      folder: that is made.
      run: the trainer, whose state is in the checkpoint.
      step: that its ledger describes.
      charged: steps in the ledger.
      released: arrays of one more step, in the journal.
    """
    taken, processes = run.num_steps_taken, [("a" * 32, charged)]
    folder.mkdir()
    ledger = old_ledger(folder / "ledger.jsonl", step, processes)
    content = ledger.read_bytes()
    state = OldState(*run.state[:4])
    mark = ["ab" * 16, taken, len(content), hashlib.sha256(content).hexdigest()]
    meta = {"format": 5, "charged_steps": taken, "ledger": mark, "run": run.run}
    meta = json.loads(json.dumps(meta | {"state": array_types(state)}))
    text = json.dumps(meta, sort_keys=True)
    meta["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    with contextlib.closing(ocp.CheckpointManager(folder / "checkpoints")) as manager:
        saved = ocp.args.StandardSave(state)
        kinds = {"state": saved, "meta": ocp.args.JsonSave(meta)}
        manager.save(taken, args=ocp.args.Composite(**kinds))
    data = io.BytesIO()
    for leaf in released:
        np.lib.format.write_array(data, leaf, allow_pickle=False)
    chain = hashlib.sha256(b"jaxdp-episodic journal 2 " + b"ab" * 16).digest()
    head = struct.pack("<QQQ8s", taken + 1, taken, len(data.getvalue()), chain[:8])
    record = head + hashlib.sha256(head).digest()[:8] + data.getvalue()
    hashed = hashlib.sha256(chain + record).digest()
    # The file system had extended the file for the next record, without content.
    (folder / "journal").write_bytes(record + hashed + bytes(100))
