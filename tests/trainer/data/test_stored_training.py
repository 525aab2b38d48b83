"""Training on data on disk: bit for bit the same run as in memory."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.config.training_start import StartConfig
from jaxdp_episodic.trainer.data.sources import Npz
from jaxdp_episodic.trainer.data.stored import load_stored
from jaxdp_episodic.trainer.data.user_files import load_npz
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.statistics import statistics
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics
from pages import ROOT
from training_runs import TINY, assert_same, classes, plain_trainer

RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (30, 6, 1, 2), dtype=np.uint8)  # see `classes`


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same 30 classes of 6 tiny images, on disk and in memory."""
    folder = tmp_path_factory.mktemp("stored")
    np.savez(folder / "in.npz", images=IMAGES)
    command = ["data", "import", str(folder / "in.npz"), str(folder / "out")]
    assert cli.run(command) == 0
    return folder / "out", load_npz(folder / "in.npz")


def two_columns(table):
    """The images as (R, 2), which these tests' models take."""
    flat = table.features.reshape(table.num_examples, 2)
    return dataclasses.replace(table, features=flat)


def both(tables):
    folder, memory = tables
    return two_columns(load_stored(folder)), two_columns(memory)


def test_masked_slots_hold_zeros_for_inverted_codes_too(tables):
    stored, _ = both(tables)
    inverted = type(stored.features)(stored.features._column, "inverted", (180, 2))
    table = dataclasses.replace(stored, features=inverted)
    mask = np.array([[True, False]])
    block = episode.block_of(table, np.array([[7, 3]]), mask, np.ones(1))
    inputs = np.asarray(episode.decoded(block, episode.code_of(table)).inputs)
    np.testing.assert_array_equal(inputs[0, 0], inverted[7], strict=True)
    np.testing.assert_array_equal(inputs[0, 1], np.zeros(2, np.float32), strict=True)


def test_a_run_is_resumed_on_the_same_data_only(tables, tmp_path):
    stored, memory = both(tables)
    run = plain_trainer(data=stored, num_steps=4)

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path, on_step=stop)
    with pytest.raises(ValueError, match="the checkpoint is of another run: data"):
        plain_trainer(data=memory, num_steps=4).resume(tmp_path)
    again = plain_trainer(data=both(tables)[0], num_steps=4)
    assert again.resume(tmp_path) == 2
    again.train(tmp_path)
    whole = plain_trainer(data=memory, num_steps=4)
    for _ in range(4):
        whole.step()
    assert_same(again, whole)


def test_a_read_error_names_the_file_and_charges_nothing(tables, tmp_path):
    """The draw prefetched by the failing thread is neither charged nor used."""
    _, memory = tables
    path = tmp_path / "in.npz"
    np.savez(path, images=IMAGES)
    assert cli.run(["data", "import", str(path), str(tmp_path / "out")]) == 0
    table = two_columns(load_stored(tmp_path / "out"))
    run = plain_trainer(data=table, num_steps=40)

    def cut(progress):
        if progress.step == 2:
            os.truncate(tmp_path / "out/train/features.npy", 130)

    with pytest.raises(ValueError, match=r"features\.npy ends within row \d+: it was"):
        run.train(tmp_path / "run", on_step=cut)
    taken = run.num_steps_taken
    assert 2 <= taken <= 5  # the existing features were used
    assert run.num_steps_charged == taken
    path = tmp_path / "again"
    assert cli.run(["data", "import", str(tmp_path / "in.npz"), str(path)]) == 0
    again = plain_trainer(data=two_columns(load_stored(path)), num_steps=40)
    again.resume(tmp_path / "run")
    assert again.num_steps_charged == taken


def _numbers(rows):
    return np.concatenate([rows, rows**2, rows[:, :1] * 3], axis=1)


def test_fixed_features_stay_on_disk(tables, tmp_path):
    stored, memory = both(tables)
    made = FixedFeatures(_numbers, name="squares")
    cache = folder = tmp_path / "cache" / "train"
    wanted = made.table(memory).features
    first = made.table(stored, cache=cache)
    np.testing.assert_array_equal(first.features[:], wanted, strict=True)
    np.testing.assert_array_equal(made.table(stored).features, wanted, strict=True)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    failing = dataclasses.replace(made, function=lambda rows: 1 / 0)
    again = failing.table(stored, cache=cache)  # nothing is computed
    assert again.fingerprint == first.fingerprint
    with pytest.warns(UserWarning, match="is made again: it was made from other"):
        other = FixedFeatures(_numbers, name="others").table(stored, cache=cache)
    assert other.features.shape == first.features.shape
    os.truncate(folder / "train/features.npy", 300)
    with pytest.warns(UserWarning, match="made again: .* it is truncated"):
        FixedFeatures(_numbers, name="others").table(stored, cache=cache)
    (folder / "manifest.json").unlink()  # as after a kill
    third = made.table(stored, cache=cache)
    np.testing.assert_array_equal(third.features[:], wanted, strict=True)
    (folder / "letter.txt").touch()
    (folder / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="but has 'letter.txt'"):
        made.table(stored, cache=cache)  # foreign files are never removed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plda", "mixed"])
def test_private_statistics_are_the_same(kind, tables):
    stored, memory = both(tables)
    if kind == "mixed":
        values = (RNG.random(180) - 0.5).astype(np.float32)
        stored, memory = (
            dataclasses.replace(data, targets=values) for data in (stored, memory)
        )
    shares = {"plda": {"share": 0.5}, "mixed": {"target_bound": 1.0}}
    config = StartConfig(kind=kind, **shares[kind])
    states = []
    for data in (stored, memory):
        one = PrivateStatistics(
            data, config, privacy_unit="example", neighboring_relation="add_remove"
        )
        state = one.initial()
        for place in range(len(one.steps)):
            generator = np.random.default_rng(place)
            key = bytes([place] * 32)
            state = one.release(state, place, generator, key, 0.3)
        states.append((state, one))
    for mine, its in zip(*(jax.tree.leaves(s) for s, _ in states), strict=True):
        np.testing.assert_array_equal(mine, its)
    if kind == "plda":
        seen = [s.table(state).features for state, s in states]
        np.testing.assert_array_equal(*seen, strict=True)


# --- In separate processes ---

CONFIG = (
    TINY.replace('type = "Glyphs"\nsmall = true', 'type = "Stored"\npath = "{data}"')
    .replace("num_classes = 40", "num_classes = 20")
    .replace("population = 20", "population = {each}")
    .replace("{ type", "{{ type")
    .replace(" }\n", " }}\n")
)


def written(folder, each, side):
    """20 classes of images in a folder of columns; returns a config that trains."""
    images = RNG.integers(0, 256, (20, each, side, side, 3), dtype=np.uint8)
    folder.mkdir()
    np.savez(folder / "in.npz", images=images)
    np.savez(folder / "held.npz", images=255 - images[:, :10])
    command = ["data", "import", str(folder / "in.npz"), str(folder / "data")]
    assert cli.run([*command, "--validation", str(folder / "held.npz")]) == 0
    config = folder / "run.toml"
    config.write_text(CONFIG.format(data="data", each=each))
    return config


@pytest.mark.slow
def test_a_convolution_trains_the_same_bit_for_bit(tmp_path):
    """The code look-up is compiled into the network and the evaluation."""
    config = read_config(written(tmp_path / "run", 12, 12))
    config = dataclasses.replace(config, seed=1)
    memory = dataclasses.replace(config, data=Npz(path="in.npz", validation="held.npz"))
    runs = []
    for one in (config, memory):
        run, evaluations, _ = assembled(one, Tables(one, tmp_path / "run"))
        records = run.train(tmp_path / type(one.data).__name__, evaluations=evaluations)
        runs.append((run, records[-1]["held_out"]))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


# Its own count: what `wait4` says of a child begins with the peak of its parent.
COUNTED = """
import re, sys
from pathlib import Path
from jaxdp_episodic.tools import cli
assert cli.run(sys.argv[1:]) == 0
status = Path("/proc/self/status").read_text()
print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


def resident(config):
    """Peak resident memory of a training run in a separate process."""
    command = ["train", str(config), "--out", str(config.parent / "out")]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says it otherwise")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """200 MB on the disk, 800 MB as float32, against 4 MB.

    Both data sets have equally many examples, so that accounting needs the same
    memory: at lower rates its certified ends need some 100 MB more.
    """
    few = resident(written(tmp_path / "few", 4_200, 4))
    many = resident(written(tmp_path / "many", 4_200, 28))
    assert os.stat(tmp_path / "many/data/train/features.npy").st_size > 1.9e8
    assert abs(many - few) < 6e7, (few, many)


@pytest.mark.slow
def test_a_run_is_the_same_bit_for_bit(tables, tmp_path):
    """Prefetched from disk, and stepped by hand from memory."""
    stored, memory = both(tables)
    run, other = (plain_trainer(data=data, num_steps=4) for data in (stored, memory))
    run.train(tmp_path)
    for _ in range(4):
        other.step()
    assert_same(run, other)
    assert run.num_steps_charged == other.num_steps_charged == 4


@pytest.mark.slow
def test_statistics_in_chunks_equal_those_of_all_rows(monkeypatch):
    data = classes(num_classes=20, examples=10)
    config = StartConfig(kind="plda", share=0.5)
    own = PrivateStatistics(
        data, config, privacy_unit="example", neighboring_relation="add_remove"
    )
    state = own.initial()
    pairs = own._terms("pairs", np.random.default_rng(0))
    whole = own._total("pairs", state, pairs)
    monkeypatch.setattr(statistics, "_ROWS", 32)
    parts = own._total("pairs", state, pairs)
    np.testing.assert_array_equal(parts, whole)
