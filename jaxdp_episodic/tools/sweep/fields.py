"""The numeric fields of a step, under the names that tables and axes give them.

"noise_multiplier", "school.size", "num_episodes", "people.classes"; of a composed run
"counts[0]" and "steps[0].school.size". The same names head the columns of
``jaxdp-episodic epsilon``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import MultistageSampling, Scheme
from jaxdp_episodic.accountant.describe.spec import Check, Spec
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep

Path = tuple[str | int, ...]
"""Where a field is: keys of tables and indices of lists, from the step down."""


def _specs(spec: type[Spec]) -> Iterator[type[Spec]]:
    """A class, and all that a dictionary of it may describe inside."""
    yield spec
    for inside in spec.nested_specs.values():
        for one in inside:
            yield from _specs(one)


_NUMERIC = {spec.__name__: spec.numeric for spec in _specs(ComposedSteps)}
_CHECKS = {name: check for spec in _NUMERIC.values() for name, check in spec.items()}


def is_whole(field: str) -> bool:
    """True if a field takes whole numbers only."""
    name = field.rpartition(".")[2]
    if name == "num_steps" or name.startswith("counts["):
        return True
    return getattr(_CHECKS.get(name), "func", None) is _validation.integer_array


def check_of(field: str) -> Check | None:
    """What the values of a field that is left out must be, to be rounded where whole.

    None of the counts of a composed run, which cannot be left out.
    """
    check = _CHECKS.get(field.rpartition(".")[2])
    return _validation.positive_array if check and is_whole(field) else check


_SCHEMES = tuple(scheme.__name__ for scheme in get_args(Scheme))
_PARTS = ("sampling", "levels", "episodes", "classes", "examples", "steps", "people")


def wrapped(step: Any) -> Any:
    """Returns a step's table with every single scheme made a list of one level.

    A path in the table is then the path of the same field in the step made of it.
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
            name = MultistageSampling.__name__
            table["sampling"] = {"type": name, "levels": [drawn]}
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
    named = f"{prefix}{name}." if isinstance(name, str) else prefix
    if kind == ComposedSteps.__name__ and isinstance(node.get("counts"), list):
        for i in range(len(node["counts"])):
            yield f"counts[{i}]", (*path, "counts", i)
    for field in _NUMERIC.get(str(kind), ()):
        yield named + field, (*path, field)
    for part in _PARTS:
        value = node.get(part)
        if isinstance(value, list):
            for i, item in enumerate(value):
                inner = f"{prefix}steps[{i}]." if part == "steps" else prefix
                yield from _found(item, (*path, part, i), inner)
        else:
            inner = f"{prefix}people." if part == "people" else prefix
            yield from _found(value, (*path, part), inner)


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
