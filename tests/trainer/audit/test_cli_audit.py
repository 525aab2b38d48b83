import json
import re
from pathlib import Path

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.audit import game
from jaxdp_episodic.trainer.statistics import statistics
from training_runs import TINY

ROOT = Path(__file__).resolve().parents[3]

REQUEST = """
version = 1
num_steps = 2
delta = 1e-3
[step]
type = "GaussianStep"
noise_multiplier = 1.0
[step.sampling]
type = "Poisson"
name = "user"
sampling_probability = 0.3
"""

STEP = jde.GaussianStep(
    jde.Poisson("user", sampling_probability=0.3), noise_multiplier=1.0
)


@pytest.fixture
def files(tmp_path):
    """A request, and a config of a run."""
    made = {"request": tmp_path / "request.toml", "run": tmp_path / "run.toml"}
    made["request"].write_text(REQUEST)
    made["run"].write_text(TINY)
    return made


@pytest.mark.slow
def test_a_request_is_audited_and_flags_override_it(files, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    flags = {"delta": "1e-2", "num-steps": "5", "confidence": "0.9", "seed": "3"}
    command = ["audit", str(files["request"]), "--out", str(out), "--draws", "5000"]
    assert cli.run([*command, *(f"--{k}={v}" for k, v in flags.items())]) == 0
    assert "audited" in capsys.readouterr().out
    document = json.loads((out / "audit.json").read_text())
    (row,) = document["rows"]
    assert 0.2 * row["claimed_exact"] < row["audited"] < row["claimed_exact"]
    assert document["seed"] == 3 and row["delta"] == 1e-2
    assert row["evidence"]["confidence"] == 0.9
    claimed = jde.epsilon(STEP, num_steps=5, delta=1e-2)
    assert row["claimed_exact"] == pytest.approx(claimed, rel=1e-9)
    assert "| request |" in (out / "audit.md").read_text()
    assert (out / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_a_refuted_claim_has_an_exit_code(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(game, "claimed_epsilons", lambda *_, **__: [0.01])
    command = ["audit", str(files["request"]), "--out", str(tmp_path / "o")]
    assert cli.run([*command, "--draws", "2500"]) == 3
    assert "VIOLATED" in capsys.readouterr().out
    assert json.loads((tmp_path / "o" / "audit.json").read_text())["is_violated"]


STARTED = TINY.replace(
    "[step.sampling]",
    """[step]
neighboring_relation = "RELATION"
privacy_unit = "UNIT"
[start]
kind = "plda"
mean = 0.2
within = [0.3]
total = 0.5
share = 0.6
[step.sampling]""",
).replace("conv_embedding", "linear")
ALONE = (
    STARTED.replace("num_steps = 3\nl2_clip_norm = 0.1\n", "")
    .replace("share = 0.6\n", "")
    .replace('"protonet"', '"plda"')
    .replace("small = true", 'small = true\nowner = "typeface"')
)
ALONE = re.sub(r"\[model\].*(?=\[evaluation)", "", ALONE, flags=re.S)


def audited(tmp_path, config, kind, *flags, relation="zero_out", unit="example"):
    file = tmp_path / "run.toml"
    config += "[people]\nexamples = 1\nclasses = 40\n" * (unit == "person")
    file.write_text(config.replace("RELATION", relation).replace("UNIT", unit))
    command = ["audit", str(file), "--out", str(tmp_path / "o"), "--kind", kind]
    code = cli.run([*command, *flags])
    return code, json.loads((tmp_path / "o" / "audit.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", ["zero_out class", "add_remove example", "replace_one person"]
)
def test_private_statistics_are_audited_together(tmp_path, who):
    """The run's noise passes, half of it is detected."""
    given = dict(zip(("relation", "unit"), who.split(), strict=True))
    code, rows = audited(tmp_path, ALONE, "step", "--draws", "2000", **given)
    assert code == 0
    assert [row["delta"] for row in rows] == [1e-5, 1e-3, 1e-2, 1e-1]
    assert max(row["share_of_exact"] for row in rows) > 0.4
    with pytest.MonkeyPatch.context() as patch:
        half = statistics.contribution_norm
        patch.setattr(statistics, "contribution_norm", lambda step: half(step) / 2)
        code, rows = audited(tmp_path, ALONE, "step", "--draws", "2000", **given)
    assert code == 3


FEW = "--canaries", "5"
RARE = TINY.replace("sampling_probability = 0.5", "sampling_probability = 0.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "flags", "number", "relation", "unit"),
    [
        (TINY, "gradient", (*FEW, "--privacy-unit", "class"), 1, "", ""),
        (RARE, "input", (*FEW, "--num-steps", "2"), 1, "", ""),
        (TINY, "step", ("--draws", "100"), 4, "", ""),
        (STARTED, "step", ("--draws", "100"), 8, "add_remove", "class"),
        (STARTED, "gradient", FEW, 1, "zero_out", "example"),
        (ALONE, "input", FEW, 1, "add_remove", "class"),
    ],
)
def test_runs_are_audited(tmp_path, config, kind, flags, number, relation, unit):
    """Also with empty draws, and those that begin with statistics or have no others."""
    code, rows = audited(tmp_path, config, kind, *flags, relation=relation, unit=unit)
    assert code == 0 and len(rows) == number
    if kind != "step" and relation:
        assert 7.9 < rows[0]["claimed_exact"] <= 8.0


@pytest.mark.slow
def test_a_run_of_statistics_alone_cannot_be_audited_by_gradients(tmp_path, capsys):
    with pytest.raises(FileNotFoundError):  # nothing is written
        audited(tmp_path, ALONE, "gradient")
    assert "no gradients" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("which", "flags", "complaint"),
    [
        ("request", ["--draws", "7"], "--draws"),
        ("request", ["--privacy-unit", "user"], "--privacy-unit"),
        ("request", ["--canaries", "9"], "--canaries is for --kind gradient or input"),
        ("request", ["--seed", "-1"], "--seed must be"),
        ("request", ["--kind", "gradient"], "config"),
        ("run", ["--kind", "step", "--num-steps", "3"], "--num-steps"),
        ("run", ["--kind", "gradient", "--draws", "3"], "--draws"),
        ("run", ["--kind", "gradient", "--canaries", "1000"], "canaries"),
        ("run", ["--kind", "loud"], "kind"),
    ],
)
def test_errors_are_one_line(which, flags, complaint, files, tmp_path, capsys):
    command = ["audit", str(files[which]), "--out", str(tmp_path / "o")]
    assert cli.run([*command, *flags]) == 2
    (line,) = (s for s in capsys.readouterr().err.splitlines() if "error:" in s)
    assert complaint in line
