"""Files of requests: three formats, malformed lines, complete or untouched answers."""

import csv
import json
import math

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.cli.program import run
from jaxdp_episodic.tools.requests import batch
from jaxdp_episodic.tools.requests.batch import answer_file
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request

NOISES = (1.0, 2.0, -1.0, 0.0)
COLUMNS = {
    "id": lambda noise: f"n{noise}",
    "step.type": lambda noise: "GaussianStep",
    "step.noise_multiplier": lambda noise: noise,
    "step.clip_unit": lambda noise: "user",
    "step.sampling.type": lambda noise: "MultistageSampling",
    "step.sampling.levels.0.type": lambda noise: "Poisson",
    "step.sampling.levels.0.name": lambda noise: "user",
    "step.sampling.levels.0.sampling_probability": lambda noise: 0.1,
    "num_steps": lambda noise: 100,
    "delta": lambda noise: 1e-5,
    "epsilon": lambda noise: None,
}


def nested(noise):
    level = {"type": "Poisson", "name": "user", "sampling_probability": 0.1}
    sampling = {"type": "MultistageSampling", "levels": [level]}
    step = {"type": "GaussianStep", "noise_multiplier": noise, "clip_unit": "user"}
    return {
        "id": f"n{noise}",
        "step": {**step, "sampling": sampling},
        "num_steps": 100,
        "delta": 1e-5,
    }


def write(path):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(nested(n)) + "\n" for n in NOISES))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for noise in NOISES:
                cells = [make(noise) for make in COLUMNS.values()]
                rows.writerow(["" if cell is None else cell for cell in cells])
    else:
        columns = {k: [make(n) for n in NOISES] for k, make in COLUMNS.items()}
        columns["epsilon"] = arrow.array(columns["epsilon"], arrow.float64())
        parquet.write_table(arrow.table(columns), path)


def read(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [
                {k: v or None for k, v in row.items()} for row in csv.DictReader(file)
            ]
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("into", [".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_answers(tmp_path, kind, into):
    source, out = tmp_path / f"requests{kind}", tmp_path / f"answers{into}"
    write(source)
    result = answer_file(source, out)
    assert (result.num_rows, result.num_errors) == (4, 1)
    assert "row 3: " in result.first_error and "got -1" in result.first_error
    rows = read(out)
    assert [int(row["row"]) for row in rows] == [1, 2, 3, 4]
    assert [row["id"] for row in rows] == ["n1.0", "n2.0", "n-1.0", "n0.0"]
    assert float(rows[0]["value"]) > float(rows[1]["value"]) > 0
    assert rows[2]["value"] is None and "noise_multiplier" in rows[2]["error"]
    assert float(rows[3]["value"]) == math.inf
    assert {row["method"] for row in rows} == {"rdp", None}
    assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]


def test_malformed_lines_are_named(tmp_path):
    source, out = tmp_path / "r.jsonl", tmp_path / "a.jsonl"
    good = json.dumps(nested(1.0)).encode()
    lines = [b'{"a": ', good, b"\xff", b"[1]", b"", b'{"id": 1, "id": 2}', b"[" * 10**5]
    source.write_bytes(b"\n".join([*lines, good]))
    result = answer_file(source, out)
    rows = read(out)
    assert result.num_rows == 7 and result.num_errors == 5
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 6, 7, 8]
    words = ["line 1: not valid JSON", "line 3: not UTF-8", "line 4: must be an object"]
    words += ["line 6: not valid JSON: the key 'id'", "line 7: nested too deeply"]
    assert all(
        w in r["error"]
        for w, r in zip(words, [r for r in rows if r["error"]], strict=True)
    )
    assert rows[1]["value"] == rows[-1]["value"]


def test_malformed_csv(tmp_path):
    source, out = tmp_path / "r.csv", tmp_path / "a.csv"
    write(source)
    with source.open("ab") as file:
        file.write(b"1,2\n" + b"n\xff" + b"," * (len(COLUMNS) - 1) + b"\n")
    assert answer_file(source, out).num_errors == 3
    errors = [row["error"] for row in read(out)]
    assert "fields under" in errors[4] and "printed" in errors[5]


@pytest.mark.parametrize(
    ("names", "cells", "said"),
    [
        ("a.b,a.c.0,a.c.1", "1,x,", {"a": {"b": 1, "c": ["x"]}}),
        ("a,a.c", '"{""b"": 1}",2', {"a": {"b": 1, "c": 2}}),
        ("a.c,a", '2,"{""b"": 1}"', {"a": {"b": 1, "c": 2}}),
        ("a.1,a.3", "x,y", {"a": {"1": "x", "3": "y"}}),
        ("a.0,a.2", "x,y", {"a": ["x", None, "y"]}),
        ("a.0,a.9999", "x,y", {"a": {"0": "x", "9999": "y"}}),
        ("a,a.c", "1,2", "line 2: 'a' is both a value and a table"),
        ("a,a.b", '"{""b"": 1}",2', "line 2: 'a.b' is both a value and a table"),
        ("a", '"{""b"": 1, ""b"": 2}"', "line 2: not valid JSON: the key 'b' occurs"),
        ("a", "[" * 5000, "line 2: nested too deeply"),
        ("a", "[" * 40 + "]" * 40, "line 2: a cell: nested deeper than 32 levels"),
    ],
)
def test_columns_set_fields_of_the_request(tmp_path, names, cells, said):
    path = tmp_path / "r.csv"
    path.write_text(f"{names}\n{cells}\n")
    ((number, row, _),) = batch.read_rows(path)
    assert number == 1
    assert row == said if isinstance(said, dict) else said in str(row)


def test_rows_are_evaluated_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_ROWS_AT_ONCE", 3)
    source, out = tmp_path / "r.jsonl", tmp_path / "a.parquet"
    write(source)
    seen = []
    assert answer_file(source, out, on_rows=seen.append).num_rows == 4
    assert seen == [3, 4] and len(read(out)) == 4


@pytest.mark.parametrize(
    ("source", "out", "content", "message"),
    [
        ("r.json", "a.csv", b"", "must end in"),
        ("r.jsonl", "a.txt", b"", "must end in"),
        ("r.jsonl", "r.jsonl", b"{}", "must not be the file of requests"),
        ("r.csv", "a.csv", b"", "no columns"),
        ("r.csv", "a.csv", b"a,a\n", "two columns 'a'"),
        ("r.parquet", "a.csv", b"no", "must be a Parquet file"),
    ],
)
def test_a_refused_file_leaves_the_output_as_is(
    tmp_path, source, out, content, message
):
    (tmp_path / source).write_bytes(content)
    if out != source:
        (tmp_path / out).write_text("older")
    with pytest.raises(ValueError, match=message):
        answer_file(tmp_path / source, tmp_path / out)
    if out != source:
        assert (tmp_path / out).read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 2 - (out == source)


def test_missing_source_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        answer_file(tmp_path / "r.jsonl", tmp_path / "a.jsonl")
    (tmp_path / "r.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError):
        answer_file(tmp_path / "r.jsonl", tmp_path / "no" / "a.jsonl")


_UNITS = """
version = 1
delta = 1e-5
num_steps = 10
method = "rdp"

[population]
sizes = [5, 6]
levels = ["school", "pupil"]

[step]
type = "GaussianStep"
noise_multiplier = 2.0
clip_unit = "school"

[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "school", sampling_probability = 0.5 },
  { type = "WithoutReplacement", name = "pupil", size = 4 },
]
"""


def test_the_command_makes_the_folder_after_its_checks(tmp_path, capsys, monkeypatch):
    file, requests = tmp_path / "x.toml", tmp_path / "r.jsonl"
    file.write_text(_UNITS)
    requests.write_text("{}\n")
    for i, what in enumerate(([str(file), "--per-unit"], ["--batch", str(requests)])):
        out = tmp_path / f"new{i}" / "folder" / "a.csv"
        assert run(["epsilon", *what, "--out", str(out)]) == 0
        assert out.is_file()
    monkeypatch.setattr(
        "jaxdp_episodic.tools.cli.answers.unit_budgets", None
    )  # nothing was evaluated
    capsys.readouterr()
    assert run(["epsilon", str(file), "--per-unit", "--out", "a.txt"]) == 2
    assert "a.txt must end in" in capsys.readouterr().err


# --- Adaptive runs ---


TEXT = """
version = 1
delta = 1e-5

[step]
type = "AdaptiveRun"
quotas = {bold = 4, careful = 6}

[step.options.bold]
type = "GaussianStep"
noise_multiplier = 2.0
sampling = {type = "Poisson", name = "example", sampling_probability = 0.1}

[step.options.careful]
type = "GaussianStep"
noise_multiplier = 3.0
sampling = {type = "Poisson", name = "example", sampling_probability = 0.1}
"""


def asked(tmp_path, text, **changes):
    path = tmp_path / "request.toml"
    path.write_text(text)
    return read_request(path, EpsilonRequest, **changes)


def test_quotas_and_prices_in_a_file(tmp_path):
    request = asked(tmp_path, TEXT)
    options = request.step.options
    every = jde.compose((options["bold"], 4), (options["careful"], 6))
    assert request.answer() == jde.epsilon(every, delta=1e-5)
    assert request.nature == "exact, rounded up"
    prices = TEXT.replace(
        "quotas = {bold = 4, careful = 6}",
        "prices = {bold = 2, careful = 1}\nbudget = 6",
    )
    request = asked(tmp_path, prices)
    value, info = request.answer_with_info()
    assert request.nature == "certified upper bound" and info.is_certified_bound
    assert value == request.step.epsilon(delta=1e-5) and 0 < info.error < 1e-3


def test_questions_about_planned_runs_refuse_adaptive_ones(tmp_path):
    with pytest.raises(ValueError, match="num_steps must be left out"):
        asked(tmp_path, TEXT, num_steps=3)
    with pytest.raises(ValueError, match="'exact' or 'pld'"):
        asked(tmp_path, TEXT, method="rdp")
    with pytest.raises(NotImplementedError, match="audit covers runs fixed in advance"):
        asked(tmp_path, TEXT).planned("audit")
    wrong = TEXT.replace("careful = 6}", "care = 6}")
    with pytest.raises(ValueError, match="options of quotas"):
        asked(tmp_path, wrong)
