"""What every test runs under, and the rule for its time.

`make test` may take 3 minutes on two cores, some 5 minutes of CPU for 5,000 tests:

* A test that takes .75 s of CPU or more is marked `slow`, unless it guards what is
  published. Of a long parametrization the first rows are the sharp ones, and
  `@pytest.mark.few(n)` leaves those after the n-th to `make test-all`.
* Oracles of many digits are recorded beside the test; a slow test computes them anew.
* Tests ask the NumPy engine. A compiled kernel costs seconds: tests that need one share
  its shapes.
* A process costs a second of imports: a command is called in the test's own process,
  and has one test that starts it as users do.

`--durations=30` shows who breaks the rule.
"""

import collections
import contextlib
import gc
import os
from importlib.metadata import version

# Read when jax is first imported, so before anything else: a silent promotion is how
# a float32 slips into an accountant.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Nor do BLAS's threads share small matrices: several processes run tests, and threads
# that wait for each other keep all cores busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests compile much and compute little, so the compiler takes its shortest way. What is
# compared bit for bit is compiled alike; `make test-all` compiles as users do, as does
# whoever sets the flags, be it to nothing.
# XLA ends a process at a flag that its version lacks. The last two halve what is left.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    if not version("jaxlib").startswith("0.10.")
    else "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)

import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from asked_once import asked_once
from jaxdp_episodic.accountant import _engine

gc.disable()  # while tests are collected: all of it is kept
hypothesis.settings.register_profile("project", derandomize=True, deadline=None)
hypothesis.settings.load_profile("project")

_pytest_approx = pytest.approx


def _approx(expected, rel=None, abs=None, nan_ok=False):
    """Its own 1e-12 beside ``rel`` would be wider than most deltas are large."""
    if rel is not None and abs is None and np.all(np.asarray(expected) != 0):
        abs = 0.0
    return _pytest_approx(expected, rel=rel, abs=abs, nan_ok=nan_ok)


pytest.approx = _approx


# Folders and files that take longest come first: at the end of a run that is shared by
# several processes only short ones are left to wait for.
_LONGEST = (
    *("trainer/run/", "tools/train/", "trainer/", "mutation/"),
    *("accountant/questions/", "accountant/losses/", "accountant/"),
    *("tools/cli/", "test_readme.py", "test_oracles.py", "test_project.py"),
)


# Folders whose tests are not about what the accountant answers.
_ASKS = ("tools", "trainer")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks at the marks
def pytest_collection_modifyitems(items):
    seen = collections.Counter()
    for item in items:
        few = item.get_closest_marker("few")
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        if few is not None and seen[function] > few.args[0]:
            item.add_marker(pytest.mark.slow)

    def place(item):
        path = item.nodeid.partition("/")[2]
        found = (i for i, start in enumerate(_LONGEST) if path.startswith(start))
        return next(found, len(_LONGEST))

    items.sort(key=place)  # stable: files stay together


def pytest_collection_finish():
    """The collector need not go through what every test keeps, nor look so often."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(autouse=True)
def _x64_flag_is_left_alone():
    """Fails any test after which the caller's x64 setting has changed."""
    before = _x64_flag()
    yield
    assert _x64_flag() == before


@pytest.fixture(params=["numpy", "jax"])
def engine(request):
    """Both engines, one after the other."""
    with _engine.using_engine(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="session")
def _compile_once(tmp_path_factory):
    """What is compiled is kept for the session, and for the other processes of it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    limit = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, limit)
    jax.config.update(limit, 0.2)
    compilation_cache.set_cache_dir(str(folder / "compiled"))
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update(limit, before)


@pytest.fixture(autouse=True, scope="module")
def _the_same_is_asked_once(request):
    """By tests of what asks the accountant; those of the accountant ask each time."""
    asks = any(f"tests/{name}/" in request.node.nodeid for name in _ASKS)
    with asked_once() if asks else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_disk_is_waited_for():
    """What is written is there for every process; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_mappings():
    """Training compiles outside of the boundary where the library looks after them."""
    yield
    _engine.clear_kernels_if_crowded()


def _x64_flag() -> bool:
    # jax makes the attributes of its configuration at run time, unseen by pyright.
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
