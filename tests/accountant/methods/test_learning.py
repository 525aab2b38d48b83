"""What a process asks again and again goes over to JAX, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant import _engine
from jaxdp_episodic.accountant._engine import engine_name, using_choice, using_engine
from jaxdp_episodic.accountant.losses.randomized_response import RandomizedResponseLoss
from jaxdp_episodic.accountant.methods import learning
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks

WIDTH, ENOUGH = 64, 200
LEARNABLE = learning.Learnable(("fake",), (WIDTH,), ENOUGH)
SIZES = Chunks(numpy=50, cpu=(8,), accelerator=(8,))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """As in a new process, where nobody says which engine."""
    monkeypatch.setattr(learning, "_LEARNED_AT", 1.0)
    for name in ("_asked", "_waiting", "_compiled"):
        monkeypatch.setattr(learning, name, {})
    monkeypatch.setattr(learning, "_failed", set())
    monkeypatch.setattr(learning, "is_kept", lambda kernel: False)
    monkeypatch.setattr(learning, "note_kept", lambda kernel: None)
    monkeypatch.delenv(_engine.VARIABLE, raising=False)
    yield
    wait_for_thread()


@pytest.fixture
def in_batch():
    with learning.asked_of(100):
        yield


def wait_for_thread(seconds=60):
    thread = learning._thread
    if thread is not None:
        thread.join(seconds)
        assert not thread.is_alive()


class Kernel:
    """Answers with what it is given, plus 1 on JAX; compiling waits for a word."""

    def __init__(self, error=None):
        self.calls, self.error = [], error
        self.may_compile, self.begun = threading.Event(), threading.Event()

    def __call__(self, part):
        on_jax = engine_name() == "jax"
        if threading.current_thread() is learning._thread:
            self.begun.set()
            assert self.may_compile.wait(60)
            if self.error:
                raise self.error
        self.calls.append(("jax" if on_jax else "numpy", part.size))
        return (part + on_jax,)

    def ask(self, size, learnable=LEARNABLE):
        given = np.arange(float(size))
        with learning.asked_of(size):
            (found,) = in_chunks(self, given, SIZES, learnable)
        assert found.shape == given.shape and np.all(np.diff(found) == 1)
        return "jax" if found[0] else "numpy"

    def learned(self, size=100):
        """Asked until it is compiled."""
        self.may_compile.set()
        for _ in range(-(-ENOUGH // size)):
            assert self.ask(size) == "numpy"
        wait_for_thread()
        self.calls.clear()
        return self


def test_numpy_answers_until_the_kernel_is_compiled():
    kernel = Kernel()
    assert kernel.ask(100) == "numpy" and learning._thread is None
    assert kernel.ask(99) == "numpy" and learning._thread is None  # 199 of 200
    assert kernel.ask(16) == "numpy" and kernel.begun.wait(60)
    assert [kernel.ask(size) for size in (100, 500)] == ["numpy"] * 2
    kernel.may_compile.set()
    wait_for_thread()
    assert kernel.calls[-1] == ("jax", WIDTH)
    assert kernel.ask(100) == "jax"


def test_all_sizes_go_through_one_compiled_width():
    kernel = Kernel().learned()
    for size in (16, 63, 64, 65, 100, 500):
        assert kernel.ask(size) == "jax"
    assert set(kernel.calls) == {("jax", WIDTH)}


def test_few_settings_are_neither_counted_nor_padded():
    kernel = Kernel()
    for _ in range(ENOUGH):
        assert kernel.ask(15) == "numpy"
    assert learning._asked == {} and learning._thread is None
    assert kernel.learned().ask(15) == "numpy"


def test_many_settings_take_the_narrow_kernel_while_there_is_no_wide_one():
    both = LEARNABLE._replace(widths=(WIDTH, 4 * WIDTH))
    kernel = Kernel().learned()
    assert kernel.ask(500, both) == "jax" and set(kernel.calls) == {("jax", WIDTH)}
    wide = Kernel()
    wide.may_compile.set()
    other = both._replace(name=("other",))
    assert wide.ask(500, other) == "numpy"
    wait_for_thread()
    wide.calls.clear()
    assert wide.ask(500, other) == "jax" and set(wide.calls) == {("jax", 4 * WIDTH)}


def test_the_paths_of_one_setting_are_no_batch():
    """What a run's ledger says has the same digits in whatever process."""
    kernel = Kernel().learned()
    assert kernel.ask(100) == "jax"
    for settings in (1, 15):
        with learning.asked_of(settings):
            (found,) = in_chunks(kernel, np.arange(100.0), SIZES, LEARNABLE)
        assert found[0] == 0  # NumPy's


def test_kernels_of_other_names_types_and_shapes_are_others(in_batch):
    def kernel_of(arrays, name=("fake",)):
        (kernel,) = learning.kernels_of(
            LEARNABLE._replace(name=name), arrays, 100
        ).values()
        return kernel

    x = np.ones((1, 100))
    kernels = [
        kernel_of((x, x[0])),
        kernel_of((x, x)),
        kernel_of((np.ones((2, 100)), x[0])),
        kernel_of(((x, x[0]),)),
        kernel_of((x, RandomizedResponseLoss(x[0], x[0], x[0]))),
        kernel_of((x, x[0]), ("other",)),
    ]
    assert len(set(kernels)) == len(kernels)
    assert kernel_of((2 * x[:, :20], x[0])) == kernels[0]


@pytest.mark.parametrize("name", ["numpy", "jax"])
def test_what_somebody_asked_for_is_not_learned(name, monkeypatch):
    kernel = Kernel()
    with using_engine(name):
        assert {kernel.ask(ENOUGH) for _ in range(3)} == {name}
    monkeypatch.setenv(_engine.VARIABLE, name)
    assert {kernel.ask(ENOUGH) for _ in range(3)} == {name}
    assert learning._asked == {} and learning._thread is None


def test_a_choice_of_our_own_is_learned():
    """Searches and sweeps choose once for all that they ask."""
    with using_choice("numpy"):
        assert Kernel().learned().ask(100) == "jax"
        with using_engine("numpy"):
            assert Kernel().ask(100) == "numpy"
        with using_engine("auto"):
            assert Kernel().ask(100) == "jax"
    with using_engine("numpy"), using_choice("numpy"):
        assert Kernel().ask(100) == "numpy"


def test_nothing_is_learned_that_jax_may_not_do(monkeypatch, in_batch):
    class ByNumPy(RandomizedResponseLoss):
        compiles = False

    x = np.ones(100)
    assert learning.kernels_of(LEARNABLE, (x, RandomizedResponseLoss(x, x, x)), 100)
    assert not learning.kernels_of(LEARNABLE, (x, ByNumPy(x, x, x)), 100)
    monkeypatch.setattr(_engine, "_has_accelerator", lambda: True)
    assert learning.kernels_of(LEARNABLE, x, 100)  # JAX has it already
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert not learning.kernels_of(LEARNABLE, x, 100)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert learning.kernels_of(LEARNABLE, x, 100)
    monkeypatch.setattr(_engine, "_has_jax", lambda: False)
    assert not learning.kernels_of(LEARNABLE, x, 100)


def test_threads_that_ask_at_once_compile_once():
    kernel = Kernel()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(kernel.ask, [100] * 40)) == {"numpy"}
    kernel.may_compile.set()
    wait_for_thread()
    assert [call for call in kernel.calls if call[0] == "jax"] == [("jax", WIDTH)]


def test_what_lies_on_the_disk_is_learned_sooner(monkeypatch):
    kept = []
    monkeypatch.setattr(learning, "is_kept", kept.__contains__)
    monkeypatch.setattr(learning, "note_kept", kept.append)
    kernel = Kernel().learned()
    assert kernel.ask(100) == "jax" and len(kept) == 1
    monkeypatch.setattr(learning, "_compiled", {})  # another process
    monkeypatch.setattr(learning, "_asked", {})
    other = Kernel()
    other.may_compile.set()
    fewest = int(ENOUGH * learning._KEPT_SHARE)
    assert other.ask(fewest - 1) == "numpy" and learning._thread is None
    assert other.ask(16) == "numpy"
    wait_for_thread()
    assert other.ask(16) == "jax"


def test_several_kernels_are_compiled_one_after_the_other():
    first, second = Kernel(), Kernel()
    other = LEARNABLE._replace(name=("other",))
    first.ask(ENOUGH)
    assert first.begun.wait(60)
    second.ask(ENOUGH, other)
    assert not second.begun.is_set()
    second.may_compile.set()
    first.may_compile.set()
    wait_for_thread()
    assert first.ask(100) == second.ask(100, other) == "jax"


def test_a_kernel_that_cannot_be_compiled_is_said_and_left_to_numpy(caplog):
    kernel = Kernel(error=MemoryError("no room"))
    kernel.learned()
    assert [kernel.ask(100) for _ in range(5)] == ["numpy"] * 5
    assert learning._thread is None
    (record,) = caplog.records
    assert "NumPy goes on answering" in record.message and "no room" in caplog.text


def test_what_was_cleared_is_learned_again(monkeypatch):
    kernel = Kernel().learned()
    assert kernel.ask(100) == "jax"
    monkeypatch.setattr(_engine, "num_clearings", _engine.num_clearings + 1)
    assert kernel.learned().ask(100) == "jax"  # asked as often as at first


@pytest.mark.parametrize(
    "around",
    [
        contextlib.nullcontext,
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.default_device(jax.devices("cpu")[0]),
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("bfloat16"),
    ],
    ids=["none", "ranks", "device", "x64", "precision"],
)
def test_a_callers_settings_compile_nothing_anew(around):
    """Else the caller would wait after all."""
    traced = []

    def double(x):
        traced.append(x.dtype)
        return 2 * x

    def kernel(part):
        if engine_name() != "jax":
            return (2 * part,)
        return (_engine.on_jax(_engine.jitted(double), part),)

    def ask():
        with learning.asked_of(50):
            return in_chunks(kernel, np.arange(50.0), SIZES, LEARNABLE)[0]

    for _ in range(4):
        expected = ask()
    wait_for_thread()
    assert traced == [np.float64]
    found = []
    with around():
        found.append(ask())
        jax.make_jaxpr(lambda x: found.append(ask()) or x)(1.0)
    np.testing.assert_array_equal(found, [expected] * 2)
    assert traced == [np.float64]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_forked_process_has_neither_the_thread_nor_jax():
    kernel, compiled = Kernel(), Kernel().learned()
    other = LEARNABLE._replace(name=("other",))
    kernel.ask(ENOUGH, other)
    assert kernel.begun.wait(60)  # and still compiling
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answers = [compiled.ask(100), *(kernel.ask(100, other) for _ in range(5))]
            nothing = learning._thread is None and not learning._waiting
            code = 0 if set(answers) == {"numpy"} and nothing else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    kernel.may_compile.set()
    assert os.waitstatus_to_exitcode(status) == 0
    wait_for_thread()
    assert kernel.ask(100, other) == "jax"  # the parent goes on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("patience", [60.0, 0.05])
def test_a_fork_waits_for_what_is_being_imported(patience, monkeypatch):
    """For some time: then it forks all the same, and leaves the lock to its thread."""
    monkeypatch.setattr(learning, "_LONGEST_IMPORT", patience)
    imported, held = threading.Event(), threading.Event()

    def importing():
        with learning._importing:
            held.set()
            imported.wait(60 if patience < 1 else 0.1)
            if patience > 1:
                imported.set()

    thread = threading.Thread(target=importing)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if not learning._importing.locked() else 1)
    assert imported.is_set() == (patience > 1)
    imported.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not learning._importing.locked()


def test_a_process_that_ends_compiles_no_further(monkeypatch):
    class Gone:
        def is_alive(self):
            return False

    learning.stop_if_ended()
    kernel, stopped = Kernel(), []

    def two_kernels(part):
        kernel(part)
        try:
            learning.stop_if_ended()
        except learning.Ended:
            stopped.append(True)
            raise
        raise AssertionError

    def count(name):
        learning.count(name, 5, 5, lambda: two_kernels(np.ones(3)))

    count("first")
    count("second")
    assert kernel.begun.wait(60)
    monkeypatch.setattr(threading, "main_thread", Gone)
    kernel.may_compile.set()
    wait_for_thread()
    assert stopped and not (learning._waiting or learning._compiled or learning._failed)
    learning.stop_if_ended()  # nor are other threads kept from asking
    count("third")
    assert learning._thread is None


# --- Real questions ---


def asked(monkeypatch, question):
    """Of how many settings NumPy was asked by a question, kernel by kernel."""
    monkeypatch.setattr(learning, "_LEARNED_AT", float("inf"))
    learning._asked.clear()
    question()
    return sorted(learning._asked.values())


def test_batches_of_settings_are_counted_and_nothing_else(monkeypatch):
    run = {"num_steps": 300, "delta": 1e-6}
    rdp = {**run, "method": "rdp"}
    assert asked(monkeypatch, lambda: jde.epsilon(grid(20), **rdp)) == [20]
    assert asked(monkeypatch, lambda: jde.epsilon(grid(15), **rdp)) == []
    found = asked(monkeypatch, lambda: jde.rdp(grid(20), [2.0, 3.0]))
    assert set(found) == {40}  # in one direction or both
    assert asked(monkeypatch, lambda: jde.rdp(grid(1), np.linspace(2, 9, 40))) == []
    assert asked(monkeypatch, lambda: jde.epsilon(grid(20), **run)) == [20]
    sizes = jde.Population.from_sizes([*range(20, 60)], level_names=("group", "user"))
    scheme = jde.MultistageSampling(
        jde.Poisson("group", sampling_probability=0.1),
        jde.WithoutReplacement("user", size=5),
    )
    unequal = jde.GaussianStep(
        scheme, noise_multiplier=2.0, clip_unit="group", population=sizes
    )
    assert asked(monkeypatch, lambda: jde.epsilon(unequal, **rdp)) == []


def test_searches_are_counted(monkeypatch):
    def search():
        jde.calibrate_num_steps(grid(20), epsilon=1.0, delta=1e-6, method="rdp")

    assert sum(asked(monkeypatch, search)) > 2 * 20


def grid(size):
    rng = np.random.default_rng(7)
    example = jde.Poisson(
        "example", sampling_probability=10 ** rng.uniform(-4, -1, size)
    )
    return jde.GaussianStep(
        example, noise_multiplier=10 ** rng.uniform(-0.2, 0.6, size)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rdp", "exact"])
def test_answers_are_the_same_before_and_after(method, monkeypatch):
    monkeypatch.setattr(learning, "_LEARNED_AT", 1e-4)
    asked = {"num_steps": 300, "delta": 1e-6, "method": method}
    before = jde.epsilon(grid(300), **asked, engine="numpy")
    assert not learning._asked
    found = jde.epsilon(grid(300), **asked)
    np.testing.assert_array_equal(found, before)
    wait_for_thread(600)
    assert learning._compiled and not learning._failed
    after = jde.epsilon(grid(300), **asked)
    np.testing.assert_allclose(after, before, rtol=1e-9)
    assert not np.array_equal(after, before)  # JAX's roundings


SCRIPT = """
import sys
import numpy as np
import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods import learning

assert "jax" not in sys.modules
learning._LEARNED_AT = 1e-4
example = jde.Poisson("example", sampling_probability=np.geomspace(1e-3, 0.1, 64))
step = jde.GaussianStep(example, noise_multiplier=1.0)
jde.epsilon(step, num_steps=300, delta=1e-6, method=sys.argv[1])
if sys.argv[2] == "wait":
    learning._thread.join()
    print(*learning._compiled.values())
"""


def run_script(*arguments, folder):
    environment = {k: v for k, v in os.environ.items() if k != _engine.VARIABLE}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_the_next_process_finds_the_kernel_on_the_disk(tmp_path):
    kept = []
    for _ in range(2):
        done = run_script("rdp", "wait", folder=tmp_path)
        assert done.stdout == "0\n" and done.stderr == ""
        kept.append(sorted(path.name for path in tmp_path.glob("*-cache")))
    assert kept[0] and kept[1] == kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rdp", "exact"])
def test_a_process_may_end_while_it_compiles(method, tmp_path):
    done = run_script(method, "end", folder=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
