"""The command that draws the privacy curve."""

import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions import attacker
from jaxdp_episodic.tools import cli

pytest.importorskip("matplotlib").use("Agg")

REQUEST = """
version = 1
num_steps = 300
delta = 1e-5
method = "rdp"
[step]
type = "GaussianStep"
noise_multiplier = 1.5
[step.sampling]
type = "Poisson"
name = "example"
sampling_probability = 0.01
"""


@pytest.fixture
def call(tmp_path, capsys):
    """Draws a request of this content; returns (code, stdout, stderr, folder)."""

    def run(content, *options, out="curve.png"):
        path = tmp_path / "request.toml"
        path.write_text(content)
        code = cli.run(["curve", str(path), "--out", str(tmp_path / out), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, tmp_path

    return run


@pytest.mark.slow
def test_curve_writes_a_picture_and_numbers_and_prints_a_table(call):
    code, out, err, folder = call(REQUEST, "--num-steps", "20", "--method", "rdp")
    assert (code, err) == (0, "")
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "curve.json").read_text())
    drawn = jde.MultistageSampling(jde.Poisson("example", sampling_probability=0.01))
    step = jde.GaussianStep(drawn, noise_multiplier=1.5)
    run = {"num_steps": 20, "method": "rdp"}
    assert document["method"] == "rdp"
    assert document["gdp_mu"] == pytest.approx(attacker.gdp_mu(step, **run), rel=1e-9)
    assert document["advantage"] == attacker.advantage(step, **run)
    deltas = jde.delta(step, epsilon=document["epsilon"], **run)
    np.testing.assert_allclose(document["delta"]["rdp"], deltas, rtol=1e-9)
    facts = dict(line.split("  ", 1) for line in out.splitlines())
    assert "curve.png" in facts["written"]
    assert "one example (add_remove)" in facts["protected"]


def test_errors_are_one_line(call):
    for options, message in [
        ((), "--out must end in .png or .svg, got"),
        (("--method", "rpd"), "did you mean 'rdp'?"),
        (("--num-steps", "-1"), "num_steps must be a whole number >= 0"),
    ]:
        out_name = "curve.png" if options else "curve.gif"
        code, out, err, folder = call(REQUEST, *options, out=out_name)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
        assert [file.name for file in folder.iterdir()] == ["request.toml"]


def test_a_grid_is_refused(call):
    code, _, err, _ = call(REQUEST.replace("= 1.5", "= [1.5, 2.0]"))
    assert code == 2
    assert "every field of the step, and num_steps, must be a scalar" in err
