"""The base class of all specs: value semantics, checks, and dictionaries.

One schema of dictionaries serves TOML, JSON lines and ledgers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation

Check = Callable[[str, Any], Any]
"""From the name and value of a field to its checked value; raises for bad values."""
# Version of the dictionaries.
SCHEMA_VERSION = 1
# Largest nesting depth: above that of any schema or array in use, and far below the
# interpreter's recursion limit.
_MAX_DEPTH = 32
# Largest integer that NumPy and TOML hold.
_MAX_INTEGER = 2**63 - 1


class Kind(NamedTuple):
    """How fields of a type are checked, and what a dictionary may hold there."""

    check: Check
    # For numbers that may be arrays: the check of those that JAX does not trace.
    number: Check | None = None
    # Classes that a dictionary may describe.
    specs: tuple[type, ...] = ()
    # tuple or Mapping if each element of it is of this kind.
    several: Any = None


def number(check: Check) -> Kind:
    """Returns the kind of one number."""
    return Kind(functools.partial(_validation.one, check=check))


def numbers(check: Check) -> Kind:
    """Returns the kind of numbers that may be arrays; they broadcast together."""

    def checked(name: str, value: Any) -> Any:
        return value if _validation.is_traced(value) else check(name, value)

    return Kind(checked, number=check)


AT_LEAST_ZERO = functools.partial(_validation.integer_array, minimum=0)
AT_LEAST_ONE = functools.partial(_validation.integer_array, minimum=1)

NonNegative = Annotated[float, number(_validation.nonnegative_array)]
Probability = Annotated[float, number(_validation.probability_array)]
Size = Annotated[int, number(AT_LEAST_ONE)]
# Scalars or arrays.
NonNegatives = Annotated[float | np.ndarray, numbers(_validation.nonnegative_array)]
Positives = Annotated[ArrayLike, numbers(_validation.positive_array)]
Probabilities = Annotated[ArrayLike, numbers(_validation.probability_array)]
PositiveShares = Annotated[ArrayLike, numbers(_validation.positive_share_array)]
Counts = Annotated[int | np.ndarray, numbers(AT_LEAST_ZERO)]
Sizes = Annotated[ArrayLike, numbers(AT_LEAST_ONE)]


def _word(name: str, value: Any) -> str:
    """Returns a name; refuses anything else."""
    if not _validation.instance(name, value, str, "a string"):
        raise ValueError(f"{name} must be a non-empty name, got ''")
    return value


Word = Annotated[str, _word]


@functools.cache
def kinds_of(cls: type) -> dict[str, Kind]:
    """Returns the kinds of the fields of a class that are checked by their types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields: Any = dataclasses.fields(cls)
    found = {field.name: _kind(hints[field.name]) for field in fields}
    return {name: kind for name, kind in found.items() if kind is not None}


@functools.cache
def _kind(hint: Any) -> Kind | None:
    """Returns how values of a type are checked; None if they are not."""
    if hasattr(hint, "__metadata__"):
        mark = hint.__metadata__[0]
        return mark if isinstance(mark, Kind) else Kind(mark)
    several, options = typing.get_origin(hint), typing.get_args(hint) or (hint,)
    known = [one for one in options if isinstance(one, type) and issubclass(one, Spec)]
    if several in (tuple, Mapping):
        key, inside = _kind(options[0]), _kind(options[several is Mapping])
        if inside is None:
            return None
        of_key = key.check if key and several is Mapping else None
        check = functools.partial(_each_checked, several, of_key, inside.check)
        return inside._replace(check=check, several=several)
    if known:
        *names, last = (getattr(one, "called", "None") for one in options)
        words = f"a {', '.join(names)}{' or ' * bool(names)}{last}"
        check = functools.partial(_validation.instance, kinds=options, words=words)
        # A base that messages call otherwise stands for its subclasses.
        lists = (
            (one,) if one.called == one.__name__ else one.__subclasses__() or (one,)
            for one in known
        )
        return Kind(check, specs=tuple(itertools.chain(*lists)))
    is_optional = types.NoneType in options and len(options) > 1
    for inside in filter(None, map(_kind, options if is_optional else ())):
        return inside._replace(check=functools.partial(_unless_none, inside.check))
    return None


def checked(name: str, value: Any, hint: Any) -> Any:
    """Returns ``value`` if it is of one of these classes of specs."""
    kind = _kind(hint)
    return value if kind is None else kind.check(name, value)


def _unless_none(check: Check, name: str, value: Any) -> Any:
    return None if value is None else check(name, value)


def _each_checked(
    several: Any, of_key: Check | None, check: Check, name: str, value: Any
) -> Any:
    """Returns the checked elements of a list, or of a table whose keys are checked."""
    is_list = several is tuple
    kinds, words = (list | tuple, "a list") if is_list else (Mapping, "a table")
    _validation.instance(name, value, kinds, words)
    for key in value:
        if of_key is not None:
            of_key(f"each name in {name}", key)
    found = each(lambda where, one: frozen(check(where, one)), name, value)
    return found if is_list else types.MappingProxyType(found)


def each(function: Callable[[str, Any], Any], where: str, value: Any) -> Any:
    """Returns a list or table with ``function(path, element)`` for each element."""
    if isinstance(value, Mapping):
        return {k: function(f"{where}[{k!r}]", one) for k, one in value.items()}
    return tuple(function(f"{where}[{i}]", one) for i, one in enumerate(value))


def frozen(value: Any) -> Any:
    """Returns a 0-d array as a Python number; makes other arrays read-only."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if value.ndim == 0:
        return value.item()
    value.setflags(write=False)
    return value


class ByValue:
    """Base of frozen dataclasses that compare by value, including arrays."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _value_key(self) == _value_key(other)

    def __hash__(self) -> int:
        return hash((type(self), _value_key(self)))


class _OfKinds(NamedTuple):
    """What the fields' kinds say, by name: an attribute of classes of specs."""

    what: str

    def __get__(self, spec: Any, cls: type) -> dict[str, Any]:
        every = ((n, getattr(k, self.what)) for n, k in kinds_of(cls).items())
        return {name: value for name, value in every if value}


@typing.dataclass_transform(
    eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field,)
)
class Spec(ByValue):
    """Base of frozen dataclasses that are checked by the types of their fields.

    The value of a field ``Annotated[type, check]`` is replaced by ``check(name,
    value)``; a `Kind` in place of the check says more. A field of a spec's type must be
    such a spec. Each element of a tuple or Mapping of such types is checked.
    """

    # What messages call such a spec.
    called: ClassVar[str]
    # Required field -> its allowed values.
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Keys that a dictionary may have besides the fields: arguments of `from_fields`.
    also_read: ClassVar[tuple[str, ...]] = ()
    # Pairs of numeric fields of which the first is at most the second.
    at_most: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Field -> its check, for fields that may be arrays and broadcast together.
    numeric: ClassVar[Any] = _OfKinds("number")
    # Field -> the classes that a dictionary may describe there.
    nested_specs: ClassVar[Any] = _OfKinds("specs")

    def __init_subclass__(cls, **how: Any) -> None:
        cls.called = vars(cls).get("called", cls.__name__)
        dataclasses.dataclass(frozen=True, eq=False, **how)(cls)

    def __post_init__(self) -> None:
        self.check_fields()
        if not self.is_traced:  # otherwise once the numbers are known
            self.check_values()

    def check_fields(self) -> None:
        """Checks each field by itself, and that the numeric ones broadcast."""
        for name, kind in kinds_of(type(self)).items():
            set_checked(self, kind.check, name)
        _ = self.shape

    def check_values(self) -> None:
        """Refuses fields that contradict each other."""
        for small, large in self.at_most:
            value, most = getattr(self, small), getattr(self, large)
            if np.any(np.greater(value, most)):
                raise ValueError(
                    f"{small} must be at most {large}, got {small}={value!r}, "
                    f"{large}={most!r}"
                )

    @functools.cached_property
    def is_traced(self) -> bool:
        """Whether JAX traces a number of this spec; see `traced_numbers`."""
        return any(map(_validation.is_traced, self.all_numbers.values()))

    @property
    def numbers(self) -> dict[str, Any]:
        """The numeric fields that are set, by name."""
        every = {name: getattr(self, name) for name in self.numeric}
        return {name: value for name, value in every.items() if value is not None}

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all numbers, including those of the specs in this one."""
        return _validation.broadcast_shape(**self.all_numbers)

    @functools.cached_property
    def all_numbers(self) -> dict[str, Any]:
        """All numbers of this spec, and of the specs in it, by field path."""
        found: dict[str, Any] = {}
        mapped(self, found.setdefault)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON- and TOML-safe dictionary with "version" and "type"."""
        return {"version": SCHEMA_VERSION, **_encode(self)}

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the spec that ``mapping`` describes; see `spec_from_dict`."""
        return spec_from_dict(cls, mapping, where=where)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the spec with these fields."""
        return cls(**fields)


def mapped(
    spec: Any,
    function: Callable[[str, Any], Any],
    where: str = "",
    *,
    checked: bool = True,
) -> Any:
    """Returns the spec with ``function(path, value)`` in place of each number."""
    # Without `checked` the results need not be numbers.

    def inside(place: str, value: Any) -> Any:
        return mapped(value, function, place, checked=checked)

    if isinstance(spec, tuple | Mapping):
        parts = each(inside, where, spec)
        keys = spec if isinstance(spec, Mapping) else range(len(spec))
        return spec if all(parts[key] is spec[key] for key in keys) else parts
    if not isinstance(spec, Spec):
        return function(where, spec)
    fields = {name: getattr(spec, name) for name in spec_fields(spec)}
    changed = {}
    for name, kind in kinds_of(type(spec)).items():
        if (kind.number or kind.specs) and fields[name] is not None:
            new = inside(f"{where}.{name}".lstrip("."), fields[name])
            if new is not fields[name]:
                changed[name] = new
    if not changed:
        return spec
    if checked:
        return type(spec).from_fields({**fields, **changed})
    other = object.__new__(type(spec))  # without cached properties
    own: Any = dataclasses.fields(spec)  # pyright: ignore[reportArgumentType]: specs are dataclasses
    every = {field.name: getattr(spec, field.name) for field in own}
    vars(other).update({**every, **changed})
    return other


def traced_numbers(spec: Spec) -> dict[str, Any]:
    """Returns the numbers of a spec that JAX traces, by field path."""
    every = spec.all_numbers.items()
    return {where: value for where, value in every if _validation.is_traced(value)}


def refuse_traced(spec: Spec) -> None:
    """Raises if JAX traces a number of the spec, and names one."""
    for where in traced_numbers(spec):
        raise TypeError(
            f"{where} must be a known number, got a value that JAX traces: within "
            "jax.jit, jax.grad and jax.vmap use jaxdp_episodic.traced"
        )


def setting_of(spec: Any, index: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Returns one of the settings to which a spec broadcasts."""

    def at_index(_: str, value: Any) -> Any:
        return np.broadcast_to(value, shape)[index] if np.ndim(value) else value

    return mapped(spec, at_index)


def set_checked(spec: Any, check: Check, *names: str) -> None:
    """Replaces fields of a frozen object by their checked values."""
    for name in names:
        object.__setattr__(spec, name, frozen(check(name, getattr(spec, name))))


def _value_key(value: Any) -> Any:
    """Returns a hashable key that compares as the value does."""
    if isinstance(value, ByValue):
        names = spec_fields(value)
        return tuple(_value_key(getattr(value, name)) for name in names)
    if isinstance(value, np.ndarray):
        # + 0 turns -0.0 into 0.0: the two are equal but have different bytes.
        return value.shape, (value + 0).tobytes()
    if isinstance(value, tuple):
        return tuple(_value_key(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((key, _value_key(item)) for key, item in value.items()))
    return value


# --- Dictionaries ---


def spec_from_dict(
    allowed: type | Sequence[type], mapping: Any, *, where: str | None = None
) -> Any:
    """Returns the spec that a dictionary describes; the dictionary may be untrusted."""
    classes = (allowed,) if isinstance(allowed, type) else tuple(allowed)
    where = where or " or ".join(cls.__name__ for cls in classes)
    refuse_hostile(where, mapping)
    return _decode(where, mapping, classes=classes, nested=False)


def spec_fields(spec: Any) -> tuple[str, ...]:
    """Returns the names of the fields that ``==`` compares."""
    return _fields_of(spec if isinstance(spec, type) else type(spec))


@functools.cache
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


def _encode(value: Any) -> Any:
    """A spec without the version, or a field: spec, tuple, array or plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {name: getattr(value, name) for name in spec_fields(value)}
        encoded = {k: _encode(v) for k, v in values.items() if v is not None}
        return {"type": type(value).__name__, **encoded}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _decode(
    where: str, mapping: Any, *, classes: tuple[type, ...], nested: bool
) -> Any:
    """Builds the spec of a type, which a table may leave out if there is only one."""
    if nested and isinstance(mapping, classes):
        return mapping
    _validation.instance(where, mapping, Mapping, "a table of keys")
    if "version" in mapping:
        version = mapping["version"]
        if type(version) is not int or version != SCHEMA_VERSION:
            shown = _validation.shown(version)
            raise ValueError(f"{where}: version must be {SCHEMA_VERSION}, got {shown}")
    elif not nested:
        raise ValueError(
            f"{where}: missing key 'version' (this library writes {SCHEMA_VERSION})"
        )
    names: dict[str, Any] = {cls.__name__: cls for cls in classes}
    if "type" not in mapping and len(names) > 1:
        raise ValueError(
            f"{where}: missing key 'type', which must be one of {tuple(names)}"
        )
    name = mapping.get("type", classes[0].__name__)
    cls = names[_validation.choice(f"{where}.type", name, names)]
    fields = {k: v for k, v in mapping.items() if k not in ("version", "type")}
    _check_keys(cls, fields, where)
    for key in (key for key in cls.nested_specs if key in fields):
        kind, path, value = kinds_of(cls)[key], f"{where}.{key}", fields[key]
        inner = functools.partial(_decode, classes=kind.specs, nested=True)
        is_list = kind.several is tuple and isinstance(value, list | tuple)
        is_table = kind.several is Mapping and isinstance(value, Mapping)
        several = is_list or is_table
        fields[key] = each(inner, path, value) if several else inner(path, value)
    with _validation.prefixed(where):
        return cls.from_fields(fields)


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
        required = field.default is field.default_factory is dataclasses.MISSING
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
