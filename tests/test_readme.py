"""The README's code and commands run as shown, and its links work."""

import pytest

import pages

README = pages.read("README.md")


def test_code_blocks_run():
    """In order and in one namespace, as a reader would run them."""
    assert len(pages.fences(README, "python")) >= 3
    namespace, printed = {}, ""
    for number, block in enumerate(pages.blocks(README)):
        if block.language == "python":
            printed = pages.run_python(block.text, f"README, {number}", namespace)
        elif block.is_output:
            assert printed == block.text


def console():
    """The commands of the console blocks, each with the output printed below it."""
    for block in pages.blocks(README):
        if block.language == "console":
            yield from pages.commands(block)


@pytest.mark.parametrize(("command", "output"), list(console()))
def test_commands_print_what_is_shown(command, output, monkeypatch):
    monkeypatch.chdir(pages.ROOT)
    assert pages.run_program(command) == output


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "experiments/README.md"]
)
def test_no_link_is_broken(page):
    assert pages.broken_links(page) == []
