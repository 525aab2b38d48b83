"""What may leave the house: parameters, statement, public log; no key, no diagnostics.

Everything here is a function of what the noised steps released and of public settings.
The checkpoint, the full log and the report are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.training.run_log import read_log, releasable_records

PARAMETERS, STATEMENT, PUBLIC_LOG = "parameters.npz", "privacy.md", "log.jsonl"
# Bytes that headers of arrays may take.
_HEADERS = 1 << 20


def export_run(
    folder: Path,
    *,
    params: Any,
    statement: str,
    log: Path,
    facts: Mapping[str, Any],
    has_public_epsilon: bool = True,
) -> list[Path]:
    """Writes the releasable part of a run and returns the files.

    Args:
      folder: made if missing; files of these names are replaced.
      params: the parameters after the last step.
      statement: what is protected, how well and under which conditions (Markdown).
      log: the run's full log, whose public compartment is copied.
      facts: public settings of the run, plain values; written as ``run.json``.
      has_public_epsilon: False if the epsilons in the log were computed from private
        sizes: they, and with them how many steps there were, are left out.

    Raises:
      OSError: a file that cannot be written.
      TypeError: facts that JSON cannot hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        path: np.asarray(leaf, np.float32) if leaf.dtype == jax.numpy.bfloat16 else leaf
        for path, leaf in flat_params(params).items()
    }
    temporary = folder / (PARAMETERS + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(temporary, folder / PARAMETERS)
    records = releasable_records(read_log(log)) if has_public_epsilon else []
    texts = {
        STATEMENT: statement,
        PUBLIC_LOG: "".join(json.dumps(record) + "\n" for record in records),
        "run.json": json.dumps(facts, indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in (PARAMETERS, *texts)]


def load_parameters(path: Path, like: Any) -> Any:
    """Returns exported parameters in the structure of ``like``; never unpickles.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no npz file of numbers, a larger one than parameters need, or other
        names or shapes than ``like`` has.
    """
    wanted = flat_params(like)
    # Twice as many bytes as they need, for a file of doubles.
    most = 16 * sum(leaf.size for leaf in wanted.values()) + _HEADERS
    arrays = read_arrays(path, max_bytes=most)
    if wanted.keys() != arrays.keys():
        odd = sorted(wanted.keys() ^ arrays.keys())
        raise ValueError(f"{path}: parameters differ in {odd[:5]}")
    for name, leaf in wanted.items():
        if arrays[name].shape != leaf.shape:
            raise ValueError(
                f"{path}: {name} must have shape {leaf.shape}, got {arrays[name].shape}"
            )
    leaves = [jax.numpy.asarray(arrays[n], v.dtype) for n, v in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def flat_params(params: Any) -> dict[str, Any]:
    """The leaves by their path, e.g. ``"layers/0/kernel"``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }
