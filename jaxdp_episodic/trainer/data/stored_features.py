"""Features on disk, read by rows; bit for bit the values that a loader returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.files.column_folder import StoredColumn

UNIT = "unit"
INVERTED = "inverted"
# Float values of 8-bit codes, by encoding. Compiled code must look values up here: a
# compiler may replace the division by a product, which rounds differently.
_CODES = np.arange(256, dtype=np.uint8).astype(np.float32) / 255
CODE_VALUES = {UNIT: _CODES, INVERTED: 1 - _CODES}


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
            if encoding not in CODE_VALUES or column.dtype != np.uint8:
                raise ValueError(
                    f"{column.path} must hold uint8 in one of the encodings "
                    f"{tuple(CODE_VALUES)}, or plain numbers; got {column.dtype} in "
                    f"{encoding[:60]!r}"
                )
        elif column.dtype.kind not in "iuf":
            raise ValueError(f"{column.path} must hold numbers, holds {column.dtype}")
        # Key of `CODE_VALUES` for uint8 codes; None: the file holds the values.
        self.encoding, self._column = encoding, column
        self.shape = column.shape if shape is None else shape
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.code_dtype = column.dtype
        self.dtype = column.dtype if encoding is None else np.dtype(np.float32)

    @property
    def digest(self) -> bytes:
        """The file's checksum and the encoding, which identify the values."""
        return f"{self._column.sha256} {self.encoding}".encode()

    def __len__(self) -> int:
        return self.shape[0]

    def codes(self, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the stored codes of the rows, and zeros where the mask is False."""
        codes = np.zeros((*mask.shape, *self.shape[1:]), self._column.dtype)
        flat = codes.reshape(mask.size, *self.shape[1:])
        indices = np.flatnonzero(mask)
        self._column.gather(rows.reshape(-1)[indices], indices, flat)
        return self._checked(codes)

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            first, last, stride = index.indices(len(self))
            if stride == 1:
                codes = self._column.rows(first, max(first, last))
                return self._decoded(codes.reshape(len(codes), *self.shape[1:]))
            index = np.arange(first, last, stride)
        rows = np.asarray(index)
        if rows.dtype == bool:
            if rows.shape != self.shape[:1]:
                raise IndexError(f"a mask must be of {len(self)} examples")
            rows = np.flatnonzero(rows)
        if rows.dtype.kind not in "iu" and rows.size:
            raise IndexError(f"an index must be integers, got {rows.dtype}")
        rows = np.where(rows < 0, rows + len(self), rows).astype(np.int64)
        if rows.size and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"an index must lie in 0 .. {len(self) - 1}")
        return self._decoded(self.codes(rows, np.ones(rows.shape, bool)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("copy=False is impossible for features on disk")
        return self[:] if dtype is None else self[:].astype(dtype)

    def copy(self) -> np.ndarray:
        """Returns all features as an array in memory."""
        return self[:]

    def astype(self, dtype: Any) -> np.ndarray:
        """Returns all features as an array in memory of another type."""
        return self[:].astype(dtype)

    def reshape(self, *shape: int) -> StoredFeatures:
        """Returns the same features with another shape per example."""
        item = np.empty(self.shape[1:], np.bool_).reshape(shape[1:]).shape
        if shape[0] not in (-1, len(self)):
            raise ValueError(f"the number of examples must stay {len(self)}")
        return StoredFeatures(self._column, self.encoding, (len(self), *item))

    def _decoded(self, codes: np.ndarray) -> np.ndarray:
        if self.encoding is not None:
            return CODE_VALUES[self.encoding][codes]
        return self._checked(codes)

    def _checked(self, codes: np.ndarray) -> np.ndarray:
        """Returns the codes, or raises for non-finite values: the file has changed."""
        if codes.dtype.kind == "f" and not np.isfinite(codes).all():
            raise ValueError(f"{self._column.path} must hold finite numbers")
        return codes
