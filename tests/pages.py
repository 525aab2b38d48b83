"""Reads Markdown pages, and runs their code as a reader would."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.tools import cli

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "jaxdp-episodic"
PROGRAMS = (PROGRAM, "make", "pip", "python")
JOBS = "$SLURM_ARRAY_TASK_ID"  # a job array runs its command for each of 1 to 64
NUM_JOBS = 64

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))((?:    .*\n)(?:(?:    .*)?\n)*)")


class Block(NamedTuple):
    """A block of code: its language ("" if indented) and its text."""

    language: str
    text: str
    is_output: bool  # a text block directly after a Python block


class Command(NamedTuple):
    """A shell command as printed, and the output below it ("" if none is shown)."""

    line: str
    output: str


def read(page: str) -> str:
    """The text of a page, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """All blocks of code, in order."""
    found = []
    end, before = 0, ""
    for match in _FENCE.finditer(text):
        found += _indented(text[end : match.start()])
        adjacent = not text[end : match.start()].strip()
        is_output = match[1] == "text" and before == "python" and adjacent
        found.append(Block(match[1], match[2], is_output))
        end, before = match.end(), match[1]
    return found + _indented(text[end:])


def _indented(prose: str) -> list[Block]:
    return [
        Block("", re.sub(r"^ {4}", "", match[1], flags=re.M), False)
        for match in _INDENTED.finditer(prose.lstrip("\n"))
    ]


def fences(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return [block.text for block in blocks(text) if block.language == language]


def commands(block: Block) -> Iterator[Command]:
    """The shell commands of a block; none unless it is console or indented."""
    if block.language == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            line, _, output = part.partition("\n")
            yield Command(line, output)
    elif block.language == "":
        for line in block.text.replace("\\\n", "").splitlines():
            if line.split()[:1] and line.split()[0] in PROGRAMS:  # else a formula
                yield Command(line, "")


# --- Running ---


def run_python(text: str, name: str, namespace: dict[str, Any]) -> str:
    """Runs a block of Python in a namespace; returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, name, "exec"), namespace)
    return printed.getvalue()


def run_program(line: str) -> str:
    """Runs a command of this package's program; returns what it prints."""
    printed = io.StringIO()
    for job in range(1, NUM_JOBS + 1) if JOBS in line else (1,):
        arguments = shlex.split(line.replace(JOBS, str(job)), comments=True)
        assert arguments[0] == PROGRAM
        with contextlib.redirect_stdout(printed):
            assert cli.run(arguments[1:]) == 0, line
    return printed.getvalue()


def check_command(line: str) -> None:
    """Fails unless a command of another program could be run."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", read("Makefile"), re.M)
        assert set(words[1:]) <= set(targets), line
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads(read("pyproject.toml"))["project"]
        (wanted,) = words[2:]
        place, _, extra = wanted.rstrip("]").partition("[")
        assert place == "."
        extras = set(extra.split(",")) - {""}
        assert extras <= set(project["optional-dependencies"]), line
    elif words[0] == "python":
        source = read(words[1])
        for module in re.findall(r"^(?:from|import) (\w+)", source, re.M):
            shared = Path(words[1]).with_name(f"{module}.py")  # with its own options
            source += read(str(shared)) if (ROOT / shared).exists() else ""
        for option in words[2:]:
            assert not option.startswith("--") or f'"{option}"' in source, line
    else:
        raise AssertionError(f"nobody knows how to check {line!r}")


# --- Links ---


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading; the site's is the same."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: str) -> list[str]:
    """Broken links and images of a page, given by its path from the root."""
    text = _FENCE.sub("", read(page))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        file = ((ROOT / page).parent / path) if path else ROOT / page
        if not file.exists():
            broken.append(target)
        elif fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            if fragment not in map(anchor, headings):
                broken.append(target)
    return broken
