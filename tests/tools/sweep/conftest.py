"""Fixtures: sweeps read from files, and the folder of an undisturbed sweep."""

import os

import pytest

from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import run_sweep
from sweep_runs import SWEEP, contents


@pytest.fixture
def read(tmp_path):
    """Reads a sweep of this content."""

    def from_text(content):
        path = tmp_path / "sweep.toml"
        path.write_text(content, encoding="utf-8")
        return read_sweep(path)

    return from_text


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A sweep of 6 chunks, and its folder's content after an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = folder / "sweep.toml"
    file.write_text(SWEEP, encoding="utf-8")
    sweep = read_sweep(file)
    evaluate, known = engines.evaluate_chunk, {}

    def once(some, number):
        """Chunks of the small sweep are evaluated once for all tests."""
        if some is not sweep:
            return evaluate(some, number)
        if number not in known:
            known[number] = evaluate(some, number)
        return known[number]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "evaluate_chunk", once)
        run_sweep(sweep, folder / "out")
        yield sweep, contents(folder / "out")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    """Compiled kernels are shared by the processes that a module's tests start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("JAX_", "XLA_"))]:
            patch.delenv(name)
        folder = str(tmp_path_factory.mktemp("compiled"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield
