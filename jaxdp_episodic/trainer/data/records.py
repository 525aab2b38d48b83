"""Records of a file or folder, read some at a time: into memory, or onto the disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxdp_episodic.trainer.data.splits import ClassSplit
from jaxdp_episodic.trainer.data.stored_features import CODE_VALUES
from jaxdp_episodic.trainer.data.table import ExampleTable

Part = tuple[np.ndarray, np.ndarray]
"""Numbers of some records in their source, ascending, and what is kept of each."""


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one split."""

    # the table that they make; its features are their numbers in the source
    numbers: ExampleTable
    dtype: np.dtype  # of what is kept of each
    shape: tuple[int, ...]  # of it
    encoding: str | None  # see `StoredFeatures`
    # yields the parts of those records whose numbers, ascending, it is given
    read: Callable[[np.ndarray], Iterable[Part]]

    def part(self, parts: ClassSplit, split: str) -> Records:
        """Returns the records whose classes are in a split; errors as of its `part`."""
        return dataclasses.replace(self, numbers=parts.part(self.numbers, split))

    def placed(self) -> Iterator[Part]:
        """Yields places in the table, and what is kept of the records there."""
        numbers = np.asarray(self.numbers.features).reshape(-1)
        order = np.argsort(numbers)
        wanted, done = numbers[order], 0
        for rows, values in self.read(wanted):
            yield order[np.searchsorted(wanted, rows)], values
            done += len(rows)
        if done != len(wanted):
            raise ValueError(f"there must be {len(wanted)} records, {done} came")

    def table(self, max_bytes: int | None = None) -> ExampleTable:
        """Returns the table in memory."""
        number = self.numbers.num_examples
        dtype = self.dtype if self.encoding is None else np.dtype(np.float32)
        needed = number * math.prod(self.shape) * dtype.itemsize
        if max_bytes is not None and needed > max_bytes:
            raise ValueError(
                f"the features must take at most max_bytes={max_bytes} bytes, "
                f"{number} examples take {needed}"
            )
        features = np.empty((number, *self.shape), dtype)
        for places, values in self.placed():
            if self.encoding is not None:
                values = CODE_VALUES[self.encoding][values]
            features[places] = values
        return self.numbers.with_features(features)


def only(wanted: np.ndarray, parts: Iterable[np.ndarray]) -> Iterator[Part]:
    """Yields of successive parts of a whole source the records that are wanted."""
    first = 0
    for values in parts:
        low, high = np.searchsorted(wanted, [first, first + len(values)])
        if high > low:
            rows = wanted[low:high]
            yield rows, values[rows - first]
        first += len(values)
