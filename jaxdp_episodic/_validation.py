"""Checks of arguments at the public interface: clear errors, nothing repaired.

Every message names the argument, the value and the allowed range. A wrong type raises
``TypeError``, a wrong value ``ValueError``. Booleans are not accepted as numbers, nor
are strings; NaN is never accepted.
"""

from __future__ import annotations

import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Limits for suggesting a similar word: an untrusted file may have millions of words,
# each as long as a book.
_MAX_HINT_LETTERS = 100
_MAX_HINT_WORDS = 1000
# Products of two numbers in this range stay within float32's range. Noise that
# underflows to zero is no noise.
_SMALLEST_SETTING = 1e-18
_LARGEST_SETTING = 1e18
_MAX_SHOWN = 60  # characters of a value in a message


@contextmanager
def prefixed(place: Any) -> Iterator[None]:
    """Puts before the message of an error where the refused value comes from."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        kinds = TypeError, NotImplementedError, ValueError
        kind = next(one for one in kinds if isinstance(error, one))
        raise kind(f"{place}: {error}") from error


def real_array(
    name: str,
    value: Any,
    rule: str = "",
    is_good: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Returns ``value`` as a float64 array without NaN.

    All elements must be good, which the ``rule`` says in words.
    """
    array = _numeric(name, value)
    with np.errstate(over="ignore"):  # long doubles beyond float64 become infinite
        array = array.astype(np.float64)
    # + 0.0 turns -0.0 into 0.0: a noise multiplier of -0.0 would have inverse -inf.
    result = array + 0.0
    if np.isnan(result).any():
        raise ValueError(f"{name} must not be NaN, got {shown(value)}")
    if is_good is not None and not (good := is_good(result)).all():
        raise ValueError(f"{name} must {rule}, got {_first_bad(value, ~good)}")
    return result


def integer_array(name: str, value: Any, *, minimum: int) -> np.ndarray:
    """Returns ``value`` as an int64 array of whole numbers, each >= ``minimum``."""
    array = _numeric(name, value)
    if array.dtype.kind == "f":  # half precision cannot represent 2**53
        with np.errstate(over="ignore"):
            array = array.astype(np.float64)
    # Beyond 2**53 a float does not determine an integer.
    good = (array >= minimum) & (array <= 2**53) & (array == np.floor(array))
    if not good.all():
        allowed = f"a whole number >= {minimum} and at most 2**53"
        raise ValueError(f"{name} must be {allowed}, got {_first_bad(value, ~good)}")
    return array.astype(np.int64)


def reals(
    rule: str, is_good: Callable[[np.ndarray], np.ndarray]
) -> Callable[[str, Any], np.ndarray]:
    """Returns a check: float64 arrays of which all elements satisfy the rule."""
    return functools.partial(real_array, rule=rule, is_good=is_good)


probability_array = reals("lie in [0, 1]", lambda a: (a >= 0) & (a <= 1))
open_unit_array = reals("lie in (0, 1)", lambda a: (a > 0) & (a < 1))
positive_share_array = reals("lie in (0, 1]", lambda a: (a > 0) & (a <= 1))
nonnegative_array = reals("be >= 0", lambda a: a >= 0)  # may be inf
positive_array = reals("be > 0 and finite", lambda a: (a > 0) & np.isfinite(a))
order_array = reals("be > 1 and finite", lambda a: (a > 1) & np.isfinite(a))
order_or_inf_array = reals("be > 1", lambda a: a > 1)


def single(name: str, array: np.ndarray) -> Any:
    """Returns the element of an array without axes as a Python number."""
    if array.ndim:
        raise ValueError(f"{name} must be one number, got an array of {array.shape}")
    return array.item()


def one(name: str, value: Any, check: Callable[[str, Any], np.ndarray]) -> Any:
    """Returns one number that passes a check as a Python number."""
    return single(name, check(name, value))


def instance(name: str, value: Any, kinds: Any, words: str) -> Any:
    """Returns ``value`` if it is of one of the ``kinds``, which ``words`` name."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {words}, got {shown(value)}")
    return value


def float32_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Returns one number in [1e-18, 1e18], or ``zero``: within float32's range."""
    number = real_array(name, value)
    allowed = f"[{_SMALLEST_SETTING:g}, {_LARGEST_SETTING:g}]{' or be 0' * zero}"
    if number.ndim or not (
        _SMALLEST_SETTING <= number <= _LARGEST_SETTING or (zero and number == 0)
    ):
        raise ValueError(f"{name} must be a number in {allowed}, got {shown(value)}")
    return float(number)


def whole_number(
    name: str, value: Any, *, minimum: int = 1, maximum: int | None = None
) -> int:
    """Returns ``value`` as one whole number from ``minimum`` to ``maximum``."""
    number = single(name, integer_array(name, value, minimum=minimum))
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum:,}, got {shown(value)}")
    return number


def flag(name: str, value: Any) -> bool:
    """Returns a boolean of Python or NumPy as one of Python."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be true or false, got {shown(value)}")
    return bool(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``allowed``; otherwise suggests the nearest."""
    options = tuple(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {options}, got {shown(value)}")
    if value not in options:
        hint = nearest(value, options)
        raise ValueError(f"{name} must be one of {options}, got {shown(value)}{hint}")
    return value


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the option closest to ``word``, or ""."""
    short = [option for option in options if len(option) <= _MAX_HINT_LETTERS]
    if len(word) > _MAX_HINT_LETTERS or len(short) > _MAX_HINT_WORDS:
        return ""
    close = difflib.get_close_matches(word, short, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: Any) -> str:
    """Returns a value as text for a message, cut short; safe for untrusted values."""
    try:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    # Nested deeper than Python's stack, or an integer with thousands of digits.
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def steps_are(number: int) -> str:
    """Returns a number of steps as the subject of a sentence."""
    return f"{number:,} step{'s are' if number != 1 else ' is'}"


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yields a list; after the body it holds the warnings, without those of JAX."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        warnings.simplefilter("ignore", ResourceWarning)  # of no use to users
        yield texts
    jax = sys.modules.get("jax")
    home = None if jax is None else Path(str(jax.__file__)).parent
    ours = [w for w in caught if not home or not Path(w.filename).is_relative_to(home)]
    texts += dict.fromkeys(str(w.message) for w in ours)


def broadcast_shape(**arrays: Any) -> tuple[int, ...]:
    """Returns the common shape of the named arrays, or names those that disagree."""
    try:
        return np.broadcast_shapes(*map(np.shape, arrays.values()))
    except ValueError:
        shapes = {name: np.shape(a) for name, a in arrays.items() if np.shape(a)}
        text = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes do not broadcast together: {text}") from None


def is_traced(value: Any) -> bool:
    """Returns whether a value is a JAX tracer."""
    # While another thread imports JAX, it may lack `core`; then no tracer exists.
    core = getattr(sys.modules.get("jax"), "core", None)
    return isinstance(value, getattr(core, "Tracer", ()))


def _numeric(name: str, value: Any) -> np.ndarray:
    """Returns an integer or float array; raises for everything else."""
    # `np.ma` takes 8 ms to import; until then there are no masked arrays.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    if isinstance(value, masked):
        raise TypeError(f"{name} must not be a masked array: its mask would be lost")
    if not isinstance(value, float | int | np.ndarray) and is_traced(value):
        raise TypeError(
            f"{name} must be a known number, got a value that JAX traces: call this "
            "outside of jax.jit, jax.grad and jax.vmap, or use jaxdp_episodic.traced"
        )
    try:
        array = np.asarray(value)
    except (ValueError, RecursionError):  # ragged, or nested too deeply
        raise TypeError(
            f"{name} must be a number or a rectangular array of numbers, "
            f"got {shown(value)}"
        ) from None
    except TypeError:  # raised by JAX for a list of tracers
        raise TypeError(
            f"{name} must be a number or an array of numbers, got {shown(value)}; "
            "use jax.numpy.stack to make one array of a list of traced values"
        ) from None
    jax = sys.modules.get("jax") if array.dtype.kind == "V" else None
    if jax is not None and jax.numpy.issubdtype(array.dtype, np.number):
        array = array.astype(np.float64)  # of JAX's further types, as bfloat16
    if array.dtype.kind not in "iuf" and array.size == 0 and array.dtype != object:
        array = array.astype(np.float64)
    made_object = array.dtype == object and array.size > 0 and array is not value
    if made_object and all(type(item) in (int, float) for item in array.flat):
        raise ValueError(
            f"{name} must fit into 64 bits if it is a whole number, got {shown(value)}"
        )
    may_hold_bool = isinstance(value, list | tuple | bool | np.bool_)
    if array.dtype.kind not in "iuf" or (may_hold_bool and _holds_bool(value)):
        raise TypeError(
            f"{name} must be a number or an array of numbers, got {shown(value)}"
        )
    return array


def _holds_bool(value: Any) -> bool:
    """Returns whether a list or tuple contains a bool, which NumPy makes 0 or 1."""
    if isinstance(value, list | tuple):
        return any(_holds_bool(v) for v in value)
    return isinstance(value, bool | np.bool_)


def _first_bad(value: Any, bad: np.ndarray) -> str:
    """Returns the offending element as text, with its index in an array."""
    array = np.asarray(value)
    if array.ndim == 0:
        return shown(value)
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"{array[index]} at index {tuple(int(i) for i in index)}"
