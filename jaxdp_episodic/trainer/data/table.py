"""Tables of examples, sorted by the units (classes, tasks) that contain them.

Their features are in memory, or on disk and read by rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import ORIGINAL
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.files.column_folder import StoredColumn
from jaxdp_episodic.trainer.data.owners import Owners, PeopleStatistics, id_array

UNIT = "unit"
INVERTED = "inverted"
ENCODINGS = (UNIT, INVERTED)
"""What 8-bit codes stand for: their share of 255, or 1 minus that."""


def decoded(codes: np.ndarray, encoding: str) -> np.ndarray:
    """Returns the float32 values of 8-bit codes."""
    values = codes / np.float32(255)
    return values if encoding == UNIT else 1 - values


class StoredFeatures:
    """Features in a file, indexed like the array (R, ...) that a loader would return.

    Only the first axis can be indexed, which gives the values of a table in memory.
    """

    def __init__(
        self,
        column: StoredColumn,
        encoding: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if encoding is not None:
            if encoding not in ENCODINGS or column.dtype != np.uint8:
                raise ValueError(
                    f"{column.path} must hold uint8 in one of the encodings "
                    f"{ENCODINGS}, or plain numbers; got {column.dtype} in "
                    f"{encoding[:60]!r}"
                )
        elif column.dtype.kind not in "iuf":
            raise ValueError(f"{column.path} must hold numbers, holds {column.dtype}")
        # One of `ENCODINGS`, of uint8 codes; None: the file holds the values.
        self.encoding, self._column = encoding, column
        self.shape = column.shape if shape is None else shape
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.dtype = column.dtype if encoding is None else np.dtype(np.float32)

    @property
    def digest(self) -> bytes:
        """The file's checksum and the encoding, which identify the values."""
        return f"{self._column.sha256} {self.encoding}".encode()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = np.arange(len(self))[index]
        codes = self._read(rows.reshape(-1)).reshape(*rows.shape, *self.shape[1:])
        return codes if self.encoding is None else decoded(codes, self.encoding)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("copy=False is impossible for features on disk")
        return self[:] if dtype is None else self[:].astype(dtype)

    def copy(self) -> np.ndarray:
        """Returns all features as an array in memory."""
        return self[:]

    def reshape(self, *shape: int) -> StoredFeatures:
        """Returns the same features with another shape per example."""
        if shape[0] not in (-1, len(self)):
            raise ValueError(f"the number of examples must stay {len(self)}")
        item = np.empty(self.shape[1:], np.bool_).reshape(shape[1:]).shape
        return StoredFeatures(self._column, self.encoding, (len(self), *item))

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Returns stored codes; raises for non-finite values: the file has changed."""
        codes = self._column.read(rows).reshape(len(rows), *self.shape[1:])
        if codes.dtype.kind == "f" and not np.isfinite(codes).all():
            raise ValueError(f"{self._column.path} must hold finite numbers")
        return codes


@dataclass(frozen=True, eq=False)
class ExampleTable:
    """Arrays of examples, and the tree of units that contain them.

    Row ``i`` is the i-th example of ``population`` in depth-first order. Samples refer
    to examples by this index. Create tables with `from_records`.

    Attributes:
      features: (R, ...) float32 or integers, finite; in memory or on disk.
      targets: (R,) float32, or None if the class is the target.
      population: the tree; its last level is the R examples.
      owners: the one person who owns each example; None: not known.
      has_public_units: whether the units directly above the examples come from a
        public list.
      originals: for each example, a code of the original that it is a copy of; None:
        there are no copies. See `with_rotations`.
    """

    features: np.ndarray | StoredFeatures
    targets: np.ndarray | None
    population: Population
    owners: Owners | None = None
    has_public_units: bool = False
    originals: Owners | None = None

    def __post_init__(self) -> None:
        _validation.instance("population", self.population, Population, "a Population")
        _validation.flag("has_public_units", self.has_public_units)
        number = self.population.num_units(self.population.num_levels)
        for name in ("features", "targets", "owners", "originals"):
            one = getattr(self, name)
            if one is not None and len(one) != number:
                raise ValueError(
                    f"{name} must be those of the {number} examples, got {len(one)}"
                )
        if self.targets is not None and self.targets.ndim > 1:
            raise ValueError(
                f"targets must have shape ({number},), got {self.targets.shape}"
            )
        if self.owners is not None and self.originals is not None:
            if not _is_constant(self.owners.codes, self.originals.codes):
                raise ValueError("owners must be the same of all copies of an example")
        if isinstance(self.features, np.ndarray):
            self.features.setflags(write=False)
        if self.targets is not None:
            self.targets.setflags(write=False)

    @classmethod
    def from_records(
        cls,
        features: Any,
        targets: Any = None,
        *,
        units: Mapping[str, Any],
        example_level: str = "example",
        public_units: Sequence[Any] | None = None,
        owners: Any = None,
        originals: Any = None,
    ) -> ExampleTable:
        """Returns the table of the records, sorted into the order of the tree.

        Args:
          features: (R, ...) numbers, all finite.
          targets: (R,) numbers, all finite, or None.
          units: level name -> (R,) ids (integers or strings), top level first. Ids are
            global, as in `Population.from_ids`. The records are the level below.
          example_level: name of the level of the records.
          public_units: the public list of ids of the only level in ``units``; ids
            without a record become empty units. None: only units with records exist.
          owners: (R,) ids of people, see `Owners.from_ids`, or an `Owners`; None: the
            owners are not known.
          originals: (R,) ids, likewise. Records with the same id are copies of one
            example, such as its rotations, and are protected together. None: there are
            no copies.

        Raises:
          TypeError: features or targets that are not numbers, or ids of another type.
          ValueError: lengths that differ, a value that is not finite, a record whose
            unit is not on the public list, an id under two parents, or, if owners are
            given, a record with no owner or with several.
        """
        inputs = _numbers("features", features)
        values = None if targets is None else _numbers("targets", targets)
        if not units:
            raise ValueError("units must name at least one level, got none")
        if example_level in units:
            raise ValueError(
                f"units must not be named {example_level!r}, which is the level of the "
                f"records themselves, got {list(units)}"
            )
        columns = {name: id_array(name, ids) for name, ids in units.items()}
        if owners is not None and not isinstance(owners, Owners):
            owners = Owners.from_ids(owners)
        if originals is not None and not isinstance(originals, Owners):
            originals = Owners.from_ids(originals, name="originals")
        codes = {"owners": owners, "originals": originals}
        every = {**columns, "features": inputs, "targets": values, **codes}
        lengths = {name: len(one) for name, one in every.items() if one is not None}
        if len(set(lengths.values())) > 1 or not len(inputs):
            raise ValueError(
                f"all columns must have the same length, at least 1, got {lengths}"
            )
        tree = Population.from_ids(**columns, **{example_level: None})
        # Depth first, and within a unit in the order of the records. An id has one
        # parent, and units are sorted by id within theirs.
        order = np.lexsort([*columns.values()][::-1])
        if public_units is not None:
            if len(columns) != 1:
                raise ValueError(
                    "public_units is for tables with one level of units, "
                    f"got {list(columns)}"
                )
            tree = _with_empty_units(tree, public_units)
        if values is not None:
            values = values[order].astype(np.float32)
        owned, copied = (None if o is None else o.take(order) for o in codes.values())
        is_public = public_units is not None
        return cls(inputs[order], values, tree, owned, is_public, copied)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, top to bottom; the last is the level of the examples."""
        return self.population.level_names

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return len(self.features)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all values, shapes, types, units, level names, owners and copies.

        For features on disk it covers the checksum in their manifest, not the values.
        """
        digest = hashlib.sha256(repr(self.level_names).encode())
        arrays: list[Any] = [self.features, *self.population.children_counts]
        if self.targets is not None:
            arrays.append(self.targets)
        arrays += [ids.astype(str) for ids in self.population.unit_ids or ()]
        for codes in (self.owners, self.originals):
            if codes is not None:
                arrays += [codes.codes, codes.names]
        for array in arrays:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            is_stored = isinstance(array, StoredFeatures)
            data = array.digest if is_stored else np.ascontiguousarray(array).data
            digest.update(data)
        return digest.hexdigest()

    @functools.cached_property
    def class_places(self) -> np.ndarray:
        """(R,) int64: index of the unit above each example among all such units."""
        return self.places(self.population.num_levels - 1)

    def with_features(self, features: Any, targets: Any = None) -> ExampleTable:
        """Returns the table with other features, and targets if given."""
        targets = self.targets if targets is None else targets
        return dataclasses.replace(self, features=features, targets=targets)

    def take(self, rows: np.ndarray) -> ExampleTable:
        """Returns the table of some examples; units that lose all examples stay.

        ``rows`` are (n,) indices in ascending order, with repeats if wanted; another
        order raises a ValueError.
        """
        if np.any(np.diff(rows) < 0):
            raise ValueError("rows must be in ascending order")
        return self._part(rows)

    def of_classes(self, kept: np.ndarray) -> ExampleTable:
        """Returns the table of the units directly above examples where ``kept`` (C,).

        Empty ones are kept if marked, and all units above them.
        """
        return self._part(np.flatnonzero(kept[self.class_places]), kept)

    def _part(self, rows: np.ndarray, kept: np.ndarray | None = None) -> ExampleTable:
        """Returns the table of some rows; of the classes, only of those ``kept``."""
        *above, last = self.population.children_counts
        sizes = np.bincount(self.class_places[rows], minlength=len(last))
        ids = list((self.population.unit_ids or ())[: len(above)])
        if kept is not None:
            parents = np.repeat(np.arange(len(above[-1])), above[-1])
            above[-1] = np.bincount(parents[kept], minlength=len(above[-1]))
            sizes, ids[-1:] = sizes[kept], [one[kept] for one in ids[-1:]]
        return ExampleTable(
            self.features[rows],
            None if self.targets is None else self.targets[rows],
            Population((*above, sizes), self.level_names, tuple(ids) or None),
            None if self.owners is None else self.owners.take(rows),
            self.has_public_units,
            None if self.originals is None else self.originals.take(rows),
        )

    @property
    def people(self) -> PeopleStatistics | None:
        """Counts of people and of their examples; None without owners."""
        return self.spread(self.owners)

    def owned(self, privacy_unit: str | None) -> Owners | None:
        """Returns the originals for the privacy unit "original", else the owners."""
        return self.originals if privacy_unit == ORIGINAL else self.owners

    def spread(self, codes: Owners | None) -> PeopleStatistics | None:
        """Returns how the examples of each code are spread; None without codes."""
        if codes is None:
            return None
        above = len(self.level_names) - 1
        tasks = None if above < 2 else self.places(above - 1)
        return codes.statistics(self.class_places, tasks)

    def check_copies(self, privacy_unit: str) -> None:
        """Raises if the protected unit contains only some copies of an example."""
        names = list(self.level_names)
        if self.originals is None or privacy_unit not in names:
            return
        places = self.places(names.index(privacy_unit) + 1)
        if not _is_constant(places, self.originals.codes):
            raise ValueError(
                f"privacy_unit must be {ORIGINAL!r} for data with copies (rotations) "
                f"of examples, got {privacy_unit!r}, which contains only some of the "
                "copies, so that its epsilon would protect nobody; set "
                "people=PersonBounds(examples=1, classes=number of copies)"
            )

    def places(self, level: int) -> np.ndarray:
        """Returns (R,) int64: index of the unit above each example at a level.

        The index counts all units of that level. Levels count from 1 at the top.
        """
        tree = self.population
        return unit_labels(Population(tree.children_counts), level, tree.num_levels)

    def unit_column(self, level: str) -> np.ndarray:
        """Returns (R,) ids of the unit above each example at a named level."""
        names = list(self.level_names)
        if level not in names[:-1]:
            raise ValueError(f"level must be one of {tuple(names[:-1])}, got {level!r}")
        return unit_labels(self.population, names.index(level) + 1, len(names))

    def without_level(self, level: str) -> ExampleTable:
        """Returns the table without one of several levels above the examples.

        All other units stay, including empty ones.
        """
        *names, last = self.level_names
        if level not in names or len(names) < 2:
            raise ValueError(
                f"level must be one of several above the examples, {tuple(names)}, "
                f"got {level!r}"
            )
        place = names.index(level)
        names.remove(level)
        counts = list(self.population.children_counts)
        ids = list(self.population.unit_ids or ())
        ids[place : place + 1] = []
        below = counts.pop(place + 1)
        parents = np.repeat(np.arange(len(counts[place])), counts[place])
        merged = np.bincount(parents, below, minlength=len(counts[place]))
        counts[place] = merged.astype(np.int64)
        tree = Population(tuple(counts), (*names, last), tuple(ids) or None)
        return dataclasses.replace(self, population=tree)

    def select(self, level: str, ids: Sequence[Any]) -> ExampleTable:
        """Returns the examples in the named units of a level; empty units are dropped.

        Raises:
          ValueError: an unknown level, an unknown id, or no example left.
        """
        column = self.unit_column(level)
        wanted = np.asarray(ids)
        missing = np.setdiff1d(wanted, column)
        if missing.size:
            raise ValueError(
                f"ids must be units of {level!r}, got {missing[0].item()!r}"
            )
        kept = np.isin(column, wanted)
        *names, last = self.level_names
        return ExampleTable.from_records(
            self.features[kept],
            None if self.targets is None else self.targets[kept],
            units={name: self.unit_column(name)[kept] for name in names},
            example_level=last,
            owners=None if self.owners is None else self.owners.take(kept),
            originals=None if self.originals is None else self.originals.take(kept),
        )

    @property
    def num_units(self) -> dict[str, int]:
        """Number of units of each level, including units without examples."""
        names = enumerate(self.level_names, start=1)
        return {name: self.population.num_units(level) for level, name in names}

    def __repr__(self) -> str:
        shape = self.features.shape[1:]
        return f"ExampleTable(units={self.num_units}, features={shape})"


def numbered(
    numbers: np.ndarray, targets: Any = None, *, units: Mapping[str, Any], **more: Any
) -> ExampleTable:
    """Returns `from_records` of records by number; ``units`` may have no level."""
    if units:
        return ExampleTable.from_records(numbers, targets, units=units, **more)
    above = {"_" + more.get("example_level", ""): 0 * numbers}  # one unit of all
    whole = ExampleTable.from_records(numbers, targets, units=above, **more)
    tree = Population(whole.population.children_counts[1:], whole.level_names[1:])
    return dataclasses.replace(whole, population=tree)


def _is_constant(values: np.ndarray, groups: np.ndarray) -> bool:
    """Returns whether the values of each group are all equal."""
    first = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)
    first[groups] = values
    return bool(np.all(first[groups] == values))


def unit_labels(tree: Population, level: int, bottom: int) -> np.ndarray:
    """Returns, for each unit of level ``bottom``, the id of its unit at ``level``."""
    ids = (tree.unit_ids or ())[level - 1 : level]
    labels = ids[0] if ids else np.arange(tree.num_units(level))
    for below in tree.children_counts[level:bottom]:
        labels = np.repeat(labels, below)
    return np.asarray(labels)


def _with_empty_units(tree: Population, public: Sequence[Any]) -> Population:
    """Returns the tree with all units of a public list; some may be empty."""
    assert tree.unit_ids is not None  # made from ids
    ids = tree.unit_ids[0]
    listed = id_array("public_units", public)
    if (listed.dtype.kind == "U") != (ids.dtype.kind == "U"):
        raise TypeError(
            f"public_units must be ids like those of the records ({ids.dtype}), "
            f"got {listed.dtype}"
        )
    listed, times = np.unique(listed, return_counts=True)
    if np.any(times > 1):
        raise ValueError("public_units must not repeat an id")
    unlisted = np.setdiff1d(ids, listed)
    if unlisted.size:
        raise ValueError(
            "public_units must hold every unit that has records, "
            f"{unlisted[0].item()!r} is missing"
        )
    counts = np.zeros(len(listed), np.int64)
    counts[np.searchsorted(listed, ids)] = tree.children_counts[1]
    return Population((np.array([len(listed)]), counts), tree.level_names, (listed,))


def _numbers(name: str, value: Any) -> np.ndarray:
    """Returns a new array of finite numbers; floats become float32."""
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:  # ragged
        raise TypeError(f"{name} must be an array of numbers: {error}") from None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise TypeError(
            f"{name} must be an array of numbers with one row per example, "
            f"got {array.dtype} of shape {array.shape}"
        )
    if not array.size:
        raise ValueError(
            f"{name} must have at least one number and one row, got shape {array.shape}"
        )
    return kept_numbers(name, array)


def kept_numbers(name: str, array: np.ndarray, first: int = 0) -> np.ndarray:
    """Returns rows as integers or finite float32; errors count them from ``first``."""
    if array.dtype.kind in "iu":
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    with np.errstate(over="ignore"):  # infinity, which is refused
        rows = array.astype(np.float32)
    bad = ~np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if bad.any():
        row = first + int(np.argmax(bad))
        raise ValueError(f"{name} must be finite, row {row} is not")
    return rows
