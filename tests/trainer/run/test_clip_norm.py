"""Runs whose clip norm follows a quantile: neighbours, statements, resumption."""

import dataclasses

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import ROOT
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient import discrete_noise
from jaxdp_episodic.trainer.gradient.clipping import steps_of_vote
from jaxdp_episodic.trainer.gradient.discrete_noise import GRID
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.trainer.run.ledger_file import run_file
from jaxdp_episodic.trainer.run.report import privacy_statement
from jaxdp_episodic.trainer.run.run_files import read_log, releasable_records
from jaxdp_episodic.training import ClippingConfig, TrainingConfig, read_config
from training_runs import GROUPED, TINY, adam, classes, plain_trainer

CLIPPING = ClippingConfig(rate=1.0, count_noise=0.7)


# --- Neighbours ---


def joint(run, block):
    """What a block adds to a step's sums: integers, the count last."""
    norm = np.float32(run.clip_norm)
    totals = run._gradient._sum(run.state.params, [block], norm)
    sums = [x.ravel() for x in discrete_noise.whole_sum(totals.gradient)]
    return np.concatenate([*sums, [steps_of_vote(run.clipping) * int(totals.votes)]])


def of_each_row(run, block):
    """What each row adds, the other rows being empty."""
    masks = np.diag(block.unit_mask)
    return np.stack([joint(run, block._replace(unit_mask=mask)) for mask in masks])


def a_run(data, **changes):
    return plain_trainer(data=data, clipping=CLIPPING, normalizer=5.0, **changes)


def neighbours(relation):
    """Two runs on neighbouring data with equal draws, and the bound of the change."""
    data = classes()
    step = dataclasses.replace(GROUPED, neighboring_relation="replace_one")
    if relation == "zero_out":  # public slots, one more of them empty
        step = dataclasses.replace(GROUPED, neighboring_relation=relation)
        units = {"class": data.class_places[1:]}
        fewer = ExampleTable.from_records(data.features[1:], units=units)
        return a_run(data, step=step), a_run(fewer, step=step), 1
    changed = data.features.copy()
    changed[:6] = 50 * changed[6:12]
    if relation == "not finite":  # loaders refuse this
        changed[:6] = np.nan
    if relation == "person":  # all of her examples, one in each class
        people = jde.PersonBounds(classes=30, examples=1)
        step = dataclasses.replace(step, privacy_unit="person", people=people)
        changed = data.features.copy()
        changed[::6] = 50 * changed[1::6]
        of = {
            "owners": np.tile(np.arange(6), 30),
            "units": {"class": data.class_places},
        }
        data = ExampleTable.from_records(data.features, **of)
    runs = a_run(data, step=step), a_run(data, step=step)
    object.__setattr__(runs[1]._main._parts, "data", data.with_features(changed))
    return *runs, 2


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "relation", ["zero_out", "replace_one", "not finite", "person"]
)
def test_neighbours_are_as_far_apart_as_the_accountant_says(relation):
    """Gradient and count together, in draws of real runs; no other row changes.

    A unit in several episodes of a step changes as many rows.
    """
    one, other, times = neighbours(relation)
    bound = times**2 * (GRID**2 + steps_of_vote(CLIPPING) ** 2)
    moved = 0
    for step in range(1, 5):
        pair = [run.draw_blocks(step)[0] for run in (one, other)]
        rows = [of_each_row(one, block) for block in pair]
        same = np.array(
            [
                all(np.array_equal(a[row], b[row]) for a, b in zip(*pair, strict=True))
                for row in range(len(pair[0].unit_mask))
            ]
        )
        change = rows[0] - rows[1]
        np.testing.assert_array_equal(change[same], 0)
        squares = [sum(int(n) ** 2 for n in row) for row in change[~same]]
        moved = max(moved, sum(square > 0 for square in squares))
        assert max(squares, default=0) <= bound
        for block, of_rows in zip(pair, rows, strict=True):
            # Units do not interact; an empty row, or one with a null, gives nothing.
            np.testing.assert_array_equal(joint(one, block), of_rows.sum(axis=0))
            assert not of_rows[block.unit_mask == 0].any()
            assert of_rows[block.unit_mask > 0].any(axis=1).all()
    assert moved > (relation == "person")


# --- Resumption ---


def test_the_clip_norms_are_public_and_in_the_file(tmp_path):
    """Resumed runs equal undisturbed ones: see test_crashes.py."""
    run = plain_trainer(clipping=CLIPPING)
    records = releasable_records(run.train(tmp_path))
    norms = [record["clip_norm"] for record in records]
    assert norms == [record["clip_norm"] for record in read_log(tmp_path)]
    assert norms[0] == 0.5 and norms[-1] == run.clip_norm
    assert len(set(norms)) == 7
    with run_file(tmp_path) as file:
        (opened,) = file.openings()
    assert '"kind": "quantile"' in opened["clipping"]
    text = privacy_statement(run.budget, 6, clipping=CLIPPING)
    vote = steps_of_vote(CLIPPING)
    noise = np.hypot(1, vote / GRID)
    assert f"noise of {noise:.5g} times the clip norm" in text
    assert f"noise of {noise * GRID / (2 * vote):.5g} to the count" in text
    assert "to a norm that followed the 0.5 quantile" in text
    assert "and the clip norm after every step" in text


def test_a_run_is_not_resumed_with_another_clipping(tmp_path):
    plain_trainer(clipping=CLIPPING, num_steps=2).train(tmp_path)
    for change in ({"count_noise": 0.8}, {"kind": "normalize"}, {"kind": "fixed"}):
        clipping = dataclasses.replace(CLIPPING, **change)
        with pytest.raises(RunMismatchError, match="clipping"):
            plain_trainer(clipping=clipping, num_steps=2).resume(tmp_path)


# --- Statements ---


def test_a_run_with_a_fixed_clip_norm_makes_no_new_statement(tmp_path):
    run = plain_trainer(num_steps=2)
    records = run.train(tmp_path)
    assert "clip_norm" not in records[-1] and "clipping" not in run.run
    assert run.clip_norm == 0.5
    text = privacy_statement(run.budget, 2)
    assert "was clipped, and discrete Gaussian noise of 1 times the clip norm" in text
    text = privacy_statement(run.budget, 2, clipping=ClippingConfig(kind="normalize"))
    assert "was scaled to one norm, and discrete Gaussian noise of 1 times this" in text


def test_the_clip_norm_finds_the_quantile():
    """With little noise, from a far too large clip norm."""
    quiet = dataclasses.replace(GROUPED, noise_multiplier=1e-3)
    how = {"clipping": ClippingConfig(quantile=0.8, rate=1.0), "l2_clip_norm": 30.0}
    run = plain_trainer(step=quiet, num_steps=80, optimizer=adam(1e-6), **how)
    shares = [run.step()["share_clipped"] for _ in range(80)]
    assert np.mean(shares[-40:]) == pytest.approx(0.2, abs=0.1)


# --- Bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "quantil"}, "did you mean 'quantile'"),
        ({"quantile": 1.0}, r"quantile must lie in \(0, 1\), got 1.0"),
        ({"rate": 0.0}, r"rate must lie in \(0, 10\], got 0"),
        ({"count_noise": 0.1}, r"count_noise must lie in \[0.3, 500\]"),
        ({"minimum": 0.0}, "minimum must lie in"),
        ({"minimum": 0.6}, r"l2_clip_norm must lie in \[0.6, 500\].*got 0.5"),
    ],
)
def test_invalid_clippings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plain_trainer(clipping=ClippingConfig(**changes))


def test_unsuitable_clippings_are_refused_or_warned_of():
    with pytest.raises(TypeError, match="must be a ClippingConfig, got 'quan"):
        plain_trainer(clipping="quantile")
    mean = "normalizer must be about the mean number of clip units a step, 5"
    with pytest.raises(ValueError, match=mean):
        plain_trainer(clipping=CLIPPING, normalizer=100.0)
    with pytest.warns(UserWarning, match="count_noise=50.*deviation of 10"):
        plain_trainer(clipping=ClippingConfig(count_noise=50.0))


def test_clippings_in_configs(tmp_path):
    path, norm = tmp_path / "run.toml", "l2_clip_norm = 0.1\n"

    def read(table, text=TINY):
        path.write_text(f"{text}\n[clipping]\n{table}\n", encoding="utf-8")
        return read_config(path)

    config = read("quantile = 0.3\nmaximum = 2.0")
    assert config.clipping == ClippingConfig(quantile=0.3, maximum=2.0)
    assert TrainingConfig.from_dict(config.to_dict()).clipping == config.clipping
    assert read('kind = "normalize"', TINY.replace(norm, "")).l2_clip_norm == 1.0
    statistics = (ROOT / "configs" / "glyphs_plda.toml").read_text(encoding="utf-8")
    for table, text, message in [
        ("quantil = 0.3", TINY, "did you mean 'quantile'"),
        ("maximum = 0.01", TINY, r"norm must lie in \[0.0001, 0.01\].*got 0.1"),
        ("rate = 0.1", TINY.replace(norm, ""), "l2_clip_norm must be given"),
        ("rate = 0.1", statistics, "clipping must not be given"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(table, text)
