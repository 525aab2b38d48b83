"""Hypothesis strategies that break valid files and valid descriptions."""

import copy
import datetime
import math
from typing import Any

import hypothesis.strategies as st

# Bytes that often break parsers.
SNIPPETS = (
    *(b"\0", b"\xff", b"\xff\xfe\x00\x00", b"\xef\xbb\xbf"),
    b"\xed\xa0\x80",  # a surrogate in UTF-8
    *(b"\r\n", b"\n", b'"', b"'''", b'"""', b"\\", b",", b"=", b".", b"#"),
    *(b"[[", b"]]", b"{", b"}", b"[" * 3000, b"{a=" * 3000, b"a." * 3000),
    *(b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000, b"-1", b"1e400", b"5e-324"),
    *(b"-9223372036854775809", b"18446744073709551616", b"nan", b"-inf", b"true"),
    *(b"1979-05-27T07:32:00Z", b"../../../etc/passwd", b"__class__", b"x" * 200_000),
    *(b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
    *(b"(99999999999,)", b"'|O'", b"PK\x01\x02", b"PAR1"),
)


@st.composite
def broken_bytes(draw: Any, seeds: tuple[bytes, ...]) -> bytes:
    """A valid file with one to four broken places, or an empty one."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.integers(0, 8)))
        match draw(st.integers(0, 5)):
            case 0:
                data[place:end] = draw(st.binary(max_size=8))
            case 1:
                data[place:end] = draw(st.sampled_from(SNIPPETS))
            case 2:
                data[place:end] = b""
            case 3:  # truncated
                del data[place:]
            case 4:  # duplicated
                data[place:place] = data[max(0, place - 40) : place]
            case 5 if data:
                data[place % len(data)] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Values that every field must handle; mutable ones are created anew.
LEAVES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 2, 2**53, 2**53 + 1, 2**63, -(2**63) - 1),
    *(-0.0, 0.5, 1.0, 1e308, -1e308, 5e-324, 1 - 2**-53, math.nan, math.inf, -math.inf),
    *("", "\0", "\ud800", "../../etc/passwd", "step", "example", "class"),
    *(1 + 2j, b"bytes", datetime.datetime(2026, 1, 1)),
    *(lambda: 10**400, lambda: "a" * 10_000),
    *(
        lambda: [],
        lambda: [[]],
        lambda: [1, 2],
        lambda: [[1], [2, 3]],
        lambda: [1, [2]],
    ),
    *(lambda: [0.1, "b"], lambda: [True], lambda: ["a", "a"]),
    *(lambda: {}, lambda: {"0": 1, "1": 2}, lambda: {1: 2}, lambda: {"version": 2}),
    *(lambda: {"type": "Population"}, lambda: {"type": "__class__", "version": 1}),
    *(lambda: _nested(40), lambda: _nested(2000)),
    *(lambda: [10**15] * 3, lambda: list(range(1000))),
)


def leaves() -> st.SearchStrategy[Any]:
    """Values of every kind, mostly invalid ones."""
    return st.one_of(
        st.sampled_from(LEAVES).map(lambda leaf: leaf() if callable(leaf) else leaf),
        st.integers(-3, 40),
        st.floats(),
        st.text(max_size=5),
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places where something can be replaced: keys and indices, from the top."""
    if isinstance(value, dict):
        items: Any = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    if len(path) > 20:
        return []
    found = [(*path, key) for key, _ in items]
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


@st.composite
def broken_documents(draw: Any, seeds: tuple[Any, ...]) -> Any:
    """A valid description with one to three fields replaced or removed."""
    document = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 3))):
        places = _places(document)
        if not places:
            return draw(leaves())
        *above, last = draw(st.sampled_from(places))
        table = document
        for key in above:
            table = table[key]
        match draw(st.integers(0, 5)):
            case 0:
                del table[last]
            case 1 if isinstance(table, dict):
                table[draw(st.text(max_size=4) | st.just("a" * 5000))] = draw(leaves())
            case 2 if isinstance(table, list):
                table.insert(last, table[last])
            case 3 if isinstance(table[last], list):
                table[last] = [draw(leaves()) for _ in range(3)]
            case _:
                table[last] = draw(leaves())
    return document
