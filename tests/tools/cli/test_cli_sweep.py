"""The commands that evaluate and draw sweeps."""


import pytest

from jaxdp_episodic.files import atomic
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.sweep.run import SHARDS
from sweep_runs import REQUEST, SMALL

pytest.importorskip("matplotlib").use("Agg")


@pytest.fixture
def call(tmp_path, capsys):
    """Runs ``sweep`` on this content; returns (code, stdout, stderr) and the folder."""

    def run(content, *options):
        path = tmp_path / "sweep.toml"
        path.write_text(content)
        code = cli.run(["sweep", str(path), "--out", str(tmp_path / "out"), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run, tmp_path / "out"


def test_sweep_writes_a_table_and_plot_draws_it(call, capsys):
    run, out = call
    code, text, _ = run(SMALL)
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert facts["settings"] == "520 in 2 chunks"
    assert facts["evaluated"].startswith("520 in ")
    assert "table.parquet" in facts["table"] and "contours.svg" in facts["picture"]
    assert sorted(file.name for file in out.iterdir()) == [
        "contours.png",
        "contours.svg",
        "manifest.json",
        "table.parquet",
    ]
    assert "all were there" in run(SMALL)[1]
    code = cli.run(["plot", str(out), "--kind", "lines", "--fix", "noise_multiplier=6"])
    assert code == 0
    assert capsys.readouterr().out.split(", ")[0].endswith("lines.png")


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (SMALL.replace("[step]", "[step"), (), "not valid TOML"),
        (
            SMALL.replace("0.9, 1.0", "1.5"),
            (),
            "axis 'example.sampling_probability'",
        ),
        (SMALL, ("--shard", "4/3"), "--shard must be I/N with 1 <= I <= N, got"),
        (SMALL, ("--shard", "1/3", "--collect"), "so leave out --shard"),
        (SMALL, ("--engine", "ray", "--ray-gpus", "-1"), "num_gpus must be >= 0"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(call, content, options, complaint):
    run, out = call
    code, text, error = run(content, *options)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert complaint in error
    assert not (out / SHARDS).exists()


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (OSError(28, "No space left on device"), 2, "1 of 2 chunks are saved"),
        (KeyboardInterrupt(), 130, "1 of 2 chunks are saved; the same command cont"),
    ],
)
def test_a_full_disk_and_an_interruption(call, monkeypatch, failure, code, said):
    run, _ = call
    real, written = atomic.os.fsync, []

    def full(descriptor):
        written.append(descriptor)
        if len(written) > 4:  # the manifest and one shard
            raise failure
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    found, text, error = run(SMALL)
    assert (found, text) == (code, "") and said in error


def test_a_broken_picture_does_not_hide_the_table(call, monkeypatch):
    run, _ = call
    monkeypatch.setattr("jaxdp_episodic.tools.plots.pictures.matplotlib", _missing)
    code, text, _ = run(SMALL)
    assert code == 0
    assert "picture    none: pictures need matplotlib" in text


def _missing():
    raise ImportError("pictures need matplotlib")


# --- The privacy curve ---


@pytest.fixture
def draw(tmp_path, capsys):
    """Draws a request of this content; returns (code, stdout, stderr, folder)."""

    def run(content, *options, out="curve.png"):
        path = tmp_path / "request.toml"
        path.write_text(content)
        code = cli.run(["curve", str(path), "--out", str(tmp_path / out), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, tmp_path

    return run


def test_curves_that_are_refused(draw):
    request = REQUEST.replace("delta", 'method = "rdp"\ndelta')
    grid = request.replace("= 1.5", "= [1.5, 2.0]")
    for content, options, message in [
        (request, (), "--out must end in .png or .svg, got"),
        (request, ("--method", "rpd"), "did you mean 'rdp'?"),
        (grid, ("--num-steps", "3"), "of the step, and num_steps, must be a scalar"),
    ]:
        out_name = "curve.png" if options else "curve.gif"
        code, out, err, folder = draw(content, *options, out=out_name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        assert [file.name for file in folder.iterdir()] == ["request.toml"]
