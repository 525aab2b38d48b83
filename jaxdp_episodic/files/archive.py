"""NumPy archives (npz, npy) of unknown origin: no pickles, bounded memory.

Sizes and headers are checked before data are read.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic._validation import one_line

_MAX_ARRAYS = 4096  # each costs reading its header
_MAX_LISTING_BYTES = 2**24  # of an archive, in addition to its arrays
_MAX_HEADER_BYTES = 2**14  # of one array; NumPy's own default limit is 10,000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # same as 2.0 for plain arrays (ASCII)
}
# Exceptions that NumPy raises for broken headers.
_NO_HEADER = (ValueError, KeyError, TypeError, SyntaxError, OverflowError)
_NO_HEADER += (tokenize.TokenError, RecursionError, MemoryError)
_KINDS = "biufcSU"  # numbers, booleans, bytes and text
# Exceptions that zipfile raises for broken archives; RuntimeError: encrypted.
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError),
    *(RuntimeError, ValueError, OverflowError, IndexError, KeyError),
)

Header = tuple[tuple[int, ...], np.dtype, bool]
"""Shape and dtype of an array, and whether it is in Fortran order."""


def check_plain_file(path: Path) -> None:
    """Raises for devices, pipes and folders; reading these may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} must be a plain file")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Returns a file of unknown origin; raises if it has more than ``max_bytes``."""
    check_plain_file(path)
    with path.open("rb") as file:
        # At most max_bytes + 1, without a buffer larger than the file.
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"must have at most {max_bytes} bytes")
    return data


def read_arrays(
    path: Path, *, max_bytes: int, names: list[str] | None = None
) -> dict[str, np.ndarray]:
    """Returns the arrays (numbers, booleans, text) of an npz file by name."""
    check_plain_file(path)
    try:
        if path.stat().st_size > max_bytes + _MAX_LISTING_BYTES:
            raise ValueError(f"at most max_bytes={max_bytes} bytes")
        with zipfile.ZipFile(path) as archive:
            there = archive.infolist()
            members = {one.filename.removesuffix(".npy"): one for one in there}
            if len(there) > _MAX_ARRAYS:
                raise ValueError(f"more than {_MAX_ARRAYS} arrays")
            if len(members) < len(there):
                raise ValueError("two arrays have one name")
            if not "".join(members).isprintable():
                raise ValueError("a name has characters that cannot be printed")
            if any(one.compress_type not in _METHODS for one in there):
                raise ValueError("an array has a compression that NumPy does not use")
            if sum(max(one.file_size, 0) for one in there) > max_bytes:
                raise ValueError(f"at most max_bytes={max_bytes} bytes uncompressed")
            for one in there:  # those that are not wanted, too
                with archive.open(one) as stream:
                    npy_header(stream, one.filename, one.file_size)
            arrays = {}
            for name in members if names is None else names:
                if name not in members:
                    shown = ", ".join(map(repr, list(members)[:20]))
                    raise ValueError(f"no array {name!r}; the arrays are {shown}")
                arrays[name] = _array(archive, members[name])
            return arrays
    except OSError as error:
        if error.filename is not None:
            raise
        # zipfile sought an offset beyond the end of the file.
        raise ValueError(f"{path} must be an npz file: {error}") from error
    except _BROKEN as error:
        why = str(error) or "it is truncated"  # EOFError has no text
        raise ValueError(f"{path} must be an npz file: {why}") from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Returns the array in a member whose header has been checked."""
    name = member.filename
    with archive.open(member) as stream:
        shape, kind, is_fortran = npy_header(stream, name, member.file_size)
        claimed = math.prod(shape) * kind.itemsize
        content = bytearray()  # grows with what is read, not with the claimed size
        while part := stream.read(min(2**20, claimed + 1 - len(content))):
            content += part
    if len(content) != claimed:
        how = "is truncated" if len(content) < claimed else "has more than it states"
        raise ValueError(f"{name} {how}")
    values = np.frombuffer(content, np.uint8).view(kind)
    # NumPy accepts bytes that are no value of their dtype.
    if kind.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise ValueError(f"{name} has booleans other than 0 and 1")
    if kind.kind == "U":
        points = values.view(np.dtype(np.uint32).newbyteorder(kind.byteorder))
        if np.any((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))):
            raise ValueError(f"{name} has text that is not Unicode")
    return values.reshape(shape, order="F" if is_fortran else "C")


def npy_header(stream: Any, name: str, size: int) -> Header:
    """Returns the header of an ``.npy`` of ``size`` bytes; moves on to its data."""
    begun = stream.tell()
    try:
        read = _HEADERS[np.lib.format.read_magic(stream)]
        shape, is_fortran, kind = read(stream, max_header_size=_MAX_HEADER_BYTES)
    except _NO_HEADER as error:
        why = one_line(error)[:200]
        raise ValueError(f"{name} must be an array of NumPy: {why}") from None
    if kind.hasobject:
        raise ValueError(
            f"{name} must not contain Python objects: pickles are refused; save text "
            "as array.astype(str), numbers as array.astype(float)"
        )
    if kind.kind not in _KINDS or not kind.itemsize:
        raise ValueError(f"{name} must contain numbers or text, has dtype {kind}")
    # If one axis has length 0, the others could have any length.
    items = math.prod(max(n, 1) for n in shape)
    if len(shape) > 32 or items > 2**48 or any(type(n) is bool or n < 0 for n in shape):
        raise ValueError(f"{name} has the impossible shape {str(shape)[:60]} of {kind}")
    claimed, there = math.prod(shape) * kind.itemsize, size + begun - stream.tell()
    if claimed != there:
        how = "is truncated" if claimed > there else "has more than it states"
        raise ValueError(f"{name} {how}: {claimed} bytes of data claimed")
    return shape, kind, is_fortran
