"""Many requests at once: each row gets what it would get alone."""

import csv
import json
import math

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.cli.command import run
from jaxdp_episodic.tools.requests import batch
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    read_population,
    read_request,
)

POOL = jde.GroupedClasses(
    num_classes=100,
    ways=5,
    episodes=jde.Poisson("episode", sampling_probability=0.2),
    examples=jde.WithoutReplacement("example", size=4, population=20),
).to_dict()


def flat(rate=0.1, noise=2.0, **fields):
    return {
        "step": {
            "type": "GaussianStep",
            "noise_multiplier": noise,
            "sampling": {
                "type": "Poisson",
                "name": "user",
                "sampling_probability": rate,
            },
        },
        "num_steps": 100,
        "delta": 1e-5,
        **fields,
    }


def pool(noise=2.0, **fields):
    step = {"type": "GaussianStep", "noise_multiplier": noise, "sampling": POOL}
    return {"step": step, "num_steps": 50, "delta": 1e-6, **fields}


def request_of(row):
    kind = CalibrationRequest if "calibrate" in row else EpsilonRequest
    fields = {k: v for k, v in row.items() if k != "id"}
    mapping = {"version": 1, "type": kind.__name__, "method": "rdp", **fields}
    return kind.from_dict(mapping)


def alone(row):
    return float(request_of(row).answer())


def test_mixed_rows_equal_single_requests_in_order():
    rows = [
        flat(rate=rate, noise=noise, id=f"{rate} {noise}")
        for rate in (0.01, 0.1)
        for noise in (1.0, 2, 3.5)
    ]
    rows[1:1] = [pool(), pool(noise=1), pool(num_steps=7)]
    parts = {"type": "ComposedSteps", "steps": [flat()["step"]] * 2}
    for counts in ([60, 40], [50, 70]):
        rows.append({"step": parts | {"counts": counts}, "delta": 1e-5})
    apart = {"type": "DisjointParts", "names": ["a", "b"], "parts": parts["steps"]}
    rows += [{"step": apart, "num_steps": n, "delta": 1e-5} for n in (8, 9)]
    rows += [
        flat(noise=0.0),
        flat(num_steps=0),
        {**flat(), "delta": None, "epsilon": 1.0},
        {**flat(), "calibrate": "noise_multiplier", "epsilon": 2.0},
        {**flat(), "calibrate": "num_steps", "epsilon": 2.0, "num_steps": None},
    ]
    answers = batch.answer_requests(rows)
    assert [a.error for a in answers] == [None] * len(rows)
    assert [a.value for a in answers[-5:-3]] == [math.inf, 0]
    assert [a.id for a in answers] == [row.get("id") for row in rows]
    assert answers[-1].quantity == "num_steps" and answers[-3].quantity == "delta"
    for row, answer in zip(rows, answers, strict=True):
        clean = {k: v for k, v in row.items() if v is not None}
        assert answer.value == pytest.approx(alone(clean), rel=1e-9)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (flat(noise=-1), "noise_multiplier must be >= 0, got -1"),
        (flat(num_steps=2**70), "64 bits"),
        (flat(num_steps=[1, 2]), "one setting"),
        (flat(noise=True), "noise_multiplier"),
        ([1], "a row must be a table"),
        (ValueError("line 7: broken"), "line 7: broken"),
        (flat(population={"sizes": "x"}), "population"),
    ],
)
def test_a_bad_row_leaves_the_others_unchanged(row, words):
    rows = [flat(), row, pool(), flat(rate=0.2)]
    first, bad, *rest = batch.answer_requests(rows)
    assert words in bad.error and bad.value is None and bad.quantity is None
    assert [a.error for a in (first, *rest)] == [None] * 3
    assert first.value == pytest.approx(alone(flat()), rel=1e-9)


def test_many_bad_rows_among_many():
    noises = np.where(np.arange(60) % 7 == 3, -1.0, 1 + np.arange(60) / 60)
    answers = batch.answer_requests([flat(noise=float(noise)) for noise in noises])
    assert [a.error is not None for a in answers] == (noises < 0).tolist()
    good = flat(noise=noises[noises > 0])["step"]
    values = [a.value for a in answers if a.error is None]
    expected = request_of(flat() | {"step": good}).answer()
    np.testing.assert_allclose(values, expected, rtol=1e-9)


def schools_step(noise=2.0, privacy_unit="pupil"):
    sizes = jde.Population.from_sizes([25, 60, 220], level_names=("school", "pupil"))
    return jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("school", sampling_probability=0.05),
            jde.WithoutReplacement("pupil", size=8),
        ),
        noise_multiplier=noise,
        clip_unit="school",
        privacy_unit=privacy_unit,
        population=sizes,
    )


def schools_row(noise):
    sizes = {"levels": ["school", "pupil"], "sizes": [25, 60, 220]}
    step = {**schools_step(noise).to_dict(), "population": None}
    return {"step": step, "num_steps": 100, "delta": 1e-5, "population": sizes}


def test_rows_with_a_population(tmp_path, monkeypatch):
    answers = batch.answer_requests([schools_row(noise) for noise in (1.0, 2.0)])
    noisy = schools_step(np.array([1.0, 2.0]))
    expected = jde.epsilon(noisy, num_steps=100, delta=1e-5, method="rdp")
    np.testing.assert_allclose([a.value for a in answers], expected, rtol=1e-9)
    path, columns = tmp_path / "x.npz", {"school": np.zeros(2), "other": np.zeros(99)}
    np.savez(path, **columns)  # those that are not asked for count, too
    monkeypatch.setattr("jaxdp_episodic.tools.requests.request._MAX_BYTES", 800)
    with pytest.raises(ValueError, match="at most max_bytes=800 bytes uncompressed"):
        read_population({"file": "x.npz", "levels": ["school"]}, tmp_path)


def test_each_units_own_budget(tmp_path):
    run = {"num_steps": 100, "delta": 1e-5, "method": "rdp"}
    pupils, _ = batch.unit_budgets(schools_step(), **run)
    assert list(pupils) == ["school", "pupil", "epsilon"]
    epsilons = pupils["epsilon"]
    assert epsilons.shape == (305,)
    assert np.bincount(pupils["school"]).tolist() == [25, 60, 220]
    assert epsilons.max() == pytest.approx(jde.epsilon(schools_step(), **run))
    assert epsilons[0] > epsilons[30] > epsilons[-1]
    schools, _ = batch.unit_budgets(schools_step(privacy_unit="school"), **run)
    with pytest.raises(ValueError, match="Population"):
        batch.unit_budgets(request_of(flat()).step, **run)
    assert list(schools) == ["school", "epsilon"] and len(schools["epsilon"]) == 3
    path = tmp_path / "units.csv"
    batch.write_columns(path, schools)
    lines = path.read_text().splitlines()
    assert lines[0] == "school,epsilon" and len(lines) == 4
    assert float(lines[1].split(",")[1]) == schools["epsilon"][0]


def test_unit_budgets_carry_ids_of_grouped_classes():
    ids = np.repeat(["a", "b", "c"], [3, 4, 9])
    tree = jde.Population.from_ids(**{"class": ids, "example": None})
    step = jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=3,
            ways=2,
            episodes=jde.Poisson("episode", sampling_probability=0.2),
            examples=jde.WithoutReplacement("example", size=2),
        ),
        noise_multiplier=2.0,
        population=tree,
    )
    table, _ = batch.unit_budgets(step, num_steps=10, delta=1e-5, method="rdp")
    assert table["class"].tolist() == ids.tolist()
    assert table["epsilon"].shape == (16,)


# --- Files of three formats, malformed lines, complete or untouched answers ---

NOISES = (1.0, 2.0, -1.0, 0.0)


def nested(noise):
    return {"id": f"n{noise}", **flat(noise=noise)}


# The columns of such a row; epsilon is empty.
COLUMNS = [
    *("id", "step.type", "step.noise_multiplier", "step.sampling.type"),
    *("step.sampling.name", "step.sampling.sampling_probability"),
    *("num_steps", "delta", "epsilon"),
]


def cells(noise):
    step = ("GaussianStep", noise, "Poisson", "user", 0.1)
    return [f"n{noise}", *step, 100, 1e-5, None]


def write(path):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(nested(n)) + "\n" for n in NOISES))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *map(cells, NOISES)])
    else:
        columns = dict(zip(COLUMNS, zip(*map(cells, NOISES), strict=True), strict=True))
        columns["epsilon"] = arrow.array(columns["epsilon"], arrow.float64())
        parquet.write_table(arrow.table(columns), path)


def read(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            return [{k: v or None for k, v in row.items()} for row in rows]
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize(
    ("kind", "into"), [(".jsonl", ".parquet"), (".csv", ".jsonl"), (".parquet", ".csv")]
)
def test_every_format_gives_the_same_answers(tmp_path, kind, into):
    source, out = tmp_path / f"requests{kind}", tmp_path / f"answers{into}"
    write(source)
    result = batch.answer_file(source, out)
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


def test_malformed_csv(tmp_path):
    source, out = tmp_path / "r.csv", tmp_path / "a.csv"
    write(source)
    with source.open("ab") as file:
        file.write(b"1,2\n" + b"n\xff" + b"," * (len(COLUMNS) - 1) + b"\n")
    assert batch.answer_file(source, out).num_errors == 3
    errors = [row["error"] for row in read(out)]
    assert "fields under" in errors[4] and "printed" in errors[5]


@pytest.mark.parametrize(
    ("names", "row", "said"),
    [
        ("a.b,a.c.0,a.c.1", "1,x,", {"a": {"b": 1, "c": ["x"]}}),
        ("a,a.c", '"{""b"": 1}",2', {"a": {"b": 1, "c": 2}}),
        ("a.0,a.2", "x,y", {"a": ["x", None, "y"]}),
        ("a.0,a.9999", "x,y", {"a": {"0": "x", "9999": "y"}}),
        ("a,a.b", '"{""b"": 1}",2', "line 2: 'a.b' is both a value and a table"),
        ("a", '"{""b"": 1, ""b"": 2}"', "line 2: not valid JSON: the key 'b' occurs"),
        ("a", "[" * 5000, "line 2: nested too deeply"),
        ("a", "[" * 40 + "]" * 40, "line 2: a cell: nested deeper than 32 levels"),
    ],
)
def test_columns_set_fields_of_the_request(tmp_path, names, row, said):
    path = tmp_path / "r.csv"
    path.write_text(f"{names}\n{row}\n")
    ((number, found, _),) = batch.read_rows(path)
    assert number == 1
    assert found == said if isinstance(said, dict) else said in str(found)


def test_rows_are_evaluated_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_ROWS_AT_ONCE", 3)
    source, out = tmp_path / "r.jsonl", tmp_path / "a.parquet"
    write(source)
    seen = []
    assert batch.answer_file(source, out, on_rows=seen.append).num_rows == 4
    assert seen == [3, 4] and len(read(out)) == 4


@pytest.mark.parametrize(
    ("source", "out", "content", "message"),
    [
        ("r.jsonl", "a.txt", b"", "must end in"),
        ("r.jsonl", "r.jsonl", b"{}", "must not be the file of requests"),
        ("r.csv", "a.csv", b"", "no columns"),
        ("r.parquet", "a.csv", b"no", "must be a Parquet file"),
    ],
)
def test_a_refused_file_leaves_the_output(tmp_path, source, out, content, message):
    (tmp_path / source).write_bytes(content)
    if out != source:
        (tmp_path / out).write_text("older")
    with pytest.raises(ValueError, match=message):
        batch.answer_file(tmp_path / source, tmp_path / out)
    if out != source:
        assert (tmp_path / out).read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 2 - (out == source)


def test_the_command_makes_the_folder_after_its_checks(tmp_path, capsys, monkeypatch):
    file, requests = tmp_path / "x.toml", tmp_path / "r.jsonl"
    file.write_text(to_toml({"version": 1, "method": "rdp", **schools_row(2.0)}))
    requests.write_text("{}\n")
    for i, what in enumerate(([str(file), "--per-unit"], ["--batch", str(requests)])):
        out = tmp_path / f"new{i}" / "folder" / "a.csv"
        assert run(["epsilon", *what, "--out", str(out)]) == 0
        assert out.is_file()
    monkeypatch.setattr(batch, "unit_budgets", None)  # nothing was evaluated
    capsys.readouterr()
    assert run(["epsilon", str(file), "--per-unit", "--out", "a.txt"]) == 2
    assert "a.txt must end in" in capsys.readouterr().err


# --- Adaptive runs ---


def adaptive(**limits):
    options = {"bold": flat(noise=2.0)["step"], "careful": flat(noise=3.0)["step"]}
    step = {"type": "AdaptiveRun", **limits, "options": options}
    return to_toml({"version": 1, "delta": 1e-5, "step": step})


TEXT = adaptive(quotas={"bold": 4, "careful": 6})


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
    prices = adaptive(prices={"bold": 2, "careful": 1}, budget=6)
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
    with pytest.raises(ValueError, match="options of quotas"):
        asked(tmp_path, adaptive(quotas={"bold": 4, "care": 6}))
