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
        codes[mask] = self._read(rows[mask])
        return codes

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = np.arange(len(self))[index]
        codes = self._read(rows.reshape(-1)).reshape(*rows.shape, *self.shape[1:])
        return codes if self.encoding is None else CODE_VALUES[self.encoding][codes]

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
