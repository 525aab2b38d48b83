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

import pytest

import jaxdp_episodic

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxdp_episodic"

# Each line imports only from the lines above it: rooms, storey by storey.
LAYERS = (
    "_validation",
    "_progress",
    "files",
    "accountant.numerics",
    "accountant._kernel_cache",
    "accountant._engine",
    "accountant.describe",
    "accountant.losses",
    "accountant.methods",
    "accountant.questions",
    "accountant.bounds",
    "accountant.report",
    "accountant.interop",
    "bounds",
    "traced",
    "trainer.data",
    "trainer.draw",
    "trainer.config",
    "trainer.gradient",
    "trainer.learners",
    "trainer.statistics",
    "trainer.run",
    "trainer.audit",
    "audit",
    "interop",
    "data",
    "audit",
    "tools.requests",
    "tools.sweep",
    "tools.plan",
    "tools.plots",
    "tools.book",
    "tools.train",
    "tools.explore",
    "training",
    "tools.cli",
    "__main__",
)
STOREYS = ("accountant", "trainer", "tools")
# Distributions with another import name.
IMPORTED_AS = {"orbax-checkpoint": "orbax", "pillow": "PIL"}
# The command line imports the module of the command that is called, and no other.
CLI_IMPORTS_LATE = (
    "tools.cli",
    "tools.train",
    "trainer.gradient",
    "trainer.run",
    "trainer.audit",
)
_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
RANK = {name: rank for rank, name in enumerate((*STOREYS, *LAYERS))}

# What `import jaxdp_episodic` must not load, directly or indirectly.
HEAVY = frozenset(
    "chex datasets dp_accounting flax hypothesis jax_privacy matplotlib mpmath optax "
    "opacus orbax pandas pyarrow pytest ray rich scipy sqlalchemy starlette "
    "tensorstore torch uvicorn yaml".split()
)


# --- The import rule ---


@pytest.fixture(autouse=True, scope="module")
def _trees_are_forgotten():
    """Drops syntax trees after these tests: garbage collection walks through them."""
    yield
    _parsed.cache_clear()


def import_faults(sources: dict[str, str]) -> list[str]:
    """Returns violations of the import rule among ``sources``.

    Keys are module names without "jaxdp_episodic." ("trainer.run.trainer"), values
    their source text. The top door, ``jaxdp_episodic/__init__.py``, is not one of them.
    """
    faults = []
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for module, source in sources.items():
        if _room(module) not in RANK:
            faults.append(f"{module}: no layer has a module of this name")
            continue
        body, nodes = _parsed(source)
        for node in nodes:
            for target in _targets(node, sources):
                where = f"{module}:{getattr(node, 'lineno', 0)}"
                # Only the command line imports late: Flax would slow every question.
                is_late = node not in body
                may_be_late = (
                    _room(module) == "tools.cli" and _room(target) in CLI_IMPORTS_LATE
                )
                if is_late and not may_be_late:
                    faults.append(f"{where}: delayed or conditional import of {target}")
                if target not in sources:
                    faults.append(f"{where}: {target or 'the top door'} is no module")
                elif _points_up(module, target):
                    faults.append(f"{where}: upward import of {target}")
                elif not is_late:  # late imports make no cycle
                    graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append("cycle: " + " -> ".join(error.args[1]))
    return faults


@functools.cache
def _parsed(source: str) -> tuple[list[ast.stmt], list[ast.AST]]:
    """The statements of a module, and all nodes below them."""
    tree = ast.parse(source)
    return tree.body, list(ast.walk(tree))


def _targets(node: ast.AST, modules: dict[str, str]) -> list[str]:
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


def _points_up(module: str, target: str) -> bool:
    """True unless the target lies in a lower layer or in the module's own package."""
    return RANK[_room(target)] >= RANK[_room(module)] and _room(target) != _room(module)


def _room(module: str) -> str:
    """The room that a module is in, or a file or package of the top."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in STOREYS else 1])


def _package_sources() -> dict[str, str]:
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def test_modules_import_from_above_them_only():
    assert import_faults(_package_sources()) == []


# --- The doors: modules that other packages may import ---


def doors(source: str) -> set[str]:
    """The modules that a package's docstring names as its doors."""
    said = (ast.get_docstring(ast.parse(source)) or "").partition("Doors:")[2]
    return set(re.findall(r"`([\w.]+)`", said.partition("\n\n")[0]))


def door_faults(sources: dict[str, str]) -> list[str]:
    """Returns modules imported past the doors, and unused doors."""
    used: dict[str, set[str]] = {}
    for module, source in sources.items():
        for node in _parsed(source)[1]:
            for target in _targets(node, sources):
                package = _room(target)
                inner = target.removeprefix(package).removeprefix(".")
                if inner and package != _room(module):
                    used.setdefault(package, set()).add(inner)
    faults = []
    rooms = {_room(name) for name in sources}
    for package in sorted({_room(n) for n in sources if n not in rooms}):
        there, needed = doors(sources[package]), used.get(package, set())
        faults += [f"{package}.{name} is no door" for name in sorted(needed - there)]
        faults += [f"{package}.{name}: unused door" for name in sorted(there - needed)]
    return faults


def test_packages_are_imported_by_their_doors():
    sources = _package_sources()
    sources["top"] = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert door_faults(sources) == []


def test_door_faults_are_caught():
    sources = {
        "a": '"""A.\n\nDoors: `one`,\n`two`.\n\nSee `three`.\n"""',
        "a.one": "",
        "a.two": "",
        "a.three": "",
        "b": "from jaxdp_episodic.a import one, three",
    }
    assert door_faults(sources) == ["a.three is no door", "a.two: unused door"]


BELOW = "jaxdp_episodic.accountant"
CLEAN = {
    "_validation": "import numpy as np",
    "accountant": "",
    "accountant.numerics": f"from {BELOW}.numerics.roots import bisect",
    "accountant.numerics.roots": "import jax",
    "accountant.describe": "",
    "accountant.describe.schemes": "from jaxdp_episodic._validation import choice",
    "accountant.bounds": f"from {BELOW} import numerics\nimport {BELOW}.describe",
}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("accountant.numerics.roots", f"import {BELOW}.describe", "upward"),
        ("accountant.numerics.roots", f"from {BELOW}.describe import tree", "upward"),
        ("accountant.numerics.roots", f"from {BELOW} import describe", "upward"),
        ("_validation", f"from {BELOW}.numerics import roots", "upward"),
        ("accountant.describe", f"def f():\n  import {BELOW}.bounds", "upward"),
        ("accountant.bounds", f"def f():\n  import {BELOW}.numerics", "delayed"),
        (
            "accountant.describe",
            "from typing import TYPE_CHECKING\n"
            f"if TYPE_CHECKING:\n  from {BELOW}.bounds import step",
            "upward",
        ),
        (
            "accountant.bounds",
            "import importlib as i\ni.import_module('jaxdp_episodic.tools.cli')",
            "delayed",
        ),
        (
            "trainer.run.trainer",
            "import importlib as i\ni.import_module(f'jaxdp_episodic.tools.cli.{1}')",
            "delayed",
        ),
        ("accountant.bounds", "from jaxdp_episodic import Poisson", "top door"),
        ("accountant.bounds", "import jaxdp_episodic", "top door"),
        ("accountant.bounds", f"from {BELOW}.numrics import roots", "no module"),
        ("trainer.draw.sampler", "from .schemes import Poisson", "no module"),
        (
            "accountant.numerics.roots",
            f"from {BELOW}.numerics import lattice_sums",
            "cycle",
        ),
        ("misc", "", "no layer"),
        ("accountant.misc", "", "no layer"),
    ],
)
def test_a_planted_violation_is_found(module, source, complaint):
    assert import_faults(CLEAN) == []
    faults = import_faults({**CLEAN, module: source})
    assert faults
    assert complaint in " ".join(faults)


# --- The public doors: what users are told to import ---

PUBLIC_DOORS = frozenset(
    "jaxdp_episodic jaxdp_episodic.traced jaxdp_episodic.training jaxdp_episodic.data "
    "jaxdp_episodic.audit jaxdp_episodic.bounds jaxdp_episodic.interop.dp_accounting "
    "jaxdp_episodic.interop.opacus jaxdp_episodic.interop.jax_privacy".split()
)
_IMPORTED = re.compile(r"^ *(?:from|import) (jaxdp_episodic[\w.]*)", re.MULTILINE)
_SENT_TO = re.compile(r"jaxdp_episodic\.(?:accountant|trainer|tools|files)[\w.]*")


def not_public(page: str) -> set[str]:
    """Modules that a page imports from and that are not public doors."""
    return set(_IMPORTED.findall(page)) - PUBLIC_DOORS


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
    raised = [node for node in _parsed(source)[1] if isinstance(node, ast.Raise)]
    texts = [n for r in raised for n in ast.walk(r) if isinstance(n, ast.Constant)]
    return {name for text in texts for name in _SENT_TO.findall(str(text.value))}


def test_messages_name_public_doors_only():
    found = {module: sent_to(text) for module, text in _package_sources().items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert sent_to("raise ValueError(f'see jaxdp_episodic.trainer.run {1}')") != set()


def test_the_public_doors_only_import_names():
    for door in PUBLIC_DOORS:
        path = ROOT.joinpath(*door.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        body, _ = _parsed(file.read_text("utf-8"))
        assert not any(isinstance(node, _DEFINED) for node in body), door


# --- Names in docstrings and comments ---

NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")


def unknown_names(sources: dict[str, str]) -> list[str]:
    """Names in backticks that exist neither in these modules nor in their imports."""
    words, own = set(), {}
    for module, source in sources.items():
        nodes = _parsed(source)[1]
        found = {getattr(n, key, None) for n in nodes for key in ("id", "attr", "arg")}
        found |= {n.name for n in nodes if isinstance(n, ast.alias | _DEFINED)}
        own[module] = {str(name) for name in found}
        words |= own[module] | set(module.split("."))
        words |= {part for name in own[module] for part in name.split(".")}

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
    assert unknown_names(_package_sources()) == []


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [
        ("solve", False),
        ("roots.solve", False),
        ("numerics.roots.solve", False),
        ("roots.gone", True),
        ("gone", True),
        ("gone.solve", True),
    ],
)
def test_a_stale_name_is_found(name, is_wrong):
    sources = {
        "numerics.roots": "def solve(x): ...",
        "losses.one": f'"""See `{name}`."""',
    }
    assert bool(unknown_names(sources)) == is_wrong


# A class or a theme is one file; a second file is for a second idea.
MOST_LINES = 700


# Lines of Python a folder may have, docstrings included. Anybody may lower a number;
# it is raised only together with a line in CHANGELOG.md that says what for.
MOST_LINES_OF = {
    "jaxdp_episodic": 68_210,
    "jaxdp_episodic/accountant/describe": 4_230,
    "jaxdp_episodic/accountant/losses": 5_650,
    "jaxdp_episodic/accountant/methods": 6_970,
    "jaxdp_episodic/accountant/numerics": 3_350,
    "jaxdp_episodic/accountant/questions": 6_615,
    "jaxdp_episodic/accountant/bounds": 2_040,
    "jaxdp_episodic/accountant/interop": 1_810,
    "jaxdp_episodic/accountant/report": 2_220,
    "jaxdp_episodic/trainer/data": 3_610,
    "jaxdp_episodic/trainer/draw": 1_785,
    "jaxdp_episodic/trainer/config": 1_515,
    "jaxdp_episodic/trainer/gradient": 1_530,
    "jaxdp_episodic/trainer/learners": 2_465,
    "jaxdp_episodic/trainer/statistics": 1_385,
    "jaxdp_episodic/trainer/run": 7_030,
    "jaxdp_episodic/trainer/audit": 1_970,
    "jaxdp_episodic/tools/requests": 832,
    "jaxdp_episodic/tools/sweep": 1_250,
    "jaxdp_episodic/tools/plan": 2_200,
    "jaxdp_episodic/tools/plots": 1_270,
    "jaxdp_episodic/tools/book": 1_235,
    "jaxdp_episodic/tools/train": 1_360,
    "jaxdp_episodic/tools/explore": 525,
    "jaxdp_episodic/tools/cli": 2_595,
    "jaxdp_episodic/files": 1_530,
    "experiments": 7_700,
    "tests": 65_900,
}


@pytest.mark.parametrize("folder", MOST_LINES_OF)
def test_folders_keep_to_their_budget(folder):
    files = (ROOT / folder).rglob("*.py")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert lines <= MOST_LINES_OF[folder]


def test_no_file_is_too_long():
    lengths = {name: s.count("\n") for name, s in _package_sources().items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_the_mechanism_to_copy_is_short_and_whole():
    """CONTRIBUTING.md, "Adding a mechanism": at most 60 lines, with all protocols."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    chapter = page.split("## Adding a mechanism")[1].split("\n## ")[0]
    assert "in at most 60 lines of code: begin with a copy" in " ".join(chapter.split())
    path = PACKAGE / "accountant" / "losses" / "randomized_response.py"
    assert f"`losses/{path.name}` is a whole mechanism" in chapter
    source = path.read_text()
    body, nodes = _parsed(source)
    texts = [n for n in nodes if isinstance(n, ast.Expr) and _is_text(n)]
    docs = {line for n in texts for line in range(n.lineno, (n.end_lineno or 0) + 1)}
    for n in nodes:
        if isinstance(n, ast.ImportFrom):  # one line each, regardless of wrapping
            docs.update(range(n.lineno + 1, (n.end_lineno or 0) + 1))
    code = [
        line
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in docs
    ]
    assert len(code) <= 60
    (mechanism,) = (node for node in body if isinstance(node, ast.ClassDef))
    bases = [getattr(base, "id", "") for base in mechanism.bases]
    written = {
        node.name for node in mechanism.body if isinstance(node, ast.FunctionDef)
    }
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)`", chapter, re.MULTILINE))
    # `FiniteValues` derives from `Profile`.
    assert [*rows] == ["Profile", "Moments", "Nodes", "FiniteValues", "Bounds"]
    assert bases == ["FiniteValues", "Moments", "Nodes"]
    assert written >= {rows[name] for name in ("Profile", *bases)}


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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


def test_third_party_imports_are_declared():
    """At the top of a module a dependency; elsewhere, and in interop, also an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = {_distribution(line) for line in project["dependencies"]}
    extras = {
        _distribution(line)
        for name, lines in project["optional-dependencies"].items()
        if name not in ("test", "explore-test", "dev")
        for line in lines
    }
    known = {*sys.stdlib_module_names, "jaxdp_episodic"}
    sources = _package_sources()
    sources["__init__"] = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    undeclared = set()
    for module, source in sources.items():
        body, nodes = _parsed(source)
        for node in nodes:
            for name in _third_party(node) - known - runtime:
                is_optional = node not in body or ".interop." in f".{module}"
                if not is_optional or name not in extras:
                    undeclared.add(f"{module}: {name}")
    assert undeclared == set()


def _third_party(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.split(".")[0]}
    return set()


def _distribution(requirement: str) -> str:
    """The import name of a requirement line ("jax-privacy>=2" -> "jax_privacy")."""
    name = re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
    return IMPORTED_AS.get(name, name.replace("-", "_"))


def test_only_the_boundary_sets_jax_flags():
    """No other file enters ``enable_x64``, and none updates the configuration."""
    for module, source in _package_sources().items():
        for node in _parsed(source)[1]:
            if isinstance(node, ast.Attribute):
                if node.attr == "update":
                    assert not ast.unparse(node).endswith("config.update"), module
                assert node.attr != "enable_x64" or module == "accountant._engine", (
                    module
                )


FREE_OF_JAX = (
    "files",
    "accountant.describe",
    "accountant.report",
    "trainer.config",
    "trainer.data",
    "tools.requests",
)


def test_descriptions_and_files_do_not_import_jax():
    """Modules in these folders do not compute with JAX."""
    for module, source in _package_sources().items():
        if _room(module) in FREE_OF_JAX:
            imported = set().union(*map(_third_party, _parsed(source)[1]))
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


def _import_report(**environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPORT],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_import_is_quiet(x64):
    """It loads no heavy module, touches no device and changes no flag."""
    # An import that starts a backend (such as a JAX array as a module constant) fails
    # on this missing platform.
    report = _import_report(JAX_PLATFORMS="no_such_platform", JAX_ENABLE_X64=str(x64))
    assert HEAVY.intersection(report["new"]) == set()
    assert report["x64"] == [x64, x64]


@pytest.mark.slow
def test_import_costs_little_more_than_jax(tmp_path):
    # CPU time, as the machine may be busy, and with bytecode, which
    # the first run writes: some machines are set to write none.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(_import_report(**bytecode)["of_jax"] for _ in range(5)) <= 0.25


# --- Files that must agree, and the wheel ---


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line]
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


def test_pins_are_names_and_versions_and_agree():
    constraints = _pins(ROOT / "constraints.txt")
    peers = _pins(ROOT / "experiments" / "benchmarks" / "requirements.txt")
    for name, version in {**constraints, **peers}.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name), name
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)
    shared = constraints.keys() & peers.keys()
    assert {"jax", "numpy", "dp-accounting"} <= shared
    assert {n: constraints[n] for n in shared} == {n: peers[n] for n in shared}


def test_the_version_is_the_same_everywhere():
    """In the package, its metadata, the citation and the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.M)
    assert newest is not None
    assert newest[1] == project["version"] == jaxdp_episodic.__version__
    assert f"\nversion: {newest[1]}\n" in citation
    assert f"\ndate-released: {newest[2]}\n" in citation


def test_make_dist_tries_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = runpy.run_path(str(ROOT / "experiments/dist.py"))["MODULES"]
    ours = {"test", "explore-test", "docs", "dev"}
    assert set(tried) == set(project["optional-dependencies"]) - ours


@pytest.mark.slow
def test_wheel_alone_answers_help(tmp_path):
    """Needs a package index: builds the wheel and installs it in a new environment."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("jaxdp_episodic-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "jaxdp_episodic/py.typed" in names
    assert all(re.match(r"jaxdp_episodic(-[^/]*\.dist-info)?/", name) for name in names)

    run(sys.executable, "-m", "venv", tmp_path / "env")
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    constraints = ROOT / "constraints.txt"
    run(scripts / "python", "-m", "pip", "install", "-c", constraints, wheel)
    assert "epsilon" in run(scripts / "jaxdp-episodic", "--help")
