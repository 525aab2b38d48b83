"""Namespaces, loops and trees of arrays, for kernels that run on NumPy and on JAX."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
"""A NumPy array, a JAX array or a tracer."""


# Classes that are not JAX's. `namespace` is called very often, and this is fastest.
_NUMPY = (np.ndarray, np.generic, float, int)


def namespace(*arrays: Any) -> Any:
    """Returns ``jax.numpy`` if any of the arrays is JAX's, else ``numpy``."""
    for array in arrays:
        if not isinstance(array, _NUMPY):
            of = getattr(array, "__array_namespace__", None)
            if of is not None:
                return of()
    return np


def fori_loop(
    xp: Any,
    start: int,
    stop: Any,
    body: Callable[[Any, Any], Any],
    value: Any,
    settled: Callable[[Any], Any] | None = None,
) -> Any:
    """Applies ``value = body(i, value)`` for i from ``start`` to ``stop - 1``.

    NumPy also stops when ``settled(value)``.
    """
    if xp is not np:
        from jax import lax

        def step(i: Any, value: Any) -> Any:
            return turned(body(i, turned(value)))

        return turned(lax.fori_loop(start, stop, step, turned(value)))
    for i in range(start, int(stop)):
        value = body(np.int64(i), value)
        if settled is not None and settled(value):
            break
    return value


def while_loop(
    xp: Any, condition: Callable[[Any], Any], body: Callable[[Any], Any], value: Any
) -> Any:
    """Applies ``value = body(value)`` while ``condition(value)``."""
    if xp is not np:
        from jax import lax

        return lax.while_loop(condition, body, value)
    while condition(value):
        value = body(value)
    return value


def where_needed(
    xp: Any,
    condition: Array,
    value: Array,
    otherwise: Callable[..., Array],
    given: Any = (),
) -> Array:
    """``where(condition, value, otherwise(*given))``, which skips ``otherwise``.

    If the condition holds everywhere, ``otherwise`` is not evaluated. NumPy evaluates
    it for the settings that need it, if it has the arrays ``given``.
    """
    if xp is not np:
        from jax import lax

        return lax.cond(
            xp.all(condition),
            lambda: value,
            lambda: xp.where(condition, value, otherwise(*given)),
        )
    if np.all(condition):
        return value
    if not given:
        return np.where(condition, value, otherwise())
    left = np.flatnonzero(~condition)
    value = np.array(value)
    value[left] = otherwise(*taken(given, left))
    return value


def turned(tree: Any) -> Any:
    """What a loop in JAX carries from pass to pass: on the CPU transposed arrays."""
    # LLVM does not vectorize a loop that overwrites an array it reads (5 times slower).
    # XLA lets elementwise results overwrite operands, but copies a transposed one.
    import jax

    is_cpu = jax.default_backend() == "cpu"
    return jax.tree.map(lambda a: a.T, tree) if is_cpu else tree


def map_first(function: Callable[..., Any], *arrays: Any) -> Any:
    """Stacks ``function(a[i], …)`` over the first axis of (tuples of) NumPy arrays."""
    found = [function(*at(arrays, i)) for i in range(len(arrays[0]))]
    rows: list[list[Any]] = [[] for _ in found]
    for row, one in zip(rows, found, strict=True):
        map_arrays(row.append, one)
    columns = map(np.array, zip(*rows, strict=True))
    return map_arrays(lambda _: next(columns), found[0])


def rows_of(xp: Any, function: Callable[[Any], Array], number: Any, most: int) -> Array:
    """Stacks ``function(i)`` for i < ``number``, padded with zeros to ``most`` rows."""
    if most == 1:  # as always in NumPy
        return function(0)[None]
    import jax

    def put(i: Any, rows: Array) -> Array:
        # Indexing from the end, and scatters, make XLA's programs a tenth longer.
        update = jax.lax.dynamic_update_index_in_dim
        return update(rows, function(i), i, 0, allow_negative_indices=False)

    function = jax.jit(function)  # traced once, for the shape and for the loop
    row = jax.eval_shape(function, np.int32(0))
    return jax.lax.fori_loop(0, number, put, xp.zeros((most, *row.shape), row.dtype))


def by_blocks(
    function: Callable[..., tuple[Any, ...]], trees: tuple[Any, ...], block: int
) -> tuple[Any, ...]:
    """(n,) results for trees of (..., n) arrays; JAX computes blocks of settings."""
    leaves: list[Any] = []
    map_arrays(leaves.append, trees)
    xp = namespace(*leaves)
    if xp is np or block in (0, leaves[0].shape[-1]):
        return function(*trees)
    from jax import lax

    def cut(a: Any) -> Any:
        """(..., n) to (n / block, ..., block)."""
        return xp.moveaxis(a.reshape(*a.shape[:-1], -1, block), -2, 0)

    found = lax.map(lambda one: function(*one), map_arrays(cut, trees))
    return tuple(a.reshape(-1) for a in found)


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every array in nested containers and dataclasses."""
    if isinstance(tree, _NUMPY):  # the most frequent case
        return function(tree)
    if isinstance(tree, dict):
        parts = map_arrays(function, list(tree.values()))
        return dict(zip(tree, parts, strict=True))
    if isinstance(tree, tuple | list):
        old: Any = tree
    elif hasattr(tree, "__dataclass_fields__"):
        old = map(functools.partial(getattr, tree), field_names(type(tree)))
    else:
        return function(tree)
    parts = []
    for part in old:
        is_array = type(part) is np.ndarray
        parts.append(function(part) if is_array else map_arrays(function, part))
    if isinstance(tree, list):
        return parts
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


def taken(tree: Any, index: Any) -> Any:
    """Settings ``index``, on the last axis, of every array in a tree."""
    return map_arrays(operator.itemgetter((..., index)), tree)


@functools.cache
def field_names(kind: type) -> tuple[str, ...]:
    """Returns the field names of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


def at(tree: Any, index: Any) -> Any:
    """Entry ``index`` of the first axis of every array in nested tuples."""
    row: Any = operator.itemgetter(index)
    if not isinstance(index, _NUMPY):
        from jax import lax

        options = {"index": index, "keepdims": False, "allow_negative_indices": False}
        row = functools.partial(lax.dynamic_index_in_dim, **options)
    return map_arrays(row, tree)


def rows_at(array: Array, index: Array) -> Array:
    """Entries of a (..., J, n) array in rows ``index`` (K, n): (..., K, n)."""
    if isinstance(index, np.ndarray):  # four times as fast as `take_along_axis`
        return array[..., index, np.arange(index.shape[-1])]
    index = index[(None,) * (array.ndim - 2)]
    rows = namespace(index).take_along_axis
    return rows(array, index, axis=-2, mode="promise_in_bounds")


def computed_once(xp: Any, tree: Any) -> Any:
    """The same arrays, behind a barrier for XLA's simplification."""
    if xp is np:
        return tree
    from jax import lax

    return lax.optimization_barrier(tree)


def stored(xp: Any, tree: Any) -> Any:
    """The same arrays, which XLA on the CPU stores, not computes again for each use."""
    if xp is np:
        return tree
    import jax

    if jax.default_backend() != "cpu":
        return tree
    # XLA fuses nothing into a branch, and cannot see that the other is never taken.
    always = jax.lax.optimization_barrier(np.True_)
    nothing = functools.partial(jax.tree.map, xp.zeros_like)
    return jax.lax.cond(always, lambda tree: tree, nothing, tree)


def stop_gradient(xp: Any, tree: Any) -> Any:
    """The same numbers with derivative 0, for nodes and scales of a quadrature."""
    if xp is np:
        return tree
    from jax import lax

    return lax.stop_gradient(tree)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + e^-x)`` without overflow."""
    xp = namespace(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1.0, small) / (1 + small)


def logsumexp(x: Array, axis: int = 0) -> Array:
    """``log(sum(e^x))`` over an axis; no entry may be inf. An empty sum is -inf."""
    xp = namespace(x)
    peak = x.max(axis=axis, keepdims=True)
    peak = xp.where(xp.isfinite(peak), peak, 0.0)
    total = xp.exp(x - peak).sum(axis=axis)
    with np.errstate(divide="ignore"):
        return xp.log(total) + peak.squeeze(axis)


def softmax(x: Array) -> Array:
    """``e^x`` over its sum along the first axis."""
    xp = namespace(x)
    grown = xp.exp(x - xp.max(x, axis=0))
    return grown / xp.sum(grown, axis=0)
