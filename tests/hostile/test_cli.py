"""Every command, every hostile file: exit code 2, one line, nothing else."""

import json

import numpy as np
import pytest

from fuzzing import seeds
from jaxdp_episodic.tools.cli.command import run

VALID = {
    "epsilon": seeds.REQUEST,
    "calibrate": seeds.CALIBRATION,
    "curve": seeds.REQUEST,
    "sweep": seeds.SWEEP,
    "plan": seeds.PLAN,
    "train": seeds.TRAINING,
    "tune": seeds.SEARCH,
}
OUT = dict.fromkeys(("sweep", "plan", "train", "tune"), "{}/out") | {
    "curve": "{}/x.png"
}
FILES = {
    "nul": b"\0" * 100,
    "not UTF-8": b"\xff\xfe\0",
    "arrays": b"a = " + b"[" * 10**6,
    "keys": b"a." * 10**6 + b"a = 1",
    "digits": b"version = " + b"9" * 5000,
    "one line": b"x" * 2**20,
    "key of escapes": b'"\\u001b[2J\\n\\u202e" = 1\n',
}


def refused(arguments, capsys):
    """Runs a command that must refuse its input."""
    code = run([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
    assert printed.err.startswith("jaxdp-episodic: error: ")
    assert "Traceback" not in printed.err
    assert len(printed.err) < 2100
    assert printed.err[:-1].isprintable()
    return printed.err


def refused_toml(folder, capsys, command, content):
    """Gives a command a hostile file; nothing else is written."""
    path = folder / "x.toml"
    path.write_bytes(content)
    out = ["--out", OUT[command].format(folder)] if command in OUT else []
    refused([command, path, *out], capsys)
    assert [file.name for file in folder.iterdir()] == ["x.toml"]


# Commands share their readers: each gets a third of the files.
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for i, command in enumerate(VALID)
        for j, name in enumerate(FILES)
        if (i + j) % 3 == 0
    ],
)
def test_broken_toml(tmp_path, capsys, command, name):
    refused_toml(tmp_path, capsys, command, FILES[name])


NUMBERS = "-1 nan [true] 'x' {} 1979-05-27 99999999999999999999 [[1],[[2]]]".split()
FIELDS = (
    ("epsilon", b"num_steps = 100"),
    ("epsilon", b"noise_multiplier = 1.5"),
    ("epsilon", b"sampling_probability = 0.1"),
    ("epsilon", b"sizes = [12, 30, 7]"),
    ("calibrate", b"epsilon = 2.0"),
    ("sweep", b"geomspace = [0.5, 8.0, 5]"),
    ("sweep", b"num_steps = 1_000"),
    ("plan", b"episodes_per_step = 2"),
    ("plan", b"alignment = 0.3"),
    ("train", b"num_steps = 300"),
    ("train", b"channels = [8, 8]"),
    ("tune", b"expected_runs = 4.0"),
    ("tune", b"low = 1e-3"),
)


# Fields share their checks: each gets one of the values.
@pytest.mark.parametrize(
    ("command", "field", "value"),
    [(*field, NUMBERS[i % len(NUMBERS)]) for i, field in enumerate(FIELDS)],
)
def test_wrong_values(tmp_path, capsys, command, field, value):
    assert field in VALID[command]
    wrong = field.split(b" = ")[0] + b" = " + value.encode()
    refused_toml(tmp_path, capsys, command, VALID[command].replace(field, wrong, 1))


def test_hostile_data_of_a_run(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", features=np.array([{}], dtype=object))
    (tmp_path / "y.csv").write_bytes(b"school,pupil\n\xff,1\n")
    (tmp_path / "folder").mkdir()
    for data in (
        b'type = "Npz"\npath = "x.npz"',
        b'type = "Npz"\npath = "missing.npz"',
        b'type = "Npz"\npath = "\\u0000"',
        b'type = "Table"\npath = "y.csv"\ngroups = ["school"]\nfeatures = ["pupil"]',
        b'type = "ClassFolders"\npath = "folder"',
        b'type = "Sinusoids"\nnum_tasks = 100_000_000_000\npoints = 10',
    ):
        path = tmp_path / "x.toml"
        path.write_bytes(seeds.TRAINING.replace(b'type = "Glyphs"\nsize = 14', data))
        refused(["train", path, "--out", tmp_path / "out"], capsys)
    assert not (tmp_path / "out").exists()


def test_batches(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    for name, content in {
        "x.csv": b"",
        "y.csv": b"a,a\n1,2\n",
        "z.csv": b"a." * 9999 + b"a\n1\n",
        "x.parquet": b"PAR1 nonsense PAR1",
        "x.txt": b"{}",
    }.items():
        (tmp_path / name).write_bytes(content)
        out = tmp_path / "out.jsonl"
        refused(["epsilon", "--batch", tmp_path / name, "--out", out], capsys)
        assert not out.exists()


def test_rows_of_a_batch_are_refused_one_by_one(tmp_path, capsys):
    row = json.dumps(seeds.ROW)
    lines = [
        "[" * 10**6,
        row.replace("[12, 30, 7]", "[" * 900 + "1" + "]" * 900),
        row.replace("[12, 30, 7]", "[" + "9" * 400 + "]"),
        row.replace("100", "NaN"),
        row.replace('"delta"', '"num_steps": 3, "delta"'),
        '{"population": {"file": "/etc/passwd", "levels": ["a"]}}',
        "\0",
        '"\\ud800"',
    ]
    source, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines, row]) + "\n")
    assert run(["epsilon", "--batch", str(source), "--out", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [a["error"] is None for a in answers] == [False] * len(lines) + [True]
    for answer in answers[:-1]:
        assert answer["value"] is None
        assert len(answer["error"]) < 500
    capsys.readouterr()


def test_units_that_cannot_be_listed(tmp_path, capsys):
    path, out = tmp_path / "x.toml", tmp_path / "out.jsonl"
    path.write_bytes(seeds.REQUEST.replace(b"[12, 30, 7]", b"[10_000_000_000, 3]"))
    error = refused(["epsilon", path, "--per-unit", "--out", out], capsys)
    assert "at most 100,000,000 protected units" in error


def test_a_folder_without_a_sweep_is_refused(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    refused(["plot", tmp_path], capsys)
    for content in (b"", b"\xff", b"[" * 10**6, b"{}", b'{"version": 1}', b"1e999"):
        (tmp_path / "manifest.json").write_bytes(content)
        refused(["plot", tmp_path], capsys)
