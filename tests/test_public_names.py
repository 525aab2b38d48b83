"""The public names and their signatures are those of `public_names.txt`.

Removing a name or changing an argument breaks users' code. If that is intended,
rewrite the file by ``python tests/test_public_names.py`` and add it to CHANGELOG.
"""

import ast
import functools
import importlib
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = Path(__file__).with_name("public_names.txt")
DOORS = (
    "jaxdp_episodic",
    "jaxdp_episodic.audit",
    "jaxdp_episodic.bounds",
    "jaxdp_episodic.data",
    "jaxdp_episodic.interop.dp_accounting",
    "jaxdp_episodic.interop.jax_privacy",
    "jaxdp_episodic.interop.opacus",
    "jaxdp_episodic.traced",
    "jaxdp_episodic.training",
)
# Needs PyTorch, which the tests do not install: only its names are listed.
NOT_IMPORTED = "jaxdp_episodic.interop.opacus"
PLAIN = (type(None), bool, int, float, str, tuple)
# Internal checks of descriptions.
INNER = ["check_fields", "check_values", "from_fields", "numbers", "one_setting"]
# What `Trainer.dry_run` calls.
INNER += ["trace", "try_out", "sum_of_zeros"]
# Methods that descriptions inherit from a private base.
INHERITED = ("from_dict", "level_names", "schemes", "shape", "to_dict", "with_scheme")


def file_of(door):
    """The file of a door."""
    path = ROOT.joinpath(*door.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def listed(door):
    """The names in ``__all__`` of a door, without importing it."""
    for node in ast.parse(file_of(door).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise AssertionError(f"{door} has no __all__")


def arguments(thing):
    """The signature of a function or class, without types."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    shown = []
    for one in signature.parameters.values():
        default = one.default
        if default is not one.empty and not isinstance(default, PLAIN):
            default = ...  # its text could differ between runs
        shown.append(one.replace(annotation=one.empty, default=default))
    signature = signature.replace(
        parameters=shown, return_annotation=inspect.Signature.empty
    )
    return str(signature).replace("Ellipsis", "...")


def members(thing, public):
    """The methods and properties of a class and of its public bases, by name."""
    found = {}
    for base in reversed(thing.__mro__):
        if base in public:
            found.update(vars(base))
        elif base.__module__.startswith("jaxdp_episodic"):
            found.update({k: v for k, v in vars(base).items() if k in INHERITED})
    for name, member in sorted(found.items()):
        if name.startswith("_") or name in INNER:
            continue
        if isinstance(member, classmethod | staticmethod):
            yield name, arguments(getattr(thing, name))
        elif inspect.isfunction(member):
            yield name, arguments(member)
        elif isinstance(member, property | functools.cached_property):
            yield name, ""


def lines():
    """One line for each name of each door, and for each class's members."""
    things = {
        f"{door}.{name}": getattr(importlib.import_module(door), name)
        for door in DOORS
        if door != NOT_IMPORTED
        for name in listed(door)
    }
    public = {thing for thing in things.values() if inspect.isclass(thing)}
    found = [f"{NOT_IMPORTED}.{name}" for name in listed(NOT_IMPORTED)]
    for name, thing in things.items():
        found.append(f"{name}{arguments(thing) if callable(thing) else ''}")
        for member, signature in members(thing, public) if thing in public else ():
            found.append(f"{name}.{member}{signature}")
    return sorted(found)


def test_the_public_names_are_the_promised_ones():
    promised = NAMES.read_text(encoding="utf-8").splitlines()
    now = lines()
    gone = [line for line in promised if line not in now]
    new = [line for line in now if line not in promised]
    assert (gone, new) == ([], []), "see the docstring of this file"
    assert now == promised


def test_every_door_is_named():
    doors = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in [
            *(ROOT / "jaxdp_episodic").glob("[!_]*.py"),
            *(ROOT / "jaxdp_episodic" / "interop").glob("[!_]*.py"),
        ]
    ]
    assert sorted(["jaxdp_episodic", *doors]) == sorted(DOORS)


if __name__ == "__main__":
    NAMES.write_text("\n".join(lines()) + "\n", encoding="utf-8")
