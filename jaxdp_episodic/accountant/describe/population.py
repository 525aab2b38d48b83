"""The tree of units from which a step draws, and bounds of persons in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    MAX_LEVELS,
    ORIGINAL,
    OWNED,
    PERSON,
    GroupedClasses,
    MultistageSampling,
    PeopleBlocks,
    Sampling,
    Scheme,
    WithoutReplacement,
    checked_name,
    refuse_repeats,
)
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ZERO, Sizes, Spec

# Largest number of units of a level: float64 distinguishes rates up to it.
_MAX_UNITS = 2**53

# The bounds of `PersonBounds`, from the last level of the sampling upwards.
BOUNDS = ("examples", "classes", "tasks")
_HOW_TO_MAKE_GLOBAL = (
    "ids must be global, and every unit must lie under one path. If ids are local to "
    "their parent, make them global first: in a file, parent/child instead of child; "
    "in Python, "
    "np.unique(np.stack([parent, child]), axis=1, return_inverse=True)[1]"
)


class DistinctPaths(NamedTuple):
    """The distinct size vectors ``(N_1, ..., N_l)`` along paths to units of a level."""

    sizes: np.ndarray
    multiplicity: np.ndarray
    witness_level: np.ndarray
    witness_index: np.ndarray


class Population(Spec):
    """A tree of units: primary units hold secondary units hold ... hold examples.

    Level 0 is the root, level 1 the primary units, the last level the examples. Create
    one with `from_sizes` or `from_ids`.

    All results are about this data set and its neighbours; under ``add_remove`` the
    sizes just above the protected level are themselves private. Units without children
    are kept: they are on the public list, and a unit may join them. Under ``zero_out``
    the tree consists of public *slots*, including empty ones.

    Attributes:
      children_counts: one int64 array per level; entry ``u`` of ``children_counts[j]``
        is the number of children of unit ``u`` of level ``j``. Depth-first order:
        children of consecutive units are consecutive.
      level_names: names of the first levels, top to bottom; () if no level has a name.
      unit_ids: one array of ids per named level, in the order of the units, or None.
        Only labels: ``==`` and ``to_dict`` ignore them.

    Raises:
      ValueError: inconsistent counts, repeated or reserved names.
    """

    children_counts: tuple[Annotated[np.ndarray, AT_LEAST_ZERO], ...]
    level_names: tuple[Annotated[str, checked_name], ...] = ()
    unit_ids: tuple[Annotated[np.ndarray, _copied], ...] | None = field(
        default=None, compare=False
    )

    def check_fields(self) -> None:
        """Checks that the arrays have one entry for each unit."""
        super().check_fields()
        counts, ids, num_units = self.children_counts, self.unit_ids or (), 1
        for level, count in enumerate(counts):
            name = f"children_counts[{level}]"
            if np.shape(count) != (num_units,):
                raise ValueError(
                    f"{name} must have shape ({num_units},), one entry for each unit "
                    f"of level {level}, got {np.shape(count)}"
                )
            if (total := count.sum(dtype=np.float64)) > _MAX_UNITS:
                raise ValueError(f"{name} must sum to at most 2**53, got {total:g}")
            num_units = int(count.sum())
            if level < len(ids) and np.shape(ids[level]) != (num_units,):
                raise ValueError(
                    f"unit_ids[{level}] must have shape ({num_units},), got "
                    f"{np.shape(ids[level])}"
                )
        most, numbers = len(counts), (len(self.level_names), len(ids))
        if not counts or max(numbers) > most:
            raise ValueError(
                "children_counts must have at least one array, and level_names and "
                f"unit_ids at most {most} entries, the number of levels, got {numbers}"
            )
        refuse_repeats("level_names", self.level_names)

    @classmethod
    def from_sizes(
        cls, nested: Any, *, level_names: Sequence[str] | None = None
    ) -> Population:
        """Returns the tree given by nested sizes.

        ``[[4, 2, 3], [4, 5]]`` has 2 primary units with 3 and 2 secondary units and 18
        examples; ``[12, 30, 7]`` has 3 primary units with that many children; ``49``
        is one level of 49 units.

        Args:
          nested: nested lists, tuples or arrays of the same depth everywhere, whose
            leaves are whole numbers >= 0: the number of children of each unit of the
            level above the last. An empty list is a unit without children.
          level_names: names of the levels, top to bottom; with fewer names than levels
            the last ones have no name.

        Raises:
          ValueError: different depths, no leaf, a negative or fractional leaf.
        """
        counts: list[np.ndarray] = []
        items = [nested]
        while items and all(map(_is_list, items)):
            if len(counts) == MAX_LEVELS:
                raise ValueError(
                    f"sizes must be nested at most {MAX_LEVELS} levels deep"
                )
            counts.append(np.array([len(item) for item in items], np.int64))
            items = [child for item in items for child in item]
        if len(items) == 0:
            raise ValueError(
                "sizes must contain at least one number, because their depth is "
                f"unknown otherwise; got only empty lists at level {len(counts)}"
            )
        if any(map(_is_list, items)):
            raise ValueError(
                "sizes must have the same depth everywhere, got a number beside a list "
                f"at level {len(counts)}"
            )
        counts.append(_validation.integer_array("sizes", items, minimum=0))
        return cls(tuple(counts), () if level_names is None else tuple(level_names))

    @classmethod
    def from_ids(cls, /, **ids: Any) -> Population:
        """Returns the tree of a table of records: one id array per level, top first.

        ``from_ids(authority=a, school=s, pupil=p)``: record ``i`` belongs to pupil
        ``p[i]`` of school ``s[i]`` of authority ``a[i]``. Records with the same id at
        the last level are one unit. If each record is its own unit, give None for the
        last level, ``from_ids(authority=a, school=s, pupil=None)``. For a single array
        this is the default: ``from_ids(school=s)`` has schools and, in an unnamed level
        below them, one unit for each record.

        Ids are global: the same id under two parents raises. If ids are local (class 0,
        1, ... within every school), make them global first, for example with
        ``np.unique(np.stack([school, class_]), axis=1, return_inverse=True)[1]``. If
        the public list has units without records, use `from_sizes`.

        Args:
          **ids: (R,) integers or strings, the same R >= 1 for all levels.

        Raises:
          ValueError: no arrays or records, unequal lengths, or an id under two parents.
        """
        names = tuple(ids)
        given = {name: column for name, column in ids.items() if column is not None}
        columns = {name: _id_column(name, column) for name, column in given.items()}
        if not columns or any(ids[name] is None for name in names[:-1]):
            raise ValueError(
                "ids must be one array per level, top first; only the last of several "
                f"may be None; got {names}"
            )
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            raise ValueError(
                f"ids must be equally long arrays of at least one record, got {lengths}"
            )
        counts: list[np.ndarray] = []
        unit_ids: list[np.ndarray] = []
        parent_of_record = np.zeros(lengths[names[0]], np.int64)
        for name, column in columns.items():
            values, code = np.unique(column, return_inverse=True)
            parent = np.empty(len(values), np.int64)
            parent[code] = parent_of_record
            clash = parent[code] != parent_of_record
            if clash.any():
                # `parent` is that of the unit's last record.
                record = int(np.argmax(clash))
                above, top = unit_ids[-1], names[len(unit_ids) - 1]
                raise ValueError(
                    f"{name} {column[record].item()!r} lies under two parents, "
                    f"{top} {above[parent_of_record[record]].item()!r} and "
                    f"{above[parent[code[record]]].item()!r}; {_HOW_TO_MAKE_GLOBAL}"
                )
            # A stable sort keeps ids sorted within a parent; sorted tables take O(n).
            order = np.argsort(parent, kind="stable")
            position = np.empty(len(values), np.int64)
            position[order] = np.arange(len(values))
            num_parents = len(unit_ids[-1]) if unit_ids else 1
            counts.append(np.bincount(parent, minlength=num_parents))
            unit_ids.append(values[order])
            parent_of_record = position[code]
        if len(names) == 1 or len(columns) < len(names):  # each record is a unit
            counts.append(np.bincount(parent_of_record, minlength=len(unit_ids[-1])))
        return cls(tuple(counts), names, tuple(unit_ids))

    @property
    def num_levels(self) -> int:
        """Number of levels below the root."""
        return len(self.children_counts)

    def num_units(self, level: int) -> int:
        """Returns the number of units of a level; level 0 is the root."""
        _validation.whole_number("level", level, minimum=0, maximum=self.num_levels)
        return 1 if level == 0 else int(self.children_counts[level - 1].sum())

    def distinct_paths(self, num_levels_used: int | None = None) -> DistinctPaths:
        """Returns the distinct paths to the units of one level, by default the last."""
        used = self.num_levels if num_levels_used is None else num_levels_used
        _validation.whole_number("num_levels_used", used, maximum=self.num_levels)
        return distinct_paths(self.children_counts[:used])[0]

    def describe_path(self, level: int, index: int) -> dict[str, Any]:
        """Returns the units on the path to one unit, by level name.

        Keys are level names, or "level 2" for a level without a name. Values are ids,
        or the unit's number among all units of its level if the tree has no ids.
        ``level`` is 1 to ``num_levels``, and ``index`` counts from 0 within it.
        """
        _validation.whole_number("level", level, maximum=self.num_levels)
        last = self.num_units(level) - 1
        _validation.whole_number("index", index, minimum=0, maximum=last)
        units = [int(index)]
        for count in reversed(self.children_counts[1:level]):
            # The number of units whose last child precedes this one.
            parent = np.searchsorted(np.cumsum(count), units[0], side="right")
            units.insert(0, int(parent))
        ids = self.unit_ids or ()
        described: dict[str, Any] = {}
        for i, unit in enumerate(units):
            named = i < len(self.level_names)
            name = self.level_names[i] if named else f"level {i + 1}"
            described[name] = ids[i][unit].item() if i < len(ids) else unit
        return described

    def max_contributions(
        self, sampling_levels: Sequence[Scheme], unit_level: int, clip_level: int
    ) -> np.ndarray:
        """Returns how many clipped contributions one unit of this tree can make.

        The largest number of units of ``clip_level`` below any one unit of
        ``unit_level``, 1 <= unit_level < clip_level, that one sample by these schemes
        (top to bottom) can contain. *Exact* for the units of this tree, and at least 1;
        int64 of the broadcast shape of the sizes. It does not bound units outside.
        """
        last = min(self.num_levels, len(sampling_levels))
        _validation.whole_number("clip_level", clip_level, minimum=2, maximum=last)
        _validation.whole_number("unit_level", unit_level, maximum=clip_level - 1)
        return max_contributions(
            self.children_counts[unit_level:clip_level],
            sampling_levels[unit_level:clip_level],
        )

    def __repr__(self) -> str:
        units = tuple(self.num_units(j + 1) for j in range(self.num_levels))
        return f"Population(levels={self.level_names}, units={units})"


def _copied(_: str, value: Any) -> np.ndarray:
    return np.array(value)


def _id_column(name: str, value: Any) -> np.ndarray:
    """Returns ids as a 1-D array of integers or strings."""
    array = np.asarray(value)
    if array.dtype.kind in "OT" and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "iuU":
        raise TypeError(
            f"{name} must be integer or string ids, got an array of {array.dtype}"
        )
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be a 1-D array, one id per record, got shape {array.shape}"
        )
    return array


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


def distinct_paths(counts: Sequence[np.ndarray]) -> tuple[DistinctPaths, np.ndarray]:
    """Returns the paths to the units of the last level, and that below each parent."""
    found, above = [], np.zeros((1, 0), np.int64)
    for level, count in enumerate(counts):
        # A unit without children is followed as if it had one child.
        here = np.column_stack([above, np.maximum(count, 1)])
        is_last = level + 1 == len(counts)
        (ends,) = np.nonzero(count >= 0 if is_last else count == 0)
        rows = np.ones((len(ends), len(counts)), np.int64)
        rows[:, : level + 1] = here[ends]
        # With children the example is the first child, else the empty unit itself.
        number, first = count[ends], (np.cumsum(count) - count)[ends]
        found.append(
            (rows, number, level + (number > 0), np.where(number, first, ends))
        )
        if not is_last:  # where one number may name 2**53 units
            above = np.repeat(here, count, axis=0)
    rows, number, level, index = map(np.concatenate, zip(*found, strict=True))
    # The first unit of each path is an example: of the last level, else the deepest.
    order = np.lexsort((index, -level, *rows.T[::-1]))
    is_first = np.append(True, np.any(np.diff(rows[order], axis=0), axis=1))
    unit, path = order[is_first], np.empty(len(order), np.int64)
    path[order] = np.cumsum(is_first) - 1
    multiplicity = np.zeros(len(unit), np.int64)
    np.add.at(multiplicity, path, number)
    paths = DistinctPaths(rows[unit], multiplicity, level[unit], index[unit])
    return paths, path[len(path) - len(counts[-1]) :]


def max_contributions(
    counts: Sequence[np.ndarray], schemes: Sequence[Scheme]
) -> np.ndarray:
    """Returns the largest number of units that one draw can take below one unit."""
    drawn = [getattr(scheme, "size", _MAX_UNITS) for scheme in schemes]  # or all
    limits = np.broadcast_arrays(*drawn)
    table = np.stack([limit.ravel() for limit in limits], axis=1)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    best = []
    for row in distinct:
        # Contributions of each unit, from the bottom up; the last level makes one each.
        values = np.minimum(counts[-1], row[-1])
        for count, most in zip(counts[-2::-1], row[-2::-1], strict=True):
            # The sum of the most values that one parent's children have.
            parent, ends = np.repeat(np.arange(len(count)), count), np.cumsum(count)
            rank = np.arange(len(values)) - (ends - count)[parent]
            largest = np.where(rank < most, values[np.lexsort((-values, parent))], 0)
            total = np.concatenate([[0], np.cumsum(largest)])
            values = total[ends] - total[ends - count]
        best.append(max(1, int(np.max(values, initial=0))))
    return np.array(best, np.int64)[inverse.ravel()].reshape(limits[0].shape)[()]


# --- Persons in many places of the tree ---


class PersonBounds(Spec):
    """Public bounds on one person's examples, for ``privacy_unit="person"``.

    Each field is a *public upper bound* that holds for everybody; actual numbers may
    stay private. The guarantee does not hold for a person beyond the bounds, so enforce
    them before training; docs/theory.md, "People", says how. With
    ``privacy_unit="original"`` the bounds are those of the copies of one example.

    A sampling of one level needs ``examples``; one of two levels ``examples`` and
    ``classes``; one of three levels all bounds; `GroupedClasses` the first two. A bound
    without a level in the sampling raises.

    Attributes:
      examples: largest number of one person's examples within one unit of the level
        above examples (a class), or in all without such a level. Whole number >= 1
        (scalar or array), as are all bounds.
      classes: largest number of units of the level above examples that have examples of
        one person, within one unit of the level above them (a task), or in all.
      tasks: largest number of units of the level above classes that have some.

    Raises:
      ValueError: no bound at all.
    """

    _: KW_ONLY
    examples: Sizes | None = None
    classes: Sizes | None = None
    tasks: Sizes | None = None

    def check_values(self) -> None:
        """Refuses a spec without any bound."""
        if not self.numbers:
            raise ValueError(f"give at least one of {BOUNDS}, got none")


def levels_of_people(sampling: Sampling) -> tuple[Scheme | None, ...]:
    """Returns the schemes of the levels in `BOUNDS`, the last level first."""
    if isinstance(sampling, GroupedClasses):
        return sampling.examples, None
    multistage = isinstance(sampling, MultistageSampling)
    drawn = sampling if multistage else sampling.sampling
    levels = () if drawn is None else drawn.levels
    if len(levels) > len(BOUNDS):
        raise NotImplementedError(
            f"people, or copies of examples, with {len(levels)} levels have no theorem "
            f"here; covered: up to {len(BOUNDS)} levels, the last one of examples"
        )
    return levels[::-1]


def bounds_with_copies(
    sampling: Sampling,
    privacy_unit: str | None,
    people: PersonBounds | None,
    copies: int,
) -> tuple[str | None, PersonBounds | None]:
    """Returns privacy unit and bounds if each class has ``copies`` copies."""
    # Copies of a class are other classes of the same unit one level up.
    names = sampling.level_names
    if isinstance(sampling, PeopleBlocks):
        privacy_unit = PERSON
    if copies == 1 or (privacy_unit in names and privacy_unit not in names[-2:]):
        return privacy_unit, people  # all copies are in one unit
    if privacy_unit in names[:-1]:
        raise NotImplementedError(
            f"privacy_unit={privacy_unit!r} with rotations has no theorem here: its "
            f"copies are other units; covered: {names[-1]!r}, {PERSON!r} and "
            f"{names[:-2]}"
        )
    levels = levels_of_people(sampling)
    numbers = {name: 1 for name in BOUNDS[: len(levels)]}
    if privacy_unit == PERSON:
        numbers = {} if people is None else dict(people.numbers)
    # Without classes all copies are examples of the same unit.
    copied = "classes" if len(levels) > 1 else "examples"
    if copied in numbers:
        numbers[copied] = numbers[copied] * copies
    bounds = PersonBounds(**numbers) if numbers else None
    return PERSON if privacy_unit == PERSON else ORIGINAL, bounds


def check_people(
    sampling: Sampling,
    people: PersonBounds | None,
    privacy_unit: str,
    population: Population | None,
    neighboring_relation: str,
) -> None:
    """Refuses bounds that are missing, have no level or contradict the design."""
    if privacy_unit not in OWNED:
        if people is not None:
            raise ValueError(
                f"people must be None unless privacy_unit is one of {OWNED}, "
                f"got privacy_unit={privacy_unit!r}"
            )
        return
    is_grouped = isinstance(sampling, GroupedClasses)
    if is_grouped and sampling.classes is not None:
        raise NotImplementedError(
            f"privacy_unit={privacy_unit!r} with GroupedClasses(classes=...) has no "
            "theorem here: a sampled class affects how others are grouped; covered: "
            "GroupedClasses(episodes=...)"
        )
    if isinstance(sampling, PeopleBlocks) and population is not None:
        raise NotImplementedError(
            "PeopleBlocks with a Population has no theorem here; state the sizes "
            "within a block in sampling="
        )
    schemes = levels_of_people(sampling)
    if isinstance(sampling, PeopleBlocks) and people is None:
        return  # every episode of the block may hold the person
    needed = BOUNDS[: len(schemes)]
    given = () if people is None else tuple(people.numbers)
    missing = tuple(name for name in needed if name not in given)
    if people is None or missing or len(given) > len(needed):
        raise ValueError(
            f"privacy_unit={privacy_unit!r} needs people=PersonBounds(...) with a "
            f"public bound on {' and '.join(missing or needed)}, and must not bound "
            f"others than {needed}, got {given or None}"
        )
    # (bound, its largest value, the source of this limit).
    limits: list[tuple[str, Any, str]] = [
        (name, scheme.population, f"the exact population of level {scheme.name!r}")
        for name, scheme in zip(needed, schemes, strict=True)
        if isinstance(scheme, WithoutReplacement) and scheme.population_is_exact
    ]
    if is_grouped:
        limits.append(("classes", sampling.num_classes, "num_classes"))
    if population is not None:
        # Episodes are no level of the tree.
        above = int(not isinstance(sampling, MultistageSampling))
        counts = population.children_counts[: len(sampling.level_names) - above]
        for name, count in zip(BOUNDS, reversed(counts), strict=False):
            if name != "examples" or neighboring_relation != "add_remove":
                most = max(int(np.max(count, initial=0)), 1)
                limits.append((name, most, "the Population"))
    for name, most, what in limits:
        bound = people.numbers[name]
        if any(map(_validation.is_traced, (bound, most))):
            continue  # checked once the numbers are known
        if np.any(np.greater(bound, most)):
            raise ValueError(
                f"people.{name} must be at most {most!r} ({what}), got {bound!r}"
            )
