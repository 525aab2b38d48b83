"""A sweep in its folder: resumed, refused, killed, on a full disk, on many devices."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accounting.request import CalibrationRequest
from jaxdp_episodic.sweep import engines, files, table
from jaxdp_episodic.sweep.chunks import evaluate_chunk
from jaxdp_episodic.sweep.folder import MANIFEST, SHARDS, SweepFolder, saved_chunks
from jaxdp_episodic.sweep.run import SweepError, collect, run_sweep

ROOT = Path(__file__).resolve().parents[2]


def columns(path, *names):
    blocks = list(table.read_columns(path, names))
    return [np.concatenate([block[name] for block in blocks]) for name in names]


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def no_work(sweep, numbers):
    """An engine that must not be asked."""
    raise AssertionError(f"evaluates {numbers}")
    yield


@pytest.fixture
def without_pyarrow(monkeypatch):
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)


def test_the_table_has_every_setting(read, sweep_text, tmp_path):
    sweep = read(sweep_text)
    outcome = run_sweep(sweep, tmp_path / "out")
    assert (outcome.size, outcome.num_chunks, outcome.num_evaluated) == (520, 2, 520)
    names = ("noise_multiplier", "example.sampling_probability", "epsilon")
    noise, rate, epsilon = columns(outcome.table, *names)
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate), noise_multiplier=noise
    )
    expected = jde.epsilon(step, num_steps=300, delta=1e-5, method="rdp")
    np.testing.assert_allclose(epsilon, expected, rtol=1e-12)
    assert sorted(contents(tmp_path / "out")) == [MANIFEST, outcome.table.name]
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["num_settings"] == 520
    assert set(manifest["versions"]) == {"jaxdp-episodic", "jax", "jaxlib", "numpy"}
    again = run_sweep(sweep, tmp_path / "out", engine=no_work)
    assert (again.num_evaluated, again.table) == (0, outcome.table)


def test_npz_without_pyarrow(read, sweep_text, tmp_path, without_pyarrow):
    outcome = run_sweep(read(sweep_text), tmp_path / "out")
    assert outcome.table.name == "table.npz"
    with np.load(outcome.table, allow_pickle=False) as archive:
        arrays = dict(archive)
    assert arrays["noise_multiplier"][:2].tolist() == [0.8, 0.8]
    (epsilon,) = columns(outcome.table, "epsilon")
    np.testing.assert_array_equal(arrays["epsilon"], epsilon)
    run_sweep(read(sweep_text), tmp_path / "again")
    assert (tmp_path / "again/table.npz").read_bytes() == outcome.table.read_bytes()
    with pytest.raises(ValueError, match="damaged"):
        list(table.read_columns(outcome.table, ["delta"]))


def test_words_and_whole_numbers_in_the_table(read, sweep_text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        CalibrationRequest, "answer", lambda request: 2**53 - request.delta.size
    )
    axes = '[[axes]]\nfield = "{}"\nvalues = {}\n'
    text = sweep_text.partition("[[axes]]")[0].replace(
        "num_steps = 300", 'quantity = "num_steps"\nepsilon = 2.0'
    )
    text = text.replace('"GaussianStep"', '"GaussianStep"\nnoise_multiplier = 1.0')
    text += axes.format("method", '["rdp"]') + axes.format("delta", "[1e-6, 1e-5]")
    text = text.replace('"example"', '"example"\nsampling_probability = 0.1')
    outcome = run_sweep(read(text), tmp_path / "out")
    method, steps = columns(outcome.table, "method", "num_steps")
    assert method.tolist() == ["rdp", "rdp"]
    assert steps.dtype == np.int64
    assert steps.tolist() == [2**53 - 2] * 2


# --- Resuming ---


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the manifest's sweep of a run without trouble."""
    from jaxdp_episodic.sweep.description import read_sweep

    folder = tmp_path_factory.mktemp("undisturbed")
    file = folder / "sweep.toml"
    file.write_text(SWEEP)
    sweep = read_sweep(file)
    run_sweep(sweep, folder / "out")
    return sweep, contents(folder / "out")


SWEEP = """
version = 1
delta = 1e-5
method = "rdp"
memory_mib = 1
[step]
type = "GaussianStep"
[step.sampling]
type = "Poisson"
name = "example"
[[axes]]
field = "num_steps"
values = [10, 100, 1000]
[[axes]]
field = "noise_multiplier"
geomspace = [0.8, 6.0, 60]
[[axes]]
field = "example.sampling_probability"
geomspace = [1e-3, 1.0, 16]
"""


def saved_partly(sweep, folder, numbers):
    """A folder in which some chunks are saved."""
    opened = SweepFolder.opened(folder, sweep)
    for number in numbers:
        opened.save(number, evaluate_chunk(sweep, number)[0])
    return opened


def test_finished_shards_are_kept_and_damaged_ones_made_again(undisturbed, tmp_path):
    sweep, expected = undisturbed
    folder = saved_partly(sweep, tmp_path / "out", [0, 1, 3, 4])
    assert saved_chunks(folder.path) == (4, folder.num_chunks)
    damaged = bytearray(folder.shard(1).read_bytes())
    damaged[-3] ^= 1
    folder.shard(1).write_bytes(damaged)
    folder.shard(3).write_bytes(folder.shard(3).read_bytes()[:-8])
    # Whole, but another chunk's.
    folder.shard(4).write_bytes(folder.shard(0).read_bytes())
    left_over = folder.path / SHARDS / f"00000002{files.TEMPORARY}0123"
    left_over.write_bytes(b"half a sha")
    asked = []

    def engine(some, numbers):
        asked.extend(numbers)
        return engines.on_devices(some, numbers)

    run_sweep(sweep, folder.path, engine=engine)
    assert asked == [1, 2, 3, 4, 5]
    assert contents(folder.path) == expected


def test_shards_of_a_job_array(undisturbed, tmp_path):
    sweep, expected = undisturbed
    out = tmp_path / "out"
    assert run_sweep(sweep, out, part=(2, 3)).table is None
    with pytest.raises(ValueError, match=r"4 of 6 chunks .*: 0, 2 to 3, 5; run"):
        collect(sweep, out)
    run_sweep(sweep, out, part=(1, 3))
    run_sweep(sweep, out, part=(1, 3), engine=no_work)
    run_sweep(sweep, out, part=(3, 3))
    assert collect(sweep, out).table
    assert contents(out) == expected
    assert collect(sweep, out).table
    for part in [(0, 3), (4, 3)]:
        with pytest.raises(ValueError, match="1 <= i <= n"):
            run_sweep(sweep, out, part=part)


def test_a_chunk_that_fails_takes_no_other_with_it(undisturbed, tmp_path):
    sweep, expected = undisturbed

    def engine(some, numbers):
        for result in engines.on_devices(some, numbers):
            failed = result._replace(answers=None, error="ValueError: too bad")
            yield failed if result.number in (1, 2) else result

    with pytest.raises(SweepError, match=r"2 of 6 chunks .*1 to 2.*512 to 1,023.*bad"):
        run_sweep(sweep, tmp_path / "out", engine=engine)
    assert saved_chunks(tmp_path / "out") == (4, 6)
    assert run_sweep(sweep, tmp_path / "out").num_evaluated == 1024
    assert contents(tmp_path / "out") == expected


def test_exceptions_become_results(undisturbed, monkeypatch):
    sweep, _ = undisturbed
    monkeypatch.setattr(
        engines, "evaluate_chunk", lambda *_: (_ for _ in ()).throw(MemoryError("x"))
    )
    (result,) = engines.on_devices(sweep, [3])
    assert result == (3, None, [], "MemoryError: x")


# --- Folders ---


def test_the_folder_of_another_sweep_is_refused(undisturbed, read, tmp_path):
    sweep, _ = undisturbed
    saved_partly(sweep, tmp_path / "out", [0])
    before = contents(tmp_path / "out")
    other = read(SWEEP.replace("60]", "61]").replace("delta = 1e-5", "delta = 1e-6"))
    with pytest.raises(ValueError) as caught:
        run_sweep(other, tmp_path / "out", engine=no_work)
    message = str(caught.value)
    assert "holds another sweep" in message
    assert "axes[1].geomspace[2]: 60 there, 61 now" in message
    assert "delta: 1e-05 there, 1e-06 now" in message
    assert contents(tmp_path / "out") == before


def test_the_folder_of_another_version_is_refused(undisturbed, tmp_path, monkeypatch):
    sweep, _ = undisturbed
    SweepFolder.opened(tmp_path / "out", sweep)
    monkeypatch.setattr(np, "__version__", "99.0")
    with pytest.raises(ValueError, match=r"versions.numpy: .* there, 99.0 now"):
        SweepFolder.opened(tmp_path / "out", sweep)


def test_other_folders_are_refused(undisturbed, tmp_path):
    sweep, _ = undisturbed
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="thesis.tex"):
        run_sweep(sweep, tmp_path, engine=no_work)
    with pytest.raises(NotADirectoryError, match="not a folder"):
        run_sweep(sweep, tmp_path / "thesis.tex", engine=no_work)
    broken = tmp_path / "broken"
    broken.mkdir()
    for text in ("{", "[]", '{"version": 1}', '{"version": 9, "kind": "sweep"}'):
        (broken / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match="not the manifest of a sweep"):
            run_sweep(sweep, broken, engine=no_work)


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_folder_that_cannot_be_written(undisturbed, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            run_sweep(undisturbed[0], tmp_path / "out", engine=no_work)
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_fills_up(undisturbed, tmp_path, monkeypatch):
    """Space ends at the third shard, then at the table; all that was done stays."""
    sweep, expected = undisturbed
    out = tmp_path / "out"
    SweepFolder.opened(out, sweep)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2 * 2:  # a file and its folder for each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_sweep(sweep, out)
    assert saved_chunks(out) == (2, 6)
    assert not list(out.rglob(f"*{files.TEMPORARY}*"))
    calls[:] = [0] * -8  # room for the four others, and not for the table
    calls.clear()
    monkeypatch.setattr(
        files.os, "fsync", lambda d: full(d) if len(calls) > 99 else real(d)
    )
    monkeypatch.setattr(files.Path, "replace", refusing_tables(files.Path.replace))
    with pytest.raises(OSError, match="No space left"):
        run_sweep(sweep, out)
    assert saved_chunks(out) == (6, 6)
    monkeypatch.undo()
    run_sweep(sweep, out, engine=no_work)
    assert contents(out) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk(undisturbed, tmp_path):
    """A real one, of 16 KiB, where it may be made; chunks there are of 4 KiB."""
    sweep, expected = undisturbed
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(disk)]
    try:
        made = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("a tmpfs may not be mounted here")
    try:
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, disk / "out")
        done, _ = saved_chunks(disk / "out")
        assert 1 <= done < 6
        assert not list(disk.rglob(f"*{files.TEMPORARY}*"))
        subprocess.run([*mount[:4], "remount,size=1m", *mount[5:]], check=True)
        assert run_sweep(sweep, disk / "out").num_evaluated == 2880 - 512 * done
        assert contents(disk / "out") == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def refusing_tables(replace):
    def refuse(path, target):
        if target.name.startswith("table"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    return refuse


# --- Other processes ---

PROGRAM = """
import sys
from pathlib import Path
import jax
from jaxdp_episodic.sweep import engines
from jaxdp_episodic.sweep.description import read_sweep
from jaxdp_episodic.sweep.run import run_sweep

used = set()
attempt = engines.attempt
def noted(sweep, number):
    used.add(str(jax.numpy.zeros(1).devices()))
    print("chunk", number, flush=True)
    return attempt(sweep, number)
engines.attempt = noted
run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
print(jax.local_device_count(), len(used))
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compiled kernels are shared by the processes that these tests start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("JAX_", "XLA_"))]:
            patch.delenv(name)
        folder = str(tmp_path_factory.mktemp("compiled"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


# In place of the accountant, whose kernels every device would compile for itself.
QUICK = """
import jax.numpy as jnp, numpy as np
from jaxdp_episodic.sweep.chunks import chunk_range

def quick(sweep, number):
    start, stop = chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values = sweep.grid.values(np.arange(start, stop))
    noise = jnp.asarray(values["noise_multiplier"], "float32")
    return np.asarray(jnp.exp(-noise), np.float64), []
"""


def start(file, out, program=PROGRAM, **changes):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(file), str(out)],
        env={**os.environ, **changes},
        stdout=subprocess.PIPE,
        text=True,
    )


def on_four_devices(tmp_path, program=PROGRAM):
    """What is in the folder of a sweep on four devices, all of which were used."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    flags = "--xla_force_host_platform_device_count=4"
    process = start(tmp_path / "sweep.toml", tmp_path / "out", program, XLA_FLAGS=flags)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert output.splitlines()[-1] == "4 4"
    return contents(tmp_path / "out")


def test_chunks_are_spread_over_four_devices(undisturbed, tmp_path, monkeypatch):
    program = QUICK + PROGRAM.replace(
        "used = ", "engines.evaluate_chunk = quick\nused = "
    )
    found = on_four_devices(tmp_path, program)
    space = {}
    exec(QUICK, space)
    monkeypatch.setattr(engines, "evaluate_chunk", space["quick"])
    run_sweep(undisturbed[0], tmp_path / "expected")
    assert found == contents(tmp_path / "expected")


@pytest.mark.slow
def test_same_bytes_on_four_devices(undisturbed, tmp_path):
    assert on_four_devices(tmp_path) == undisturbed[1]


def killed_until_done(tmp_path, expected, kills, seconds, text=SWEEP):
    """Starts a sweep again and again and kills it at random moments of its work."""
    (tmp_path / "sweep.toml").write_text(text)
    rng = random.Random(5)
    landed = 0
    for _ in range(kills):
        process = start(tmp_path / "sweep.toml", tmp_path / "out")
        assert process.stdout is not None
        process.stdout.readline()  # work has begun
        time.sleep(rng.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        landed += process.returncode == -signal.SIGKILL
        if (tmp_path / "out" / MANIFEST).exists():
            assert json.loads((tmp_path / "out" / MANIFEST).read_text())
    process = start(tmp_path / "sweep.toml", tmp_path / "out")
    process.communicate()
    assert process.returncode == 0
    assert contents(tmp_path / "out") == expected
    return landed


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_killed_twice(undisturbed, tmp_path):
    assert killed_until_done(tmp_path, undisturbed[1], 2, 1.0) >= 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_killed_at_twenty_moments(tmp_path, read):
    """Of a sweep of 120 chunks, which takes some seconds in all."""
    text = SWEEP.replace("60]", "1280]")
    run_sweep(read(text), tmp_path / "expected")
    expected = contents(tmp_path / "expected")
    assert killed_until_done(tmp_path, expected, 20, 0.6, text) >= 15
