"""Pictures of sweeps: what they show, which files, what is refused."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxdp_episodic.tools.plots import figures, pictures
from jaxdp_episodic.tools.plots.figures import front_of
from jaxdp_episodic.tools.plots.pictures import SweepTable
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import SweepFolder, run_sweep
from sweep_runs import NOISE, RATE, REQUEST, axis

pytest.importorskip("matplotlib").use("Agg")

TEXT = (
    REQUEST.replace("num_steps = 300\n", "")
    .replace("delta", 'method = "rdp"\nmemory_mib = 1\ndelta')
    .replace("[step]", "epsilon = 1.0\n[step]", 1)
    + axis("num_steps", values=[10, 100, 1000])
    + axis(NOISE, geomspace=[0.8, 6.0, 12])
    + axis(RATE, geomspace=[1e-3, 1.0, 9])
)


def pretended(sweep, folder, answers):
    """A finished sweep with made-up answers: no kernel runs."""
    opened = SweepFolder.opened(folder, sweep)
    for number in range(opened.num_chunks):
        index = np.arange(*opened.range_of(number))
        value = answers(**named(sweep.grid.values(index)))
        rest = [np.zeros_like(value)] * (len(opened.columns) - 1)
        opened.save(number, np.stack([value, *rest], axis=-1))
    run_sweep(sweep, folder, engine=None)
    return folder


def named(values):
    return {name.rpartition(".")[2]: column for name, column in values.items()}


def cost(num_steps, noise_multiplier, sampling_probability, **_):
    return sampling_probability * np.sqrt(num_steps) / noise_multiplier


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished sweep, which `folder` copies."""
    made = tmp_path_factory.mktemp("finished")
    (made / "sweep.toml").write_text(TEXT.replace("epsilon = 1.0", ""))
    return pretended(read_sweep(made / "sweep.toml"), made / "out", cost)


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "out"))


def words(svg):
    """The texts of an SVG picture, which are in its comments."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_default_picture(folder):
    files = pictures.draw(folder)
    assert [file.name for file in files] == ["contours.png", "contours.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert {
        "noise multiplier (clip norms)",
        "sampling probability of each example",
        "epsilon (nats), upper bound",
        "number of steps = 10",
        "number of steps = 1,000",
        "delta = 1e-05, method = rdp",
    } <= set(words(files[1]))
    mark = {NOISE: "2.5", RATE: "0.04"}
    _, svg = pictures.draw(folder, levels=(2.5, 0.25, 0.25, 1e6), mark=mark)
    assert {"0.25", "2.5"} <= set(words(svg)) and "1,000,000" not in words(svg)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["heatmap", "contours", "lines", "pareto"])
def test_every_kind(folder, tmp_path, kind):
    fix = {} if kind == "pareto" else {"fix": {"num_steps": "1000"}}
    png, svg = pictures.draw(folder, kind=kind, out=tmp_path / f"my.{kind}.png", **fix)
    assert png.name == f"my.{kind}.png" and svg.name == f"my.{kind}.svg"
    assert "epsilon (nats), upper bound" in " ".join(words(svg))
    held = "number of steps = 1,000, delta = 1e-05, method = rdp"
    assert (held in " ".join(words(svg))) == bool(fix)


def test_the_picture_shows_the_tables_numbers(folder):
    table = SweepTable(folder)
    places, held = table.held([RATE], {NOISE: "0.8"})
    assert held == {"num_steps": 100, NOISE: pytest.approx(0.8)}
    index = table.grid.index({**places, table.grid.dimension_of(RATE): np.arange(9)})
    expected = cost(100, 0.8, np.geomspace(1e-3, 1, 9))
    np.testing.assert_allclose(table.answers[index], expected, rtol=1e-12)
    shuffled = np.array([[300, 2], [2, 7]])
    values = named(table.grid.values(shuffled.ravel()))
    np.testing.assert_allclose(table.answers[shuffled].ravel(), cost(**values))


@pytest.mark.slow
def test_zipped_axes_and_words(read, tmp_path):
    text = TEXT.replace("values = [10, 100, 1000]", 'values = [10, 100]\nzip = "a"')
    text += axis("quantity", values=["epsilon", "noise_multiplier"])
    text += axis("method", values=["rdp", "exact"], zip="a")
    # Each quantity lacks an axis that the other one depends on.
    text = text.replace(f'field = "{NOISE}"\ngeomspace', 'field = "delta"\ngeomspace')
    text = text.replace("[0.8, 6.0, 12]", "[1e-8, 1e-5, 12]")

    def answers(delta, sampling_probability, **_):
        return np.where(delta > 1e-7, sampling_probability, np.inf)

    folder = pretended(read(text), tmp_path / "out", answers)
    _, svg = pictures.draw(folder, value="noise_multiplier")
    assert "smallest noise multiplier (clip norms)" in words(svg)
    assert "grey: infinite" in words(svg)
    _, svg = pictures.draw(folder, kind="lines", x="delta", by="method")
    assert {"rdp", "exact"} <= set(words(svg))
    with pytest.raises(ValueError, match="axes that are not zipped"):
        pictures.draw(folder, x="num_steps", by="method")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"out": Path("a.gif")}, "png or .svg"),
        ({"x": "noise_multi"}, "unknown axis 'noise_multi'; did you mean"),
        ({"x": NOISE, "y": NOISE}, "different axes"),
        ({"kind": "lines", "y": NOISE}, "--y does not go with"),
        ({"kind": "pareto", "by": NOISE}, "--by has no meaning"),
        ({"kind": "pareto", "x": "epsilon"}, "must differ"),
        ({"fix": {"num_steps": "150"}}, "closest: 10 and 100"),
        ({"kind": "contours", "levels": [-1.0]}, "--levels must be > 0"),
        ({"kind": "lines", "levels": [1.0]}, "--levels is for contours"),
        ({"kind": "pareto", "mark": {NOISE: "1"}}, "--mark is for contours"),
        ({"kind": "heatmap", "mark": {NOISE: "1"}}, "--mark must give"),
        (
            {"x": NOISE, "y": RATE, "mark": {NOISE: "1", RATE: "0.1", "delta": "1"}},
            "may give 'num_steps'",
        ),
        (
            {"x": NOISE, "y": RATE, "mark": {NOISE: "1", RATE: ".1", "num_steps": "9"}},
            "--mark: 'num_steps' has no value 9",
        ),
        ({"value": "delta"}, "must be 'epsilon', as in the sweep, got 'delta'"),
    ],
)
def test_invalid_pictures_are_refused(finished, options, complaint):
    before = sorted(finished.iterdir())
    with pytest.raises(ValueError, match=complaint):
        pictures.draw(finished, **options)
    assert sorted(finished.iterdir()) == before


def test_nothing_to_draw(read, tmp_path):
    sweep = read(TEXT.replace("epsilon = 1.0", ""))
    SweepFolder.opened(tmp_path / "begun", sweep)
    with pytest.raises(ValueError, match="not finished"):
        pictures.draw(tmp_path / "begun")
    folder = pretended(
        sweep, tmp_path / "out", lambda num_steps, **_: np.full(num_steps.shape, np.inf)
    )
    for kind in ("contours", "pareto"):
        with pytest.raises(ValueError, match="finite"):
            pictures.draw(folder, kind=kind)
    assert SweepTable(folder).grid.size == 324


def test_the_picture_of_the_front():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 30, (2, 200)).astype(float)
    x[5], y[6] = np.inf, np.nan
    front = front_of(x, y)
    assert (np.diff(x[front]) > 0).all() and (np.diff(y[front]) < 0).all()
    for i in np.flatnonzero(np.isfinite(x) & np.isfinite(y)):
        assert np.any((x[front] <= x[i]) & (y[front] <= y[i]))


def test_scales_and_levels_follow_the_points():
    spaced = np.geomspace(1, 10, 5), np.array([10, 100, 300, 1000])
    even = np.linspace(1, 10, 5), np.array([0.0, 1.0, 10.0])
    assert all(map(figures.is_logarithmic, spaced))
    assert not any(map(figures.is_logarithmic, even))
    axis = figures.new_figure(2, 2).subplots().yaxis
    figures.plain_ticks(axis, *np.array([1e-300, 1e300]))  # without an overflow
    assert figures.round_levels(0.9, 12) == [1, 2, 5, 10]
    assert figures.round_levels(0.05, 290) == [0.1, 0.3, 1, 3, 10, 30, 100]
    assert figures.round_levels(2.1, 2.9) == [2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8]
