"""Settings of all tests, and the rule about their time.

`make test` may take 3 minutes on two cores, about 5 minutes of CPU for 5,000 tests:

* A test that takes .75 s of CPU or more is marked `slow`, unless it guards what is
  published. The first rows of a long parametrization are the sharpest, and
  `@pytest.mark.few(n)` leaves rows after the n-th to `make test-all`.
* High-precision values are recorded beside the test; a slow test recomputes them.
* Tests use the NumPy engine. A compiled kernel costs seconds: tests that need one share
  its shapes.
* A process costs a second of imports: commands are called in the test's process,
  and one test starts each as users do.

`--durations=30` shows which tests break the rule.
"""

import collections
import contextlib
import gc
import os
from importlib.metadata import version

# Set before jax is first imported: a silent promotion would let float32 into the
# accountant.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# BLAS uses one thread: several processes run tests, and waiting threads would keep
# all cores busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests compile much and compute little, so XLA does not optimize. Results that are
# compared bit for bit are compiled alike. `make test-all` compiles as users do, and
# so does any run that sets XLA_FLAGS, even to "".
# XLA aborts at a flag that its version lacks. The last two halve the remaining time.
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

gc.disable()  # during collection, which keeps everything
hypothesis.settings.register_profile("project", derandomize=True, deadline=None)
hypothesis.settings.load_profile("project")

_pytest_approx = pytest.approx


def _approx(expected, rel=None, abs=None, nan_ok=False):
    """With ``rel`` the default ``abs`` of 1e-12 is dropped: deltas may be smaller."""
    if rel is not None and abs is None and np.all(np.asarray(expected) != 0):
        abs = 0.0
    return _pytest_approx(expected, rel=rel, abs=abs, nan_ok=nan_ok)


pytest.approx = _approx


# The slowest folders and files come first: when several processes share a run, only
# short ones remain at the end.
_LONGEST = (
    *("trainer/run/", "tools/train/", "trainer/", "mutation/"),
    *("accountant/questions/", "accountant/losses/", "accountant/"),
    *("tools/cli/", "test_oracles.py", "test_project.py"),
)


# Folders whose tests are not about the accountant's answers.
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
    """Excludes collected tests from garbage collection, which then runs less often."""
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
    """Both engines in turn."""
    with _engine.using_engine(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="session")
def _compile_once(tmp_path_factory):
    """Compiled programs are cached for the session and shared by its processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
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
    """Caches answers for tests in `_ASKS`; tests of the accountant always compute."""
    asks = any(f"tests/{name}/" in request.node.nodeid for name in _ASKS)
    with asked_once() if asks else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_disk_is_waited_for():
    """Skips fsync: written data are visible to all processes without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_mappings():
    """Training compiles outside the library's boundary, which would clear mappings."""
    yield
    _engine.clear_kernels_if_crowded()


def _x64_flag() -> bool:
    # jax creates the attributes of its configuration at run time.
    return jax.config.jax_enable_x64
