"""The documentation's code runs as shown, and the reference is complete.

Every page is a session: its Python and its commands run in order in one folder and
one namespace, and print what the page shows.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings

import pytest

import jaxdp_episodic
import notebooks
import pages
from browsers import chromium
from jaxdp_episodic.tools.cli.command import parsed as parse_command
from notebooks import NOTEBOOKS

DOCS = sorted(
    path.relative_to(pages.ROOT).as_posix()
    for path in (pages.ROOT / "docs").rglob("*.md")
)
# Pages whose sessions take more than a second.
SLOW = {
    f"docs/{name}.md"
    for name in (
        "account adaptive adaptive_training attacks audit book correlated "
        "dp_accounting draws in_jax own_images people plan runs sweep training use"
    ).split()
}
SESSIONS = [
    pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page
    for page in (*DOCS, "README.md")
]
# Pages about packages; `make test-peers` installs opacus, `make test` the other.
NEEDS = {"docs/opacus.md": "opacus", "docs/backbones.md": "onnxruntime"}
# Changes that make configs lighter; the commands stay as printed.
LIGHTER = {
    "glyphs_5w1s.toml": {
        "num_steps = 500": "num_steps = 3",
        "sampling_probability = 0.5": "sampling_probability = 0.02",
        "channels = [32, 64, 64]": "channels = [4]",
        "num_episodes = 600": "num_episodes = 4",
        "every = 100\n": "every = 2\n",
    },
    "demo.toml": {
        "num_steps = 300": "num_steps = 3",
        "size = 28": "size = 14",
        "num_episodes = 600": "num_episodes = 4",
        "every = 100\n": "every = 2\n",
        "without_noise = true": "without_noise = false",
    },
    "demo_epsilon1.toml": {
        "num_steps = 300": "num_steps = 3",
        "num_episodes = 600": "num_episodes = 4",
        "every = 100\n": "every = 2\n",
        "without_noise = true": "without_noise = false",
    },
    "demo_adaptive.toml": {
        "num_steps = 300": "num_steps = 3",
        "size = 28": "size = 14",
        "every = 50": "every = 2",
        "num_episodes = 600": "num_episodes = 4",
    },
    "sweep_episodes.toml": {
        "0.7, 6.0, 80": "0.7, 6.0, 8",
        "0.01, 1.0, 50": "0.1, 1, 5",
    },
    "sweep_glyphs.toml": {"5_000, 33": "5_000, 3", "7.0, 33": "7.0, 3"},
    "plan_glyphs.toml": {
        "episodes_per_step = 360": "episodes_per_step = 40",
        "total_episodes = 90_000": "total_episodes = 2_000\nmost_steps = 60",
        "version = 1\n": 'version = 1\nschemes = ["poisson"]\n',
    },
}
# Words read in a quarter of an hour; reference material such as tables
# may be longer.
MOST_WORDS = 2_000
MOST_WORDS_OF_README = 1_200
REFERENCE = ("docs/theory.md", "docs/proofs.md")
# Blocks that are files: where a reader would save them, in order, and what
# makes them lighter.
FILES = {
    ("docs/account.md", "csv"): ("requests.csv", {}),
    ("docs/book.md", "toml"): ("count.toml step.toml", {}),
    ("docs/own_images.md", "toml"): (
        "network.toml",
        {"num_steps = 60": "num_steps = 3"},
    ),
    ("docs/sweep.md", "toml"): ("big.toml", {"0.7, 6.0, 80": "0.7, 6.0, 65"}),
}
# Paths that a reader has and a test has not.
PLACES = {"/shared/": "shared/"}
# One runs until it is stopped, one ends its process, others need a reader's images:
# tests/tools/explore, tests/trainer/gradient/test_processes.py, tests/trainer/data.
ELSEWHERE = tuple(
    f"{pages.PROGRAM} {words}"
    for words in (
        "explore",
        "train run.toml",
        "train configs/train_omniglot.toml",
        "train configs/train_mini_imagenet.toml",
        "data ",
        "init ",
    )
)
# A page that makes the images that its commands need; one of which only what prints
# is run.
WITH_IMAGES, FIRST = "docs/own_images.md", "README.md"
# Until a long page of formulas is typeset on a busy machine, milliseconds.
PATIENCE = 180_000
# Width of a narrow phone's screen, CSS pixels.
PHONE = 375
# A cluster is needed: tests/tools/sweep/test_run.py has a local one.
NEEDS_CLUSTER = "--ray-address auto"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's folder: the configs of the clone, the heavy ones made lighter."""
    shutil.copytree(pages.ROOT / "configs", tmp_path / "configs")
    for name, changes in LIGHTER.items():
        path = tmp_path / "configs" / name
        path.write_text(lighter(path.read_text(encoding="utf-8"), changes))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lighter(text, changes):
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("page", SESSIONS)
def test_pages_run_as_shown(page, folder):
    if page in NEEDS:
        warnings.simplefilter("ignore")  # of opacus and torch, at import and in hooks
        pytest.importorskip(NEEDS[page])
    namespace, printed = {}, ""
    names = {key: iter(names.split()) for key, (names, _) in FILES.items()}
    for number, block in enumerate(pages.blocks(pages.read(page))):
        if block.language == "python":
            printed = pages.run_python(block.text, f"{page}, {number}", namespace)
        elif block.is_output:
            assert printed == block.text
        elif (page, block.language) in FILES:
            name = next(names[page, block.language], None)
            _, changes = FILES[page, block.language]
            if name is not None:
                (folder / name).write_text(lighter(block.text, changes))
        for command, output in pages.commands(block):
            is_elsewhere = command.startswith(ELSEWHERE) and page != WITH_IMAGES
            if not command.startswith(pages.PROGRAM):
                pages.check_command(command)
            elif is_elsewhere or page == FIRST and not output:
                assert callable(parsed(command.removesuffix("&"))[1])
            elif NEEDS_CLUSTER not in command:
                for place, here in PLACES.items():
                    command = command.replace(place, here)
                said = pages.run_program(command)
                assert not output or said == output


def parsed(command):
    """A command of our program, parsed and not run."""
    words = shlex.split(command.replace(pages.JOBS, "1"), comments=True)
    return parse_command(words[1:])


@pytest.mark.parametrize("page", sorted(SLOW))
def test_slow_pages_compile_and_parse(page, folder):
    """Their Python compiles and their commands parse, which takes seconds."""
    for number, block in enumerate(pages.blocks(pages.read(page))):
        if block.language == "python":
            compile(block.text, f"{page}, {number}", "exec")
        for command, _ in pages.commands(block):
            if command.startswith(pages.PROGRAM):
                assert callable(parsed(command)[1])
            else:
                pages.check_command(command)


def test_the_sessions_are_not_empty():
    """Guards the parser of pages: these pages have Python and commands."""
    for page, python, commands in (("docs/index.md", 1, 1), (FIRST, 3, 8)):
        found = pages.blocks(pages.read(page))
        assert sum(block.language == "python" for block in found) == python
        assert sum(len([*pages.commands(block)]) for block in found) >= commands
    assert SLOW | {page for page, _ in FILES} <= set(DOCS)


def test_pages_stay_short():
    most = {FIRST: MOST_WORDS_OF_README, **dict.fromkeys(REFERENCE, 10**6)}
    for page in (*DOCS, FIRST):
        lines = [one for one in pages.read(page).splitlines() if one[:1] != "|"]
        assert len(" ".join(lines).split()) <= most.get(page, MOST_WORDS), page


def test_no_link_or_image_is_broken():
    for page in (*DOCS, FIRST, "CONTRIBUTING.md", "experiments/README.md"):
        assert pages.broken_links(page) == [], page


def test_the_navigation_names_every_page_once():
    """Notebooks too, which the site shows as pages."""
    text = (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (nav,) = re.findall(r"^nav:\n((?: .*\n)+)", text, re.M)
    named = re.findall(r": ([\w/.-]+\.md)$", nav, re.M)
    shown = [f"docs/notebooks/{path.stem}.md" for path in NOTEBOOKS]
    assert sorted(f"docs/{page}" for page in named) == sorted(DOCS + shown)


def test_every_figure_is_on_a_page():
    shown = "".join(map(pages.read, DOCS))
    for path in sorted((pages.ROOT / "docs" / "images").iterdir()):
        assert f"(images/{path.name})" in shown, path.name


# --- The reference ---


def documented():
    """Names with an entry in the reference."""
    text = "".join(pages.read(page) for page in DOCS if "/reference/" in page)
    return re.findall(r"^::: ([\w.]+)$", text, re.M)


def test_the_reference_has_every_public_name():
    training = importlib.import_module("jaxdp_episodic.training")
    wanted = {f"jaxdp_episodic.{name}" for name in jaxdp_episodic.__all__}
    wanted |= {f"jaxdp_episodic.training.{name}" for name in training.__all__}
    files = list((pages.ROOT / "jaxdp_episodic/accountant/bounds").glob("[!_]*.py"))
    names = {path.stem for path in files} - {"common", "mechanisms"}
    assert names
    wanted |= {f"jaxdp_episodic.accountant.bounds.{name}" for name in names}
    assert sorted(set(documented()) & wanted) == sorted(wanted)
    assert len(documented()) == len(set(documented()))


def named(name):
    """The module, class or function of a dotted name."""
    parts = name.split(".")
    thing = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(thing, part):
            importlib.import_module(".".join(parts[:number]))
        thing = getattr(thing, part)
    return thing


def test_pages_and_the_reference_name_things_that_exist():
    for page in DOCS:
        for name in re.findall(r"`(jaxdp_episodic(?:\.\w+)+)`", pages.read(page)):
            assert named(name).__doc__, (page, name)
    for name in documented():
        assert named(name).__doc__, name


def test_the_theory_names_the_function_of_each_formula():
    """In every section that has a displayed formula."""
    for section in re.split(r"^##+ ", pages.read("docs/theory.md"), flags=re.M):
        if "\n$$\n" in section:
            names = re.findall(r"`(jaxdp_episodic(?:\.\w+)+)`", section)
            assert any(callable(named(name)) for name in names), section[:40]


# --- The site ---


def built(page):
    """The place of a page of docs/ in the site."""
    return os.path.relpath(page, "docs").removesuffix(".md") + ".html"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site in a folder, built without a warning."""
    pytest.importorskip("mkdocs", reason="make docs has the environment for it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=pages.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site):
    """So it can be read offline."""
    for page in DOCS:
        html = (site / built(page)).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img)[^>]*src=\"([^\"]*)", html)
        loaded += re.findall(r"<link[^>]*rel=\"stylesheet\"[^>]*href=\"([^\"]*)", html)
        assert loaded
        assert [address for address in loaded if "//" in address] == []


@pytest.mark.slow
def test_no_page_scrolls_sideways_on_a_phone(site):
    """Wide tables, code and formulas scroll by themselves."""
    with chromium() as browser:
        view = browser.new_page(viewport={"width": PHONE, "height": 800})
        view.set_default_timeout(PATIENCE)
        for page in DOCS:
            view.goto((site / built(page)).as_uri())
            view.evaluate("window.MathJax && MathJax.startup.promise.then(() => 0)")
            width = view.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE, page


# --- Notebooks ---


# Noise is random, so training never prints the same numbers again.
PRINTS_THE_SAME = {"account": True, "train": False}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_complete(path):
    """It was run from the first cell to the last, and no link is broken."""
    assert [path.stem for path in NOTEBOOKS] == sorted(PRINTS_THE_SAME)
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    counts = [c["execution_count"] for c in cells if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert any("outputs" in cell and cell["outputs"] for cell in cells)
    assert path.stat().st_size < 150_000
    prose = "\n\n".join(
        notebooks.source(cell) for cell in cells if cell["cell_type"] == "markdown"
    )
    for target in re.findall(r"\]\(([^)\s#]+)\)", prose):
        assert (path.parent / target).exists(), target
    for line in re.findall(r"^!(.*)$", "\n".join(map(notebooks.source, cells)), re.M):
        assert line.split()[0] == pages.PROGRAM


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """``python tests/notebooks.py`` rewrites the stored outputs."""
    pytest.importorskip("matplotlib")
    kept, now = notebooks.read(path), notebooks.run(path, tmp_path)
    kept, now = notebooks.printed(kept), notebooks.printed(now)
    if not PRINTS_THE_SAME[path.stem]:
        kept = [(bool(text), pictures) for text, pictures in kept]
        now = [(bool(text), pictures) for text, pictures in now]
    assert now == kept
