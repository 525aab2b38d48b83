"""Plants a fault: runs a copy of a function with changed lines.

A fault is written as the text it replaces. Text that is not in the function exactly
once is refused, so a fault cannot silently disappear when the code changes.
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


class Edit(NamedTuple):
    """Lines of one function that a fault replaces.

    Attributes:
      owner: the module or class that holds the function.
      function: its name there.
      old: text in it, without the function's own indentation.
      new: the text that replaces it.
    """

    owner: Any
    function: str
    old: str
    new: str

    @property
    def place(self) -> str:
        """Where the function is written, as ``module.function``."""
        function = getattr(self.owner, self.function)
        module = function.__module__.removeprefix("jaxdp_episodic.")
        return f"{module}.{function.__qualname__}"


@contextmanager
def planted(
    edits: Sequence[Edit], helpers: Mapping[str, Callable] | None = None
) -> Iterator[None]:
    """Replaces the functions by copies with these edits, until the end of the block.

    Args:
      edits: of one function or of several; those of one function next to each other.
      helpers: functions that the new lines call, by their name there.

    Raises:
      LookupError: a text that does not stand in its function exactly once.
    """
    with pytest.MonkeyPatch.context() as patch:
        together = itertools.groupby(edits, key=lambda e: (e.owner, e.function))
        for (owner, name), of_one in together:
            original = getattr(owner, name)
            for helper, function in (helpers or {}).items():
                patch.setitem(original.__globals__, helper, function)
            edited = _edited(original, name, list(of_one))
            for holder in [owner, *_importers(original, name)]:
                patch.setattr(holder, name, edited)
        _forget_compiled()
        yield
    _forget_compiled()


@dataclass(frozen=True)
class Fault:
    """A fault, and the check that detects it.

    Attributes:
      name: what people call it.
      edits: the lines that are other.
      caught_by: "audit", "sampler tests" or "ledger".
      check: must find something with the fault planted, and nothing without it.
      reason: why the fault is one, and why the check sees it.
      helpers: functions that the other lines call.
      is_slow: the check takes a second or more.
    """

    name: str
    edits: tuple[Edit, ...]
    caught_by: str
    check: Check
    reason: str
    helpers: Mapping[str, Callable] = field(default_factory=dict)
    is_slow: bool = False

    def verdict(self, effort: Effort) -> Verdict:
        """What the check says while the fault is there."""
        with planted(self.edits, self.helpers):
            return self.check(effort)

    @property
    def code(self) -> str:
        """The fault, as lines taken away and lines put in their place."""
        lines = []
        for edit in self.edits:
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
