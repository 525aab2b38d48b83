"""Runs a command, importing only its module: exit codes, printing, signals."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._kernel_cache import CACHE_VARIABLE, kernel_folder
from jaxdp_episodic.tools.cli import flags
from jaxdp_episodic.tools.cli.flags import PROGRAM, SECTIONS, UsageError

_RESEND_S = 0.05  # until a signal that was lost in a callback is sent again
_JOIN_S = 300  # until a process that nobody joins gives up: clusters start slowly
_HEARTBEAT_S = 30  # until a process that is gone is noticed
_SHUTDOWN_S = 60  # for the others to end in order
_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:.%]+\]:\d{1,5}")


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the body as Ctrl-C does, with `Terminated`."""
    # Only the first signal counts. An exception that is raised in a callback is lost,
    # so the signal is sent again. If the body swallows it, it is raised at the end.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    kinds: dict[Any, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated}
    # A process that ignores Ctrl-C or handles it in its own way keeps doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        kinds[signal.SIGINT] = KeyboardInterrupt
    received: list[type[KeyboardInterrupt]] = []
    timers: list[threading.Timer] = []

    def end(number: Any, frame: Any) -> None:
        received.append(kinds[number])
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        raise kinds[number]

    def not_raised(args: Any) -> None:
        number = next((n for n, kind in kinds.items() if kind is args.exc_type), None)
        if number is None:
            hook(args)
            return
        signal.signal(number, end)
        timers.append(threading.Timer(_RESEND_S, os.kill, (os.getpid(), number)))
        timers[-1].daemon = True
        timers[-1].start()

    before = {number: signal.signal(number, end) for number in kinds}
    # Exceptions in callbacks, which run even during imports, reach this hook alone.
    hook, sys.unraisablehook = sys.unraisablehook, not_raised
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if received:  # but the body swallowed it
        raise Terminated if Terminated in received else KeyboardInterrupt


def use_all_cores() -> None:
    """Makes JAX see one CPU device per core; has no effect once JAX has started."""
    # Episodes are spread over devices; XLA's own threads gain almost nothing.
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={cores}".strip()


@contextlib.contextmanager
def one_of_several(
    coordinator: str | None, number: int | None, index: int | None
) -> Iterator[None]:
    """Joins this process to the others of a run, by JAX's runtime, for the body."""
    given = coordinator, number, index
    if coordinator is not None and not _ADDRESS.fullmatch(coordinator):
        raise ValueError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    if number is not None and number < 1:
        raise ValueError(f"--num-processes must be at least 1, got {number}")
    if index is not None and not 0 <= index < (number or index + 1):
        raise ValueError(
            f"--process-index must be in 0 .. --num-processes - 1, got {index}"
        )
    import jax

    # If the others do not come, JAX ends this process with a message of its own.
    print(f"{PROGRAM}: waits up to {_JOIN_S} s for all processes", file=sys.stderr)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if None in given else "deactivate",
            initialization_timeout=_JOIN_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except ValueError as error:
        raise ValueError(
            "found no Slurm, Open MPI or Kubernetes cluster that provides the missing "
            "numbers; give --coordinator HOST:PORT, --num-processes N and "
            "--process-index I"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"the other processes were not found: {reason}") from None
    from jaxdp_episodic.trainer.gradient.processes import all_processes

    processes = all_processes()
    found = f"process {processes.index} of {processes.count}"
    print(f"{PROGRAM}: {found}", file=sys.stderr)
    with processes.together():
        yield
    jax.distributed.shutdown()


def end_process(code: int) -> None:
    """Ends this process at once, without waiting for threads or other processes."""
    with contextlib.suppress(OSError, AttributeError):  # no reader, or no output
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def keep_compiled_kernels() -> None:
    """Makes this process keep compiled kernels on disk, so the next starts faster."""
    folder = kernel_folder()  # None if the user has set JAX's cache, or switched it off
    if folder is not None:
        os.environ[CACHE_VARIABLE] = str(folder)  # read when JAX is imported
        if "jax" in sys.modules:
            name = "jax.experimental.compilation_cache.compilation_cache"
            importlib.import_module(name).set_cache_dir(str(folder))


# Exit codes: the last two are 128 and the signal's number, as shells have it.
USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
_MAX_MESSAGE = 2000  # characters of an error, so that it fits a screen
# It may quote an untrusted file: a long name must not hide the rest.
_LONG_WORD = re.compile("([^ ]{150})[^ ]+([^ ]{150})")
USER_ERRORS = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    MemoryError,
    ImportError,  # an extra that is not installed
)
COMPUTING = "computing (the first question of a kind compiles)"


class Options(types.SimpleNamespace):
    """The values of a command's options, which its function may set as well."""

    subject: Any  # what error messages begin with; the first argument, if not set
    code = 0  # exit code if it succeeds
    # Says what an interruption leaves behind; None: the caller ends the process.
    left_behind: Callable[[], str] | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Returns those of the options that were given, with their values."""
        values = {name: getattr(self, name) for name in names}
        # Also 0 and "", which are refused by name.
        return {k: v for k, v in values.items() if not (v in (None, ()) or v is False)}

    def refuse_others(
        self, kind: str, kinds_of: Mapping[str, Sequence[str]], flag: str = ""
    ) -> None:
        """Refuses options that are not for this kind of question, run or data."""
        for name in self.given(*kinds_of):
            if kind not in kinds_of[name]:
                kinds = " or ".join(kinds_of[name])
                raise UsageError(
                    f"--{name.replace('_', '-')} is for {flag}{kinds}, got {flag}{kind}"
                )


def print_error(message: str) -> None:
    """Prints an error on standard error, in one line that fits a screen."""
    message = _LONG_WORD.sub(r"\1...\2", message)
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    print(f"{PROGRAM}: error: {printable(message)}", file=sys.stderr)


def reason(error: BaseException, subject: str = "") -> str:
    """Returns an error's message in one line; ``subject`` is the command's own file."""
    if isinstance(error, OSError) and error.strerror:
        is_other = error.filename and str(error.filename) != subject
        return error.strerror + (f": {error.filename}" if is_other else "")
    if isinstance(error, MemoryError):
        return f"the grid does not fit into memory: {error}"
    return _validation.one_line(error)


@contextlib.contextmanager
def waiting(what: str = COMPUTING) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done, and for how long."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    # Imported late, as many commands never show it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text, console = TextColumn("{task.description}", markup=False), Console(stderr=True)
    with Progress(
        *(SpinnerColumn(), text, TimeElapsedColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def printable(text: str, keep: str = "") -> str:
    """Returns the text with control characters escaped: names may be untrusted."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Returns rows as lines; all but the first ``left`` columns are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def facts(
    rows: dict[str, str] | Sequence[tuple[str, str]], width: int = 0
) -> list[str]:
    """Returns one line per name and text, the names padded to ``width``."""
    pairs = list(rows.items()) if isinstance(rows, dict) else rows
    width = width or max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}" for name, text in pairs]


# Commands whose outcome has the library's warnings already.
_PRINT_WARNINGS_THEMSELVES = ("sweep", "train", "tune", "book")

Work = Callable[[Options], list[str]]


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()
        if code in (INTERRUPTED, TERMINATED):
            end_process(code)  # one more Ctrl-C would disturb an ordinary exit
    except KeyboardInterrupt as end:
        # XLA's threads continue to compile. An ordinary exit beside them ends in a
        # segmentation fault.
        ended = isinstance(end, Terminated)
        end_process(TERMINATED if ended else INTERRUPTED)
    except OSError as error:
        # The reader of a pipe, such as `head`, has left, or the disk is full.
        if not isinstance(error, BrokenPipeError):
            print_error(f"standard output: {reason(error)}")
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line without the program's name; returns the exit code."""
    try:
        name, work, o = parsed(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    code = _done(name, work, o)
    # The other processes of a run must not wait for this one.
    if code and vars(o).get("distributed"):
        end_process(code)
    return code


def _done(name: str, work: Work, o: Options) -> int:
    """Does the work and prints the outcome; returns the exit code."""
    unchanged = contextlib.nullcontext([])
    # Ctrl-C is the usual end of `explore`.
    signals = unchanged if name == "explore" else ended_by_sigterm()
    prints = name.partition(" ")[0] in _PRINT_WARNINGS_THEMSELVES
    try:
        with signals, unchanged if prints else _validation.recorded_warnings() as texts:
            lines = work(o)
    except USER_ERRORS as error:
        subject = "" if isinstance(error, UsageError) else str(o.subject)
        text = reason(error, subject)
        print_error(text if text.startswith(subject) else f"{subject}: {text}")
        return USER_ERROR
    except KeyboardInterrupt as end:
        if o.left_behind is None:
            raise
        is_terminated, left = isinstance(end, Terminated), o.left_behind()
        print_error(f"{'terminated' if is_terminated else 'interrupted'}{left}")
        return TERMINATED if is_terminated else INTERRUPTED
    if lines := [*lines, *(f"warning: {text}" for text in texts)]:
        print(printable("\n".join(lines), keep="\n"))
    return o.code


def parsed(arguments: Sequence[str]) -> tuple[str, Work, Options]:
    """Returns the command's name, its function, and options; may raise SystemExit."""
    try:
        options = flags.read(arguments)
    except UsageError as error:
        print_error(str(error))
        raise SystemExit(USER_ERROR) from None
    name = options.pop("command")
    home = f"jaxdp_episodic.tools.cli.{SECTIONS[name].module}"
    work = getattr(importlib.import_module(home), f"do_{name.split()[-1]}")
    first = next(iter(options.values()))
    return name, work, Options(subject=first, **options)
