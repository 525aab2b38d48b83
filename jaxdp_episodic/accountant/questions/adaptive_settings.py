"""Runs that adapt, of several settings: each has a worst strategy of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import engine_name, in_threads
from jaxdp_episodic.accountant.describe.menu import Menu
from jaxdp_episodic.accountant.methods.engine import num_cores


def of_settings(
    menu: Menu,
    runs: tuple[Any, ...],
    targets: np.ndarray,
    ask: Callable[[Any, float], Any],
) -> Any:
    """Returns each setting's answer at its target, those of several cores at once.

    Transforms leave the other threads running.

    Args:
      menu: whose shape and the targets' broadcast.
      runs: its settings, in the order of a flattened array.
      targets: of any shape.
      ask: of a run and one target a number, or a pair: then arrays of either come back.
    """
    shape = _validation.broadcast_shape(
        options=np.empty(menu.shape, np.uint8), target=targets
    )
    number = np.broadcast_to(np.arange(len(runs)).reshape(menu.shape), shape)
    at = np.broadcast_to(targets, shape)
    pairs = list(zip(number.ravel().tolist(), at.ravel().tolist(), strict=True))
    found = in_threads(
        lambda pair: ask(runs[pair[0]], pair[1]),
        pairs,
        max(min(num_cores(), len(pairs)), 1),
        on_numpy=engine_name() != "jax",
    )
    if found and not isinstance(found[0], tuple):
        return np.array(found, np.float64).reshape(shape)
    columns = np.array(found, np.float64).reshape(-1, 2).T
    return tuple(column.reshape(shape) for column in columns)
