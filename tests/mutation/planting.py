"""Plants a fault: runs a copy of a function with changed lines.

A fault is written as the text it replaces, so that it cannot silently disappear when
the code changes.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from mutation.verdicts import Check, Effort, Verdict

AUDIT, SAMPLER, LEDGER = "audit", "sampler tests", "ledger"
# Compiled programs hold copies of functions in these rooms.
COMPILED = ("trainer.gradient.", "trainer.learners.")


class Edit(NamedTuple):
    """Text in a function that a fault replaces, without the function's indentation."""

    function: Any
    old: str
    new: str

    @property
    def place(self) -> str:
        """Where the function is written, as ``module.function``."""
        module = self.function.__module__.removeprefix("jaxdp_episodic.")
        return f"{module}.{self.function.__qualname__}"

    @property
    def owner(self) -> Any:
        """The module or class that holds the function."""
        owner: Any = sys.modules[self.function.__module__]
        for name in self.function.__qualname__.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner


@contextmanager
def planted(
    edits: Sequence[Edit], helpers: Mapping[str, Callable] | None = None
) -> Iterator[None]:
    """Replaces functions by copies with these edits, until the end of the block.

    Edits of one function stand next to each other; ``helpers`` are functions that the
    new lines call, by their name there.

    Raises:
      LookupError: a text that does not stand in its function exactly once.
    """
    is_compiled = any(edit.place.startswith(COMPILED) for edit in edits)
    with pytest.MonkeyPatch.context() as patch:
        for original, of_one in itertools.groupby(edits, key=lambda e: e.function):
            of_one = list(of_one)
            name, owner = original.__name__, of_one[0].owner
            for helper, function in (helpers or {}).items():
                patch.setitem(original.__globals__, helper, function)
            edited = _edited(original, name, of_one)
            for holder in [owner, *_importers(original, name)]:
                patch.setattr(holder, name, edited)
        if is_compiled:
            _forget_compiled()
        yield
    if is_compiled:
        _forget_compiled()


@dataclass(frozen=True)
class Fault:
    """A fault, and the check that detects it and finds nothing without it."""

    name: str
    edits: Edit | tuple[Edit, ...]
    check: Check
    reason: str  # why it is a fault, and why the check sees it
    caught_by: str = AUDIT
    helpers: Mapping[str, Callable] = field(default_factory=dict)
    is_slow: bool = False  # the check takes a second or more

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        """The edits, one or several."""
        return (self.edits,) if isinstance(self.edits, Edit) else self.edits

    def verdict(self, effort: Effort) -> Verdict:
        """What the check says while the fault is there."""
        with planted(self.all_edits, self.helpers):
            return self.check(effort)

    @property
    def code(self) -> str:
        """The fault, as lines taken away and lines put in their place."""
        lines = []
        for edit in self.all_edits:
            lines.append(f"# {edit.place}")
            lines += [f"- {line.strip()}" for line in edit.old.splitlines()]
            lines += [f"+ {line.strip()}" for line in edit.new.splitlines()]
        return "\n".join(lines)


def _forget_compiled() -> None:
    """Clears caches that were built from the original functions."""
    for path, module in list(sys.modules.items()):
        if path.startswith("jaxdp_episodic.trainer."):
            for value in list(vars(module).values()):
                for clear in ("cache_clear", "clear_cache"):  # functools', JAX's
                    if hasattr(value, clear):
                        getattr(value, clear)()


def _importers(original: Any, name: str) -> list[Any]:
    """Modules of the package that hold the function under its name."""
    return [
        module
        for path, module in sys.modules.items()
        if path.partition(".")[0] == "jaxdp_episodic"
        and vars(module).get(name) is original
    ]


def _edited(original: Any, name: str, edits: Sequence[Edit]) -> Any:
    """The function compiled again from its edited source, in its own module."""
    source = textwrap.dedent(inspect.getsource(original))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(
                f"{edit.place} has {source.count(edit.old)} times what the fault "
                f"replaces, not once: {edit.old!r}"
            )
        source = source.replace(edit.old, edit.new)
    code = compile(
        source,
        f"<{name} with a fault>",
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    found: dict[str, Any] = {}
    exec(code, original.__globals__, found)
    return found[name]
