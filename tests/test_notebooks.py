"""The notebooks of the documentation run and show their stored outputs."""

import re

import pytest

import notebooks
import pages

# Noise is random, so training never prints the same numbers again.
PRINTS_THE_SAME = {"account": True, "train": False}


def test_all_notebooks_are_known():
    assert [path.stem for path in notebooks.NOTEBOOKS] == sorted(PRINTS_THE_SAME)


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_complete(path):
    """It was run from the first cell to the last, and no link is broken."""
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
@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """``python tests/notebooks.py`` rewrites the stored outputs."""
    pytest.importorskip("matplotlib")
    kept, now = notebooks.read(path), notebooks.run(path, tmp_path)
    kept, now = notebooks.printed(kept), notebooks.printed(now)
    if not PRINTS_THE_SAME[path.stem]:
        kept = [(bool(text), pictures) for text, pictures in kept]
        now = [(bool(text), pictures) for text, pictures in now]
    assert now == kept
