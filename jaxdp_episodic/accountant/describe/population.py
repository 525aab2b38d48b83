"""The real tree of unequal units from which a step draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import tree
from jaxdp_episodic.accountant.describe.schemes import Scheme, checked_name
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.accountant.describe.tree import DistinctPaths


@dataclass(frozen=True, eq=False, repr=False)
class Population(Spec):
    """A tree of units: primary units hold secondary units hold ... hold examples.

    Level 0 is the root, level 1 the primary units, the last level the examples. Make
    one with `from_sizes` or `from_ids`.

    The sizes are those of the data at hand. They give the rates along every path, so
    everything derived from them is about this data set and its neighbours; under
    ``add_remove`` the sizes just above the protected level are themselves private.
    Units that have no children are kept: they are on the public list, and under
    ``add_remove`` somebody may join them. Under ``zero_out`` the tree is one of public
    *slots*, null ones included.

    Attributes:
      children_counts: one int64 array a level; entry ``u`` of ``children_counts[j]``
        is the number of children of unit ``u`` of level ``j``. Depth-first order:
        children of consecutive units are consecutive.
      level_names: names of the first levels, top to bottom; () if none is named.
      unit_ids: one array of ids a named level, in the order of the units, or None.
        A label only: neither compared nor written by ``to_dict``.

    Raises:
      TypeError: counts or names of the wrong type.
      ValueError: counts that do not fit together, repeated or reserved names.
    """

    children_counts: tuple[np.ndarray, ...]
    level_names: tuple[str, ...] = ()
    unit_ids: tuple[np.ndarray, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        counts = tree.checked_counts(self.children_counts)
        names = _checked_names(self.level_names, num_levels=len(counts))
        object.__setattr__(self, "children_counts", counts)
        object.__setattr__(self, "level_names", names)
        if self.unit_ids is not None:
            ids = tree.checked_ids(self.unit_ids, counts)
            object.__setattr__(self, "unit_ids", ids)

    @classmethod
    def from_sizes(
        cls, nested: Any, *, level_names: Sequence[str] | None = None
    ) -> Population:
        """Returns the tree given by nested sizes.

        ``[[4, 2, 3], [4, 5]]`` has 2 primary units with 3 and 2 secondary units and 18
        examples; ``[12, 30, 7]`` has 3 primary units with that many children; ``49``
        is one level of 49 units.

        Args:
          nested: nested lists, tuples or arrays, equally deep everywhere, whose leaves
            are whole numbers >= 0: how many units of the last level each unit of the
            one above holds. An empty list is a unit without children.
          level_names: names of the levels, top to bottom; fewer names than levels
            leave the last ones unnamed.

        Raises:
          TypeError: a leaf that is not a number.
          ValueError: ragged depth, no leaf at all, a negative or fractional leaf.
        """
        counts = tree.counts_from_sizes(nested)
        return cls(counts, () if level_names is None else tuple(level_names))

    @classmethod
    def from_ids(cls, /, **ids: Any) -> Population:
        """Returns the tree of a table of records: one id array a level, top first.

        ``from_ids(authority=a, school=s, pupil=p)``: record ``i`` belongs to pupil
        ``p[i]`` of school ``s[i]`` of authority ``a[i]``. Records with the same id at
        the last level are one unit of it. Where each record is a unit of its own,
        give None for the last level, ``from_ids(authority=a, school=s, pupil=None)``;
        for a single array that may be left out: ``from_ids(school=s)`` has schools and,
        unnamed below them, one unit for each record.

        Ids are global: the same id under two parents is the same unit under two
        parents, and is refused, because a unit must lie under one path. Make local ids
        (class 0, 1, ... within every school) global first, for example with
        ``np.unique(np.stack([school, class_]), axis=1, return_inverse=True)[1]``, or
        for classes numbered below 1000, ``1000 * school + class_``.

        Units without records cannot be seen in a table; if a public list has some,
        use `from_sizes`.

        Args:
          **ids: (R,) integers or strings, the same R >= 1 for all levels.

        Raises:
          TypeError: ids that are neither integers nor strings.
          ValueError: no arrays or records, unequal lengths, or an id under two parents.
        """
        names = tuple(ids)
        _checked_names(names, num_levels=len(names) + 1)
        counts, unit_ids = tree.tree_from_ids(ids)
        return cls(counts, names, unit_ids)

    @property
    def num_levels(self) -> int:
        """Number of levels below the root."""
        return len(self.children_counts)

    def num_units(self, level: int) -> int:
        """Returns the number of units of a level; level 0 is the root."""
        _check_level("level", level, 0, self.num_levels)
        return 1 if level == 0 else int(self.children_counts[level - 1].sum())

    def distinct_paths(self, num_levels_used: int | None = None) -> DistinctPaths:
        """Returns the different paths to the units of one level, by default the last.

        See `DistinctPaths`.
        """
        used = self.num_levels if num_levels_used is None else num_levels_used
        _check_level("num_levels_used", used, 1, self.num_levels)
        return tree.distinct_paths(self.children_counts[:used])

    def describe_path(self, level: int, index: int) -> dict[str, Any]:
        """Returns the units on the way to one unit, by level name.

        From the unit's level, 1 to ``num_levels``, and its number there, from 0: level
        name ("level 2" where it has none) to id, or to the number among all units of
        that level where the tree has no ids.
        """
        _check_level("level", level, 1, self.num_levels)
        _check_level("index", index, 0, self.num_units(level) - 1)
        units = tree.path_to_unit(self.children_counts, level, index)
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
        ``unit_level``, 1 <= unit_level < clip_level, that a single draw by these
        schemes, top to bottom, can pick: without replacement the ``size`` children that
        can make most, under Poisson all children. *Exact* for the units of this tree,
        and at least 1; int64 of the broadcast shape of the sizes. Units that are not in
        the tree are not bounded by it: under ``add_remove`` use the public bound of
        `max_contributions` in ``rates``.
        """
        last = min(self.num_levels, len(sampling_levels))
        _check_level("clip_level", clip_level, 2, last)
        _check_level("unit_level", unit_level, 1, clip_level - 1)
        return tree.max_contributions(
            self.children_counts[unit_level:clip_level],
            sampling_levels[unit_level:clip_level],
        )

    def __repr__(self) -> str:
        units = tuple(self.num_units(j + 1) for j in range(self.num_levels))
        return f"Population(levels={self.level_names}, units={units})"


def _checked_names(names: Any, *, num_levels: int) -> tuple[str, ...]:
    """Returns level names as a tuple; refuses repeats, reserved and too many names."""
    if isinstance(names, str) or not isinstance(names, list | tuple):
        raise TypeError(
            f"level_names must be a tuple of strings, got {_validation.shown(names)}"
        )
    if len(names) > num_levels:
        raise ValueError(
            f"level_names must be at most {num_levels}, the number of levels, "
            f"got {len(names)}"
        )
    for name in names:
        if names.count(checked_name("each of level_names", name)) > 1:
            raise ValueError(f"level_names must be different, got {name!r} twice")
    return tuple(names)


def _check_level(name: str, value: Any, low: int, high: int) -> None:
    """Refuses anything but a whole number from ``low`` to ``high``."""
    number = _validation.integer_array(name, value, minimum=0)
    if number.ndim or not low <= number <= high:
        raise ValueError(
            f"{name} must lie in {low} .. {high}, got {_validation.shown(value)}"
        )
