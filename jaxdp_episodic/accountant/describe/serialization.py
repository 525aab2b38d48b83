"""Specs to dictionaries and back: one schema for TOML, JSON lines and ledgers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation

# Version of the dictionaries.
SCHEMA_VERSION = 1
# Largest nesting depth: above that of any schema or array in use, and far below the
# interpreter's recursion limit.
_MAX_DEPTH = 32
# Largest integer that NumPy and TOML hold.
_MAX_INTEGER = 2**63 - 1


def spec_to_dict(spec: Any) -> dict[str, Any]:
    """Returns a spec as a dictionary that JSON and TOML can hold, with the version."""
    return {"version": SCHEMA_VERSION, **_encode_spec(spec)}


def spec_from_dict(
    allowed: type | Sequence[type], mapping: Any, *, where: str | None = None
) -> Any:
    """Returns the spec that a dictionary describes; the dictionary may be untrusted."""
    classes = (allowed,) if isinstance(allowed, type) else tuple(allowed)
    where = where or " or ".join(cls.__name__ for cls in classes)
    refuse_hostile(where, mapping)
    return _decode(classes, mapping, where, nested=False)


def spec_fields(spec: Any) -> tuple[str, ...]:
    """Returns the names of the fields that ``==`` compares."""
    return _fields_of(spec if isinstance(spec, type) else type(spec))


@functools.cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


def _encode_spec(spec: Any) -> dict[str, Any]:
    """A spec's dictionary without the version."""
    values = {name: getattr(spec, name) for name in spec_fields(spec)}
    encoded = {k: _encode(v) for k, v in values.items() if v is not None}
    return {"type": type(spec).__name__, **encoded}


def _encode(value: Any) -> Any:
    """One field: spec, tuple, array or plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_spec(value)
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _decode(
    classes: tuple[type, ...], mapping: Any, where: str, *, nested: bool
) -> Any:
    """Builds the spec named by ``mapping["type"]`` from its fields."""
    if nested and isinstance(mapping, classes):
        return mapping
    _validation.instance(where, mapping, Mapping, "a table of keys")
    _check_version(mapping, where, required=not nested)
    names: dict[str, Any] = {cls.__name__: cls for cls in classes}
    if "type" not in mapping:
        raise ValueError(
            f"{where}: missing key 'type', which must be one of {tuple(names)}"
        )
    cls = names[_validation.choice(f"{where}.type", mapping["type"], names)]
    fields = {k: v for k, v in mapping.items() if k not in ("version", "type")}
    _check_keys(cls, fields, where)
    declared = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    for key in (key for key in cls.nested_specs if key in fields):
        path, value = f"{where}.{key}", fields[key]
        inner = functools.partial(_decode, cls.nested_specs[key], nested=True)
        if isinstance(value, Mapping) and declared[key].startswith("Mapping"):
            fields[key] = {n: inner(item, f"{path}.{n}") for n, item in value.items()}
        elif isinstance(value, list | tuple) and declared[key].startswith("tuple"):
            fields[key] = tuple(
                inner(item, f"{path}[{i}]") for i, item in enumerate(value)
            )
        else:
            fields[key] = inner(value, path)
    with _validation.prefixed(where):
        return cls.from_fields(fields)


def _check_version(mapping: Mapping[Any, Any], where: str, *, required: bool) -> None:
    if "version" not in mapping:
        if required:
            raise ValueError(
                f"{where}: missing key 'version' (this library writes {SCHEMA_VERSION})"
            )
        return
    version = mapping["version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        shown = _validation.shown(version)
        raise ValueError(f"{where}: version must be {SCHEMA_VERSION}, got {shown}")


def _check_keys(cls: Any, fields: Mapping[Any, Any], where: str) -> None:
    """Refuses unknown keys, then missing ones: a typo causes both."""
    known = (*spec_fields(cls), *cls.also_read)
    for key in fields:
        if not isinstance(key, str):
            raise TypeError(
                f"{where}: keys must be strings, got one of type {type(key).__name__}"
            )
        if key not in known:
            hint = _validation.nearest(key, known) or f"; the keys are {known}"
            raise ValueError(f"{where}: unknown key {_validation.shown(key)}{hint}")
    for field in dataclasses.fields(cls):
        required = (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        )
        if field.compare and required and field.name not in fields:
            options = cls.choices.get(field.name)
            rule = f", which must be one of {options}" if options else ""
            raise ValueError(f"{where}: missing key {field.name!r}{rule}")


def refuse_hostile(where: str, root: Any) -> None:
    """Refuses nesting too deep for Python's repr and integers too large for NumPy."""
    stack = [("", root, 0)]
    while stack:
        key, value, depth = stack.pop()
        if isinstance(value, Mapping | list | tuple):
            if depth > _MAX_DEPTH:
                raise ValueError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
            named = isinstance(value, Mapping)
            inside = value.items() if named else (("", item) for item in value)
            stack += ((name, item, depth + 1) for name, item in inside)
        elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
            at = f"{key} " if key != "" else ""
            raise ValueError(f"{where}: {at}holds an integer of more than 64 bits")
