"""Makes Markdown of docstrings that were written to be read in a terminal."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).resolve().parents[1] / "jaxdp_episodic"
# The section "Returns:" is prose; a colon in it does not end the name of a type.
_RETURNS = re.compile(r"(?<=^Returns:\n)(?:(?: +.*)?\n)+", re.M)


def _without_colons(match: re.Match[str]) -> str:
    return re.sub(r":(?=\s)", "&#58;", match[0])


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would take for markup, and links names of the package."""

    def __init__(self) -> None:
        self._public = public_names(PACKAGE / "__init__.py")

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of every object."""
        if obj.docstring is not None:
            obj.docstring.value = self.markdown(obj.docstring.value)

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Marks checked specs as dataclasses, which their base makes of them."""
        if "CheckedSpec" in map(str, cls.bases):
            keywords = [griffe.ExprKeyword("kw_only", "True")]
            made = griffe.ExprCall(griffe.ExprName("dataclasses.dataclass"), keywords)
            cls.decorators.append(griffe.Decorator(made, lineno=None, endlineno=None))

    def markdown(self, text: str) -> str:
        """One docstring: ``name: > 0`` is no quotation, `` `epsilon` `` is a link."""
        text = re.sub(r"^( *(?:\w+: +)?)>", r"\1\\>", text, flags=re.M)
        text = _RETURNS.sub(_without_colons, text)
        return re.sub(r"(?<![`\w])`(\w+)`(?!`)", self._link, text)

    def _link(self, match: re.Match[str]) -> str:
        name = match[1]
        if name not in self._public:
            return match[0]
        return f"[`{name}`][jaxdp_episodic.{name}]"


def public_names(door: Path) -> frozenset[str]:
    """``__all__`` of a package, read without importing it."""
    for node in ast.parse(door.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise ValueError(f"{door} has no __all__")
