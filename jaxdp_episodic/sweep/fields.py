"""The numeric fields of a step, under the names that tables and axes give them.

"noise_multiplier", "school.size", "num_episodes"; of a composed run "counts[0]" and
"steps[0].school.size". The same names head the columns of ``jaxdp-episodic epsilon``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.describe.mechanisms import TruncatedPoissonRelease
from jaxdp_episodic.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    ZeroConcentratedDP,
)
from jaxdp_episodic.describe.schemes import (
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep

# Where a field is: keys of tables and places in lists, from the step down.
Path = tuple[str | int, ...]

_NUMBERS = {
    GaussianStep.__name__: ("noise_multiplier",),
    Poisson.__name__: ("sampling_probability", "population"),
    WithoutReplacement.__name__: ("size", "population"),
    RandomAllocation.__name__: ("steps_per_epoch", "times"),
    ShuffledEpochs.__name__: ("steps_per_epoch",),
    GroupedClasses.__name__: ("num_classes", "ways"),
    IndependentEpisodes.__name__: ("num_episodes",),
    LaplaceRelease.__name__: ("noise_multiplier", "sampling_probability"),
    ApproximateDP.__name__: ("epsilon", "delta"),
    ZeroConcentratedDP.__name__: ("rho", "xi"),
    TruncatedPoissonRelease.__name__: (
        "noise_multiplier",
        "sampling_probability",
        "batch_size",
        "population",
    ),
}
# What the values of a field that is left out must be (the whole numbers still have to
# be rounded). The counts of a composed run cannot be left out.
CHECKS: dict[str, Callable[[str, Any], np.ndarray]] = {
    "noise_multiplier": _validation.nonnegative_array,
    "sampling_probability": _validation.probability_array,
    "epsilon": _validation.nonnegative_array,
    "delta": _validation.probability_array,
    "rho": _validation.nonnegative_array,
    "xi": _validation.nonnegative_array,
    **dict.fromkeys(
        (
            "size",
            "batch_size",
            "population",
            "steps_per_epoch",
            "times",
            "num_classes",
            "ways",
            "num_episodes",
        ),
        _validation.positive_array,
    ),
}
_SCHEMES = tuple(scheme.__name__ for scheme in get_args(Scheme))
_PARTS = ("sampling", "levels", "episodes", "classes", "examples", "steps")


def wrapped(step: Any) -> Any:
    """Returns a step's table with every single scheme made a list of one level.

    So that places in the table are places in the step that is made of it.
    """
    if not isinstance(step, Mapping):
        return step
    table = dict(step)
    if isinstance(table.get("steps"), list):
        table["steps"] = [wrapped(part) for part in table["steps"]]
    drawn = table.get("sampling")
    if isinstance(drawn, Mapping):
        table["sampling"] = wrapped(drawn)
        if drawn.get("type") in _SCHEMES:
            table["sampling"] = {
                "type": MultistageSampling.__name__,
                "levels": [drawn],
            }
    return table


def numeric_fields(step: Any) -> dict[str, Path]:
    """Returns where the numeric fields are in the wrapped table of a step.

    What is not as it should be is passed over: it is refused where specs are read.
    """
    return dict(_found(step, (), ""))


def _found(node: Any, path: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    if not isinstance(node, Mapping):
        return
    kind, name = node.get("type"), node.get("name")
    place = f"{prefix}{name}." if isinstance(name, str) else prefix
    if kind == ComposedSteps.__name__ and isinstance(node.get("counts"), list):
        for i in range(len(node["counts"])):
            yield f"counts[{i}]", (*path, "counts", i)
    for field in _NUMBERS.get(str(kind), ()):
        yield place + field, (*path, field)
    for part in _PARTS:
        value = node.get(part)
        if isinstance(value, list):
            for i, item in enumerate(value):
                inner = f"{prefix}steps[{i}]." if part == "steps" else prefix
                yield from _found(item, (*path, part, i), inner)
        else:
            yield from _found(value, (*path, part), prefix)


def dotted(path: Path) -> str:
    """Returns a path as errors write it, ``step.sampling.levels[1].size``."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return "step" + "".join(parts)


def filled(table: Any, path: Path, value: Any, *, over: bool = False) -> Any:
    """Returns a table with a value at a path that has none yet, or ``over`` its own."""
    if not path:
        return value if over or table is None else table
    head, *rest = path
    if isinstance(head, int):
        items = list(table)
        items[head] = filled(items[head], tuple(rest), value, over=over)
        return items
    inner = filled(table.get(head), tuple(rest), value, over=over)
    return {**table, head: inner}


def table_of(step: GaussianStep | ComposedSteps) -> dict[str, Any]:
    """Returns a step's dictionary form, in which populations stay what they are."""
    table = step.to_dict()
    parts = step.steps if isinstance(step, ComposedSteps) else (step,)
    for part, one in zip(parts, table.get("steps", [table]), strict=True):
        if isinstance(part, GaussianStep) and part.population is not None:
            one["population"] = part.population
    return table
