"""The project: the import rule, the cost of an import, files that must agree."""

import ast
import functools
import graphlib
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxdp_episodic
from test_public_names import DOORS, file_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxdp_episodic"

# Rooms, storey by storey: each imports only from those before it.
LAYERS = """
_validation _progress files
accountant.numerics accountant._kernel_cache accountant._engine accountant.describe
accountant.losses accountant.methods accountant.questions accountant.bounds
accountant.report accountant.interop bounds traced
trainer.data trainer.draw trainer.config trainer.gradient trainer.learners
trainer.statistics trainer.run trainer.audit interop data audit
tools.requests tools.sweep tools.plan tools.plots tools.book tools.train tools.explore
training tools.cli __main__
""".split()
STOREYS = ("accountant", "trainer", "tools")
RANK = {name: rank for rank, name in enumerate((*STOREYS, *LAYERS))}
# The command line imports the module of the command that is called, and no other:
# Flax would slow every question.
LATE = "tools.cli tools.train trainer.gradient trainer.run trainer.audit".split()
# Distributions with another import name.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "pillow": "PIL"}
# Modules in these rooms do not compute with JAX.
FREE_OF_JAX = (
    *("files", "accountant.describe", "accountant.report"),
    *("trainer.config", "trainer.data", "tools.requests"),
)
# What `import jaxdp_episodic` must not load, directly or indirectly.
HEAVY = frozenset(
    "chex datasets dp_accounting flax hypothesis jax_privacy matplotlib mpmath optax "
    "opacus orbax pandas pyarrow pytest ray rich scipy sqlalchemy "
    "tensorstore torch yaml".split()
)
_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Facts(NamedTuple):
    """What the rules look at in a module; its syntax tree is not kept."""

    imports: list[tuple[ast.AST, bool]]  # is it below the top of the module?
    words: set[str]  # names that are defined, imported or used
    defined: list[str]  # at the top
    flags: set[str]  # settings of JAX that it enters or updates
    raised: list[str]  # texts in raise statements


@functools.cache
def facts(source: str) -> Facts:
    """The facts of a module's source, of one walk through it."""
    tree = ast.parse(source)
    top = set(map(id, tree.body))
    own = [node.name for node in tree.body if isinstance(node, _DEFINED)]
    found = Facts([], set(), own, set(), [])
    for node in ast.walk(tree):
        kind = type(node)
        if kind is ast.Name:
            found.words.add(node.id)
        elif kind is ast.Attribute:
            found.words.add(node.attr)
            if node.attr == "enable_x64" or (
                node.attr == "update" and ast.unparse(node).endswith("config.update")
            ):
                found.flags.add(node.attr)
        elif kind in (ast.arg, ast.keyword):
            found.words.add(str(node.arg))
        elif kind in _DEFINED or kind is ast.alias:
            found.words.add(node.name)
        elif kind in _IMPORTS or kind is ast.Call:
            found.imports.append((node, id(node) not in top))
        elif kind is ast.Raise:
            texts = (n for n in ast.walk(node) if isinstance(n, ast.Constant))
            found.raised.extend(str(text.value) for text in texts)
    return found


@functools.cache
def package_sources() -> dict[str, str]:
    """Modules without "jaxdp_episodic." and their sources; "" is the top door."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def room_of(module: str) -> str:
    """The room that a module is in, or a file or package of the top."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in STOREYS else 1])


def targets(node: ast.AST, modules: dict[str, str]) -> list[str]:
    """The modules of the package that a node imports, without the package's name."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        if node.level:  # relative imports are never allowed: a name of no module
            return ["." * node.level + (node.module or "")]
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            is_module = full.removeprefix("jaxdp_episodic.") in modules
            names.append(full if is_module else str(node.module))
    elif isinstance(node, ast.Call):
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in ("import_module", "__import__"):
            # The start of a name that is put together.
            parts = [p for a in node.args for p in getattr(a, "values", [a])[:1]]
            names = [str(p.value) for p in parts if isinstance(p, ast.Constant)]
            names = [name.removesuffix(".") for name in names]
    ours = [name for name in names if name.split(".")[0] == "jaxdp_episodic"]
    return sorted({n.removeprefix("jaxdp_episodic").removeprefix(".") for n in ours})


# --- The import rule, and the doors by which packages are imported ---


def import_faults(sources: dict[str, str]) -> list[str]:
    """Violations of the import rule, without the top door, which imports them all."""
    faults = []
    sources = {name: source for name, source in sources.items() if name}
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for module, source in sources.items():
        room = room_of(module)
        if room not in RANK:
            faults.append(f"{module}: no layer has a module of this name")
            continue
        for node, is_late in facts(source).imports:
            for target in targets(node, sources):
                where, other = f"{module}:{node.lineno}", room_of(target)
                may_be_late = room == "tools.cli" and other in LATE
                if is_late and not may_be_late:
                    faults.append(f"{where}: delayed or conditional import of {target}")
                if target not in sources:
                    faults.append(f"{where}: {target or 'the top door'} is no module")
                elif RANK[other] >= RANK[room] and other != room:
                    faults.append(f"{where}: upward import of {target}")
                elif not is_late:  # late imports make no cycle
                    graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append("cycle: " + " -> ".join(error.args[1]))
    return faults


def door_faults(sources: dict[str, str]) -> list[str]:
    """Modules imported past the doors of docstrings, and unused doors."""
    used: dict[str, set[str]] = {}
    for module, source in sources.items():
        for node, _ in facts(source).imports:
            for target in targets(node, sources):
                package = room_of(target)
                inner = target.removeprefix(package).removeprefix(".")
                if inner and package != room_of(module):
                    used.setdefault(package, set()).add(inner)
    faults = []
    rooms = {room_of(name) for name in sources}
    for package in sorted({room_of(n) for n in sources if n not in rooms}):
        text = ast.get_docstring(ast.parse(sources[package])) or ""
        said = text.partition("Doors:")[2].partition("\n\n")[0]
        there, needed = {*re.findall(r"`([\w.]+)`", said)}, used.get(package, set())
        faults += [f"{package}.{name} is no door" for name in sorted(needed - there)]
        faults += [f"{package}.{name}: unused door" for name in sorted(there - needed)]
    return faults


def test_modules_import_from_above_them_only_and_by_doors():
    assert import_faults(package_sources()) == []
    assert door_faults(package_sources()) == []


BELOW = "jaxdp_episodic.accountant"
CLEAN = {
    "_validation": "import numpy as np",
    "accountant": "",
    "accountant.numerics": f"from {BELOW}.numerics.roots import bisect",
    "accountant.numerics.roots": "import jax",
    "accountant.describe": "",
    "accountant.describe.designs": "from jaxdp_episodic._validation import choice",
    "accountant.bounds": f"from {BELOW} import numerics\nimport {BELOW}.describe",
}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("accountant.describe", f"if 1:\n  from {BELOW}.bounds import step", "upward"),
        ("accountant.bounds", f"def f():\n  import {BELOW}.numerics", "delayed"),
        ("accountant.bounds", "from jaxdp_episodic import Poisson", "top door"),
        ("accountant.bounds", f"from {BELOW}.numrics import roots", "no module"),
        ("accountant.numerics.roots", f"from {BELOW}.numerics import sums", "cycle"),
        ("accountant.misc", "", "no layer"),
    ],
)
def test_a_planted_import_is_found(module, source, complaint):
    assert import_faults(CLEAN) == []
    assert complaint in " ".join(import_faults({**CLEAN, module: source}))


def test_planted_doors_are_found():
    inner = dict.fromkeys(("a.one", "a.two", "a.three"), "")
    text = '"""A.\n\nDoors: `one`,\n`two`.\n\nSee `three`.\n"""'
    sources = {"a": text, "b": "from jaxdp_episodic.a import one, three", **inner}
    assert door_faults(sources) == ["a.three is no door", "a.two: unused door"]


# --- The public doors: what users are told to import ---

_IMPORTED = re.compile(r"^ *(?:from|import) (jaxdp_episodic[\w.]*)", re.MULTILINE)
_SENT_TO = re.compile(r"jaxdp_episodic\.(?:accountant|trainer|tools|files)[\w.]*")


def not_public(page: str) -> set[str]:
    """Modules that a page imports from and that are not public doors."""
    return set(_IMPORTED.findall(page)) - {*DOORS}


def shown_code(path: Path) -> str:
    """The text of a page, or of a notebook's cells."""
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_pages_and_notebooks_import_from_the_public_doors():
    notebooks = [*(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert len(notebooks) == 2
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *notebooks]
    found = {str(path): not_public(shown_code(path)) for path in pages}
    assert {page: names for page, names in found.items() if names} == {}
    assert not_public("from jaxdp_episodic.accountant.bounds import x") != set()


def sent_to(source: str) -> set[str]:
    """Modules behind the doors that error messages of a module name."""
    return {n for text in facts(source).raised for n in _SENT_TO.findall(text)}


def test_messages_name_public_doors_only():
    found = {module: sent_to(text) for module, text in package_sources().items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert sent_to("raise ValueError(f'see jaxdp_episodic.trainer.run {1}')") != set()


def test_the_public_doors_only_import_names():
    found = {door: facts(file_of(door).read_text("utf-8")).defined for door in DOORS}
    assert {door: names for door, names in found.items() if names} == {}


# --- Names in docstrings and comments ---

NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")


def unknown_names(sources: dict[str, str]) -> list[str]:
    """Names in backticks that exist neither in these modules nor in their imports."""
    own = {module: facts(source).words for module, source in sources.items()}
    words = {part for name in set().union(*own.values()) for part in name.split(".")}
    words |= {part for module in own for part in module.split(".")}

    def is_known(name: str) -> bool:
        name = name.removeprefix("jaxdp_episodic.")
        head, _, last = name.rpartition(".")
        if not words.issuperset(name.split(".")):
            return False
        # A module's definitions, by the last parts of its name.
        ends = [m for m in own if f".{m}".endswith(f".{head}")]
        return not ends or any(last in own[m] or f"{m}.{last}" in own for m in ends)

    return [
        f"{module}: `{name}`"
        for module, source in sources.items()
        for name in NAME.findall(source)
        if not is_known(name)
    ]


def test_names_in_docstrings_exist():
    sources = {name: text for name, text in package_sources().items() if name}
    assert unknown_names(sources) == []
    text = (
        "`solve` `roots.solve` `numerics.roots.solve` `roots.gone` `gone` `gone.solve`"
    )
    planted = {"numerics.roots": "def solve(x): ...", "losses.one": f'"""{text}"""'}
    wrong = ["roots.gone", "gone", "gone.solve"]
    assert unknown_names(planted) == [f"losses.one: `{name}`" for name in wrong]


# --- Sizes ---

# A class or a theme is one file; a second file is for a second idea.
MOST_LINES = 700

# Lines of Python a folder may have, docstrings included. Anybody may lower a number;
# it is raised only together with a line in CHANGELOG.md that says what for.
MOST_LINES_OF = {
    "jaxdp_episodic": 58_254,
    "jaxdp_episodic/accountant/describe": 3_507,
    "jaxdp_episodic/accountant/losses": 4_523,
    "jaxdp_episodic/accountant/methods": 5_258,
    "jaxdp_episodic/accountant/numerics": 2_742,
    "jaxdp_episodic/accountant/questions": 5_400,
    "jaxdp_episodic/accountant/bounds": 1_669,
    "jaxdp_episodic/accountant/interop": 1_534,
    "jaxdp_episodic/accountant/report": 1_130,
    "jaxdp_episodic/trainer/data": 3_383,
    "jaxdp_episodic/trainer/draw": 1_409,
    "jaxdp_episodic/trainer/config": 1_315,
    "jaxdp_episodic/trainer/gradient": 1_462,
    "jaxdp_episodic/trainer/learners": 2_191,
    "jaxdp_episodic/trainer/statistics": 1_273,
    "jaxdp_episodic/trainer/run": 7_091,
    "jaxdp_episodic/trainer/audit": 1_813,
    "jaxdp_episodic/tools/requests": 700,
    "jaxdp_episodic/tools/sweep": 1_058,
    "jaxdp_episodic/tools/plan": 1_978,
    "jaxdp_episodic/tools/plots": 1_142,
    "jaxdp_episodic/tools/book": 1_101,
    "jaxdp_episodic/tools/train": 1_243,
    "jaxdp_episodic/tools/explore": 456,
    "jaxdp_episodic/tools/cli": 2_202,
    "jaxdp_episodic/files": 1_361,
    "experiments": 7_098,
    "tests": 48_292,
}


@pytest.mark.parametrize("folder", MOST_LINES_OF)
def test_folders_keep_to_their_budget(folder):
    files = (ROOT / folder).rglob("*.py")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert lines <= MOST_LINES_OF[folder]


def test_no_file_is_too_long():
    lengths = {name: s.count("\n") for name, s in package_sources().items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_no_link_is_committed():
    """Git replaces an ignored folder, such as an environment, by a link of its name."""
    listing = ["git", "ls-files", "--stage"]
    files = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line for line in files.stdout.splitlines() if line[:6] == "120000"] == []


# --- What CONTRIBUTING.md promises ---


def test_the_mechanism_to_copy_is_short_and_whole():
    """CONTRIBUTING.md, "Adding a mechanism": at most 60 lines, with all protocols."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    chapter = page.split("## Adding a mechanism")[1].split("\n## ")[0]
    assert "in at most 60 lines of code: begin with a copy" in " ".join(chapter.split())
    assert "`losses/finite.py` is a whole mechanism" in chapter
    source = package_sources()["accountant.losses.finite"]
    without_texts = re.sub(r'^ *r?"""(?:.|\n)*?"""$', "", source, flags=re.M)
    # An import is one line, however it is wrapped; comments are none.
    joined = re.sub(r"^from .* import \([^)]*\)$", "import", without_texts, flags=re.M)
    code = [line for line in joined.splitlines() if line.strip()[:1] not in ("", "#")]
    assert 40 < len(code) <= 60
    body = ast.parse(source).body
    (mechanism,) = (node for node in body if isinstance(node, ast.ClassDef))
    bases = [getattr(base, "id", "") for base in mechanism.bases]
    written = {n.name for n in mechanism.body if isinstance(n, ast.FunctionDef)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)`", chapter, re.MULTILINE))
    # `FiniteValues` derives from `Profile`.
    assert [*rows] == ["Profile", "Moments", "Nodes", "FiniteValues", "Bounds"]
    assert bases == ["FiniteValues", "Moments"]
    assert written >= {rows[name] for name in ("Profile", *bases)}


def test_the_paths_of_contributing_exist():
    """The files that a question and a step of training run through."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for folder, start in (
        ("accountant", "`epsilon(step, ...)` runs through"),
        ("trainer/run", "A step of training"),
    ):
        block = page.split(start)[1].split("\n\n")[1]
        names = re.findall(r"[\w/]+\.py", block)
        assert len(names) >= 5
        assert [n for n in names if not (PACKAGE / folder / n).exists()] == []


# --- Dependencies, and JAX ---


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def third_party(node: ast.AST) -> set[str]:
    """The packages that a node imports, ours among them."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.split(".")[0]}
    return set()


def distribution(requirement: str) -> str:
    """The import name of a requirement line ("jax-privacy>=2" -> "jax_privacy")."""
    name = re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
    return IMPORTED_AS.get(name, name.replace("-", "_"))


def test_third_party_imports_are_declared():
    """At the top of a module a dependency; elsewhere, and in interop, also an extra."""
    runtime = set(map(distribution, project()["dependencies"]))
    extras = {
        distribution(line)
        for name, lines in project()["optional-dependencies"].items()
        if name not in ("test", "explore-test", "dev")
        for line in lines
    }
    known = {*sys.stdlib_module_names, "jaxdp_episodic"} | runtime
    undeclared = {
        f"{module}: {name}"
        for module, source in package_sources().items()
        for node, is_late in facts(source).imports
        for name in third_party(node) - known
        if name not in extras or not (is_late or ".interop." in f".{module}")
    }
    assert undeclared == set()


def test_only_the_boundary_sets_jax_flags_and_descriptions_need_no_jax():
    """No other file enters ``enable_x64``, and none updates the configuration."""
    modules = {module: facts(source) for module, source in package_sources().items()}
    flags = {module: found.flags for module, found in modules.items() if found.flags}
    assert flags == {"accountant._engine": {"enable_x64"}}
    for module, found in modules.items():
        if room_of(module) in FREE_OF_JAX:
            imported = set().union(*(third_party(node) for node, _ in found.imports))
            assert "jax" not in imported, module


# --- What an import costs ---

REPORT = """
import json, sys, time
start = time.process_time()
import jax
of_jax = time.process_time() - start
before, flag = set(sys.modules), jax.config.jax_enable_x64
start = time.process_time()
import jaxdp_episodic
seconds = time.process_time() - start
print(json.dumps({
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "of_jax": seconds / of_jax,
    "x64": [flag, jax.config.jax_enable_x64],
}))
"""


def said(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What a process prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def import_report(**environment: str) -> dict:
    return json.loads(said("-W", "error", "-c", REPORT, **environment))


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_import_is_quiet(x64):
    """It loads no heavy module, touches no device and changes no flag."""
    # An import that starts a backend (such as a JAX array as a module constant) fails
    # on this missing platform.
    report = import_report(JAX_PLATFORMS="no_such_platform", JAX_ENABLE_X64=str(x64))
    assert HEAVY.intersection(report["new"]) == set()
    assert report["x64"] == [x64, x64]


@pytest.mark.slow
def test_import_costs_little_more_than_jax(tmp_path):
    # CPU time, as the machine may be busy, and with bytecode, which
    # the first run writes: some machines are set to write none.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(import_report(**bytecode)["of_jax"] for _ in range(5)) <= 0.25


# --- Files that must agree, and the wheel ---


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line]
    split = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in split}


def test_pins_are_names_and_versions_and_agree():
    constraints = pins(ROOT / "constraints.txt")
    peers = pins(ROOT / "experiments" / "benchmarks" / "requirements.txt")
    for name, version in [*constraints.items(), *peers.items()]:
        assert re.fullmatch(r"[a-z0-9.-]+", name), name
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)
    shared = constraints.keys() & peers.keys()
    assert {"jax", "numpy", "dp-accounting"} <= shared
    assert {n: constraints[n] for n in shared} == {n: peers[n] for n in shared}


def test_the_version_is_the_same_everywhere():
    """In the package, its metadata, the citation and the changelog."""
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.M)
    assert newest is not None
    assert newest[1] == project()["version"] == jaxdp_episodic.__version__
    assert f"\nversion: {newest[1]}\n" in citation
    assert f"\ndate-released: {newest[2]}\n" in citation


def test_make_dist_tries_every_extra():
    tried = runpy.run_path(str(ROOT / "experiments/dist.py"))["MODULES"]
    ours = {"test", "explore-test", "docs", "dev"}
    assert set(tried) == set(project()["optional-dependencies"]) - ours


@pytest.mark.slow
def test_the_wheel_has_the_package_alone(tmp_path):
    """Needs a package index. `make dist` installs the wheel and uses it."""
    said("-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("jaxdp_episodic-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "jaxdp_episodic/py.typed" in names
    assert all(re.match(r"jaxdp_episodic(-[^/]*\.dist-info)?/", name) for name in names)
