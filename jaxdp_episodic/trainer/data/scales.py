"""Features of numbers, minus a public mean and divided by a public deviation."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.fields import numbers
from jaxdp_episodic.trainer.data.table import ExampleTable

_MOST = 2**16  # features of an example
_ROWS = 10_000  # examples that scales are computed from
# Ratio of two features' deviations, or of a mean to its deviation, up to which features
# are left as they are: beyond it some are lost beside the largest.
_UNEQUAL = 10.0

_list = functools.partial(numbers, most=_MOST, what="numbers, one a feature")
CHECKS = {
    "mean": functools.partial(_list, check=_validation.reals("be finite", np.isfinite)),
    "std": functools.partial(_list, check=_validation.positive_array),
}
"""Check of each setting: ``(name, value)`` to a tuple, or an error."""


def scaled(rows: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Returns the rows (n, D) minus the mean, divided by the deviation; float32."""
    if rows.ndim != 2 or not rows.shape[1] == len(mean) == len(std):
        raise ValueError(
            "mean and std under features must have one number for each feature; an "
            f"example has {list(rows.shape[1:])}, they have {len(mean)} and {len(std)}"
        )
    return (rows - np.float32(mean)) / np.float32(std)


def scales_of(data: ExampleTable) -> dict[str, Any]:
    """Returns mean and deviation of each feature, as private; {} if about equal."""
    if len(data.features.shape) != 2:
        return {}
    rows = np.asarray(data.features[:_ROWS], np.float64)
    # Two digits: a scale needs no more, and they are published.
    deviations = [float(f"{one:.2g}") for one in rows.std(axis=0)]
    # How far a constant feature varies elsewhere is unknown: it must not hide others.
    deviations = [one or max(deviations) or 1.0 for one in deviations]
    whole = np.rint(rows.mean(axis=0) / deviations)  # means, in deviations
    # In regression the features stand beside the constant 1.
    ends = [*deviations, 1.0] if data.targets is not None else deviations
    if max(ends) <= _UNEQUAL * min(ends) and np.abs(whole).max() <= _UNEQUAL:
        return {}
    means = [float(f"{one:.9g}") + 0.0 for one in whole * deviations]
    return {"mean": means, "std": deviations}


def advice(data: ExampleTable, *, are_scaled: bool, are_bounded: bool) -> list[str]:
    """Returns remarks on numbers in which training would lose the signal."""
    said = []
    if not are_scaled and scales_of(data):
        said.append(
            f"scales: some features are more than {_UNEQUAL:g} times larger than "
            'others, which are lost; give public numbers: [features] kind = "scaled", '
            "mean, std"
        )
    if data.targets is not None and not are_bounded:
        most = largest_target(data)
        if not 1 / _UNEQUAL <= most <= _UNEQUAL:
            said.append(
                f"targets: up to {most:,.10g}, but gradient steps need about 1: divide "
                "the column by a public number"
            )
    return said


def largest_target(data: ExampleTable) -> float:
    """Returns the largest absolute target, rounded up to one digit; as private."""
    assert data.targets is not None
    most = float(np.abs(data.targets).max()) or 1.0
    digit = 10.0 ** math.floor(math.log10(most))
    return float(f"{digit * math.ceil(most / digit):.3g}")
