"""Which epsilons of a run are near enough to one another for one contour.

A contour costs its nodes, at which the moments are summed; to ask at one more epsilon
costs next to nothing.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accounting.run import Run

# Nats of log(delta) between the epsilon that a contour is laid for and the answer from
# where on the error may be larger than it looks.
NEAR = 3.0
# Of the epsilon that a contour is laid for, if it is larger, to the answer.
LARGEST_RATIO = 2.0
# Epsilons of a contour.
_MOST = 16


def shared_contours(
    epsilon: np.ndarray, run: Run, log_delta: np.ndarray, alone: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which settings share a contour, and whose it is.

    Args:
      epsilon: (n,) at which delta is asked for.
      run: of (n,) settings.
      log_delta: (n,) rough, by which nearness is measured.
      alone: (n,) settings that share with no other one.

    Returns:
      Places (E, G) of the settings of each contour, columns filled up with their last
      one, and (G,) of the one that it is laid for. E is 1 or 16: it is compiled.
    """
    number = _numbers(run)
    columns: list[list[int]] = []
    first = -1
    for i in np.lexsort((epsilon, number)).tolist():
        if (
            first < 0
            or alone[i]
            or number[i] != number[first]
            or len(columns[-1]) == _MOST
            or epsilon[i] > LARGEST_RATIO * epsilon[first]
            or log_delta[first] - log_delta[i] > NEAR
        ):
            columns.append([])
            first = -1 if alone[i] else i
        columns[-1].append(i)
    most = 1 if len(columns) == len(epsilon) else _MOST
    members = [column + column[-1:] * (most - len(column)) for column in columns]
    middle = [column[len(column) // 2] for column in columns]
    return np.array(members).T, np.array(middle)


def _numbers(run: Run) -> np.ndarray:
    """One number for each run of a flattened batch, the same for the same run."""
    fields: list[np.ndarray] = []
    run.map(lambda field: fields.append(field) or field)
    order = np.lexsort(fields)
    new = np.any([np.diff(field[order]) != 0 for field in fields], axis=0)
    number = np.empty(order.shape, np.int64)
    number[order] = np.concatenate([[0], np.cumsum(new)])
    return number
