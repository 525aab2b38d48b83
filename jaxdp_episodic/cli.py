"""The command line: questions in files, answers as tables or JSON; training runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jax.experimental.compilation_cache import compilation_cache

from jaxdp_episodic.accounting.curve_plot import plot_curve, summary
from jaxdp_episodic.accounting.evaluation import num_cores
from jaxdp_episodic.accounting.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
)
from jaxdp_episodic.accounting.request_file import read_request
from jaxdp_episodic.accounting.step import STEP, ComposedSteps, GaussianStep
from jaxdp_episodic.sampling.population import Population
from jaxdp_episodic.sampling.serialization import spec_fields
from jaxdp_episodic.sampling.spec import Spec

PROGRAM = "jaxdp-episodic"
_DIGITS = 5
_USER_ERROR, _INTERRUPTED = 2, 130
_USER_ERRORS = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    MemoryError,
    ImportError,  # an extra that is not installed
)

_File = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.toml")]


@dataclass(frozen=True)
class Epsilon:
    """What a run costs in privacy: epsilon at a delta, or delta at an epsilon."""

    file: _File
    """The request: a step, the number of steps, and a delta or an epsilon."""
    delta: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Takes the place of the file's delta."""
    num_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Takes the place of the file's number of steps."""
    json: bool = False
    """Print JSON in place of a table."""


@dataclass(frozen=True)
class Calibrate:
    """Which noise, number of steps or rate keeps a run within a target epsilon."""

    file: _File
    """The request: as for `epsilon`, with what is sought and the target."""
    json: bool = False
    """Print JSON in place of a table."""


@dataclass(frozen=True)
class Curve:
    """Draw a run's whole privacy curve, and what an attacker could do with it."""

    file: _File
    """The request: as for `epsilon`; its delta or epsilon is not used."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")]
    """The picture, .png or .svg; its numbers go beside it, into a .json."""
    num_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Takes the place of the file's number of steps."""
    method: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Takes the place of the file's method: exact, pld or rdp."""


@dataclass(frozen=True)
class Train:
    """Train privately on episodes, and stop before the target epsilon is exceeded."""

    file: _File
    """The run: data, step, target, learner, model, optimizer."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for checkpoints, log, report and release; made if missing."""
    resume: bool = False
    """Go on with the run in DIR."""


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    Args:
      arguments: the command line without the program's name.

    Returns:
      0, or 2 after an error that the user can repair: one line on standard error.
    """
    if list(arguments) == ["--version"]:
        print(f"{PROGRAM} {_version()}")
        return 0
    try:
        command = _parse(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    if isinstance(command, Train):
        return _train(command)
    if isinstance(command, Curve):
        return _draw(command)
    return _answer(command)


def _answer(command: Epsilon | Calibrate) -> int:
    """Prints what a request asks for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            request = _request(command)
            answer = request.answer()
        except _USER_ERRORS as error:
            _complain(f"{command.file}: {_reason(error, command.file)}")
            return _USER_ERROR
    remarks = [*_messages(caught), *_remarks(request)]
    if command.json:
        print(json.dumps(_document(request, answer, remarks), allow_nan=False))
    else:
        print(_printable(_table(request, answer, remarks), keep="\n"))
    return 0


def _draw(command: Curve) -> int:
    """Draws what a request describes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            request = read_request(
                command.file,
                EpsilonRequest,
                num_steps=command.num_steps,
                method=command.method,
            )
            curve = plot_curve(
                request.step,
                command.out,
                num_steps=request.num_steps,
                method=request.method,
            )
        except _USER_ERRORS as error:
            _complain(f"{command.file}: {_reason(error, command.file)}")
            return _USER_ERROR
    first = _steps(request)[0]
    facts = summary(curve) | {
        "protected": f"one {first.privacy_unit} ({first.neighboring_relation})",
        "written": f"{command.out}, {command.out.with_suffix('.json')}",
    }
    lines = [f"{name:<23}  {value}" for name, value in facts.items()]
    lines += [f"warning: {w}" for w in [*_messages(caught), *_remarks(request)]]
    print(_printable("\n".join(lines), keep="\n"))
    return 0


def _train(command: Train) -> int:
    """Runs a training config."""
    use_all_cores()
    # Imported here: Flax costs a second that no question to the accountant should pay.
    from jaxdp_episodic.training.config import read_config
    from jaxdp_episodic.training.run import run_training
    from jaxdp_episodic.training.run_folder import files_of_a_run

    try:
        result = run_training(
            read_config(command.file),
            command.out,
            resume=command.resume,
            title=command.file.stem,
            base=command.file.parent,
        )
    except _USER_ERRORS as error:
        _complain(f"{command.file}: {_reason(error, command.file)}")
        return _USER_ERROR
    except KeyboardInterrupt:
        how = f"go on with --resume --out {command.out}"
        if not files_of_a_run(command.out):
            how = "nothing was trained yet, start again"
        _complain(f"interrupted; {how}")
        return _INTERRUPTED
    print(result)
    return 0


def use_all_cores() -> None:
    """Makes JAX see one CPU device a core, before it starts; for our own process.

    Episodes are spread over devices, and XLA's own threads gain them almost nothing.
    Whoever has set the number of devices in ``XLA_FLAGS`` keeps it.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={num_cores()}".strip()


def keep_compiled_kernels() -> None:
    """Makes this process keep compiled kernels on disk, so the next starts faster.

    For a process of our own, never for a caller's. Whoever has set JAX's cache, by
    ``JAX_COMPILATION_CACHE_DIR`` or by switching it off, keeps that setting; a folder
    that cannot be written is left alone.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: nobody's home
        base = Path(home) if home else Path("~/.cache").expanduser()
        folder = base / PROGRAM / f"jax-{jax.__version__}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            compilation_cache.set_cache_dir(str(folder))


def _parse(arguments: Sequence[str]) -> Epsilon | Calibrate | Curve | Train:
    """The command that the arguments name; a usage error is made one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                Epsilon | Calibrate | Curve | Train,  # pyright: ignore[reportArgumentType]: a union is fine
                prog=PROGRAM,
                description=(
                    "Privacy accounting for episodic training, and training itself. "
                    "Examples of files are in configs/; --version prints the version."
                ),
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if end.code:
            # A box: a title, the message, a rule, hints.
            lines = [
                re.sub("[│╭╮╰╯]", " ", line) for line in errors.getvalue().split("\n")
            ]
            message = " ".join(lines[1:]).split("───")[0]
            _complain(f"{' '.join(message.split())} (see {PROGRAM} --help)")
            raise SystemExit(_USER_ERROR) from None
        raise


def _messages(caught: list[warnings.WarningMessage]) -> list[str]:
    """What the library warned of; JAX's own (a damaged cache entry) concern nobody."""
    home = Path(jax.__file__).parent
    ours = [w for w in caught if not Path(w.filename).is_relative_to(home)]
    return list(dict.fromkeys(str(w.message) for w in ours))


def _version() -> str:
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"


def _complain(message: str) -> None:
    print(f"{PROGRAM}: error: {_printable(message)}", file=sys.stderr)


def _printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped: names may come from a stranger."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def _reason(error: BaseException, file: Path) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        other = error.filename and Path(error.filename) != file
        return error.strerror + (f": {error.filename}" if other else "")
    if isinstance(error, MemoryError):
        return f"the grid does not fit into memory: {error}"
    return " ".join(str(error).split()) or type(error).__name__


def _request(command: Epsilon | Calibrate) -> Request:
    if isinstance(command, Calibrate):
        return read_request(command.file, CalibrationRequest)
    return read_request(
        command.file, EpsilonRequest, delta=command.delta, num_steps=command.num_steps
    )


def _steps(request: Request) -> tuple[GaussianStep, ...]:
    step = request.step
    return step.steps if isinstance(step, ComposedSteps) else (step,)


def _remarks(request: Request) -> list[str]:
    """What the answer does not show by itself."""
    remarks = []
    for step in _steps(request):
        levels = zip(step.level_names_used, step.path_rates.clipped, strict=True)
        remarks += [
            f"level {level!r}: more are asked for than there are, so all of them are "
            "drawn (rate 1)"
            for level, clipped in levels
            if np.any(clipped)
        ]
    return list(dict.fromkeys(remarks))


def _document(request: Request, answer: Any, remarks: list[str]) -> dict[str, Any]:
    """The answer for a program: arrays as nested lists, infinity as "inf"."""
    first = _steps(request)[0]
    names = ("calibrate", "level", "num_steps", "delta", "epsilon")
    asked = {name: _plain(getattr(request, name, None)) for name in names}
    return {
        "version": 1,
        **{name: value for name, value in asked.items() if value is not None},
        request.quantity: _plain(answer),
        "shape": list(request.shape),
        "method": request.method,
        "privacy_unit": first.privacy_unit,
        "clip_unit": list(dict.fromkeys(step.clip_unit for step in _steps(request))),
        "neighboring_relation": first.neighboring_relation,
        "warnings": remarks,
    }


def _plain(value: Any) -> Any:
    """Numbers that JSON can hold."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return str(value) if value in (float("inf"), float("-inf")) else value


def _table(request: Request, answer: Any, remarks: list[str]) -> str:
    """The answer for a person."""
    varying = {k: v for k, v in _numbers(request) if np.size(v) != 1}
    varying.pop(request.quantity, None)  # of the step, replaced by the answer
    lines = list(_facts(request, answer if np.ndim(answer) == 0 else None))
    if np.ndim(answer):
        lines += ["", *_grid(request, answer, varying)]
    lines += [f"warning: {remark}" for remark in remarks]
    return "\n".join(lines)


def _facts(request: Request, answer: Any) -> list[str]:
    """One line a fact, the answer first unless it is a grid."""
    first = _steps(request)[0]
    clipped = dict.fromkeys(str(step.clip_unit) for step in _steps(request))
    facts = {}
    if answer is not None:
        facts[_label(request)] = f"{_rounded(request, answer)}   ({_nature(request)})"
    for name in ("epsilon", "delta", "num_steps"):
        value = getattr(request, name)
        if value is not None and np.ndim(value) == 0:
            target = " (target)" if isinstance(request, CalibrationRequest) else ""
            facts[name.replace("_", " ")] = _shown(value) + target * (name == "epsilon")
    if isinstance(request.step, ComposedSteps):
        counts = request.step.counts
        facts["num steps"] = " + ".join(str(np.asarray(c).tolist()) for c in counts)
    if len(_steps(request)) == 1 and request.quantity != "noise_multiplier":
        noise = first.noise_multiplier
        facts |= {"noise multiplier": f"{noise:g}"} if np.ndim(noise) == 0 else {}
    facts["protected"] = f"one {first.privacy_unit} ({first.neighboring_relation})"
    units = ["the whole step" if c == STEP else f"each {c}" for c in clipped]
    facts["clipped"] = ", then ".join(units)
    facts["method"] = request.method
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def _grid(request: Request, answer: np.ndarray, varying: dict[str, Any]) -> list[str]:
    """One row a setting: the fields that vary, then the answer."""
    columns = {
        name: [
            _shown(v) for v in np.broadcast_to(values, answer.shape).ravel().tolist()
        ]
        for name, values in varying.items()
    }
    columns[_label(request)] = [_rounded(request, v) for v in answer.ravel().tolist()]
    widths = [max(map(len, [name, *cells])) for name, cells in columns.items()]
    rows = [tuple(columns), tuple("-" * w for w in widths)]
    rows += zip(*columns.values(), strict=True)
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _numbers(value: Any, name: str = "", place: str = "") -> list[tuple[str, Any]]:
    """All numeric fields of a request, named as in its file: "school.size"."""
    if isinstance(value, Population) or value is None or isinstance(value, str | bool):
        return []
    if isinstance(value, Spec):
        level = getattr(value, "name", None)
        place += f"{level}." if level else f"{name}." if name.endswith("]") else ""
        parts = [_numbers(getattr(value, n), n, place) for n in spec_fields(value)]
    elif isinstance(value, tuple):
        parts = [_numbers(v, f"{name}[{i}]", place) for i, v in enumerate(value)]
    else:
        return [(place + name, value)]
    return [found for part in parts for found in part]


def _label(request: Request) -> str:
    if isinstance(request, CalibrationRequest) and request.level is not None:
        return f"rate of {request.level}"
    return request.quantity.replace("_", " ")


def _nature(request: Request) -> str:
    """Which side of the truth the answer is on."""
    if isinstance(request, EpsilonRequest):
        return "upper bound"
    smallest = request.quantity == "noise_multiplier"
    return "smallest that meets the target" if smallest else "largest within the target"


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _rounded(request: Request, value: float) -> str:
    """A few digits of the answer, rounded to the private side."""
    if isinstance(value, int | np.integer) or not np.isfinite(value):
        return f"{value:,}"
    down = isinstance(request, CalibrationRequest) and request.quantity == "rate"
    rounding = ROUND_FLOOR if down else ROUND_CEILING
    digits = Context(prec=_DIGITS, rounding=rounding).create_decimal(float(value))
    return f"{digits:g}" if digits else "0"


if __name__ == "__main__":
    main()
