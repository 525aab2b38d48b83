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


class _WithoutChecks(ast.NodeTransformer):
    """Replaces ``Annotated[type, check]``, and names for it, by the type."""

    def __init__(self, checked: dict[str, ast.expr]) -> None:
        self._checked = checked

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:  # noqa: N802
        """Replaces what is written out."""
        self.generic_visit(node)
        is_checked = ast.unparse(node.value) == "Annotated"
        return node.slice.elts[0] if is_checked else node  # pyright: ignore

    def _named(self, node: ast.Name | ast.Attribute) -> ast.expr:
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        return self._checked.get(name, node)

    visit_Name = visit_Attribute = _named  # noqa: N815


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would take for markup, and links names of the package."""

    def __init__(self) -> None:
        self._public = public_names(PACKAGE / "__init__.py")
        self._specs = specs(PACKAGE)
        self._checked = checked_types(PACKAGE / "accountant" / "describe")

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of every object."""
        if obj.docstring is not None:
            obj.docstring.value = self.markdown(obj.docstring.value)

    def on_class_instance(
        self, *, node: ast.ClassDef, cls: griffe.Class, **_: Any
    ) -> None:
        """Marks checked specs as dataclasses, which their base makes of them."""
        bases = {str(base).rpartition(".")[2] for base in cls.bases}
        if bases & self._specs:
            given = {
                one.arg: ast.unparse(one.value) for one in node.keywords if one.arg
            }
            if "CheckedSpec" in bases:
                given["kw_only"] = "True"
            keywords = [
                griffe.ExprKeyword(name, value) for name, value in given.items()
            ]
            made = griffe.ExprCall(griffe.ExprName("dataclasses.dataclass"), keywords)
            cls.decorators.append(griffe.Decorator(made, lineno=None, endlineno=None))

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Shows types of fields of descriptions without checks, which have no range."""
        is_field = attr.path.startswith("jaxdp_episodic.accountant.describe.")
        if is_field and attr.annotation is not None:
            given = str(attr.annotation)
            plain = _WithoutChecks(self._checked).visit(ast.parse(given, mode="eval"))
            if ast.unparse(plain) != given:
                attr.annotation = ast.unparse(plain)

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


def specs(package: Path) -> set[str]:
    """`Spec`, and the classes that derive from it."""
    files = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    bases = [
        (node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for text in files
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    ]
    found = {"Spec"}
    while more := {name for name, own in bases if own & found} - found:
        found |= more
    return found


def checked_types(folder: Path) -> dict[str, ast.expr]:
    """The types that the modules of a folder name together with their checks."""
    found: dict[str, ast.expr] = {}
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Subscript(
                        value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])
                    ),
                ):
                    found[name] = kind
    return found
