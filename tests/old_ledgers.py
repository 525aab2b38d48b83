"""Ledgers as the version before wrote them."""

import hashlib
import json


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
