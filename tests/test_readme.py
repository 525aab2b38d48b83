"""What the README shows is what happens: its code, its commands, its links."""

import re
from pathlib import Path

import pytest

from jaxdp_episodic import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/amplification.md",
    "docs/sweep.md",
    "docs/theory.md",
    "docs/training.md",
    "experiments/README.md",
]


def blocks(language):
    """The contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_code_blocks_run():
    """In order and in one namespace, as somebody who reads along would run them."""
    assert len(blocks("python")) >= 3
    namespace = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README block {number}", "exec"), namespace)


def console():
    """The commands of the console blocks, each with the output printed below it."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


@pytest.mark.parametrize(("command", "output"), list(console()))
def test_commands_print_what_is_shown(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = command.split()
    assert program == "jaxdp-episodic"
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out == output


def anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(
        r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S
    )
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        file = ((ROOT / page).parent / path) if path else ROOT / page
        assert file.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            assert fragment in map(anchor, headings), target
