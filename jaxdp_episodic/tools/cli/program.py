"""The program: it imports only the module of the command that is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.cli import command, flags
from jaxdp_episodic.tools.cli.flags import PROGRAM, SECTIONS

# Commands whose outcome has the library's warnings already.
_PRINT_WARNINGS_THEMSELVES = ("sweep", "train", "tune", "book")

Work = Callable[[command.Options], list[str]]


def main() -> None:
    """Entry point of the installed command; never returns."""
    command.keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()
        if code in (command.INTERRUPTED, command.TERMINATED):
            command.end_process(code)  # one more Ctrl-C would disturb an ordinary exit
    except KeyboardInterrupt as end:
        # XLA's threads continue to compile. An ordinary exit beside them ends in a
        # segmentation fault.
        ended = isinstance(end, command.Terminated)
        command.end_process(command.TERMINATED if ended else command.INTERRUPTED)
    except OSError as error:
        # The reader of a pipe, such as `head`, has left, or the disk is full.
        if not isinstance(error, BrokenPipeError):
            command.print_error(f"standard output: {command.reason(error)}")
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
        command.end_process(code)
    return code


def _done(name: str, work: Work, o: command.Options) -> int:
    """Does the work and prints the outcome; returns the exit code."""
    unchanged = contextlib.nullcontext([])
    # Ctrl-C is the usual end of `explore`.
    signals = unchanged if name == "explore" else command.ended_by_sigterm()
    prints = name.partition(" ")[0] in _PRINT_WARNINGS_THEMSELVES
    try:
        with signals, unchanged if prints else command.recorded_warnings() as texts:
            lines = work(o)
    except command.USER_ERRORS as error:
        subject = "" if isinstance(error, flags.UsageError) else str(o.subject)
        text = command.reason(error, subject)
        command.print_error(text if text.startswith(subject) else f"{subject}: {text}")
        return command.USER_ERROR
    except KeyboardInterrupt as end:
        if o.left_behind is None:
            raise
        is_terminated, left = isinstance(end, command.Terminated), o.left_behind()
        command.print_error(f"{'terminated' if is_terminated else 'interrupted'}{left}")
        return command.TERMINATED if is_terminated else command.INTERRUPTED
    if lines := [*lines, *(f"warning: {text}" for text in texts)]:
        print(command.printable("\n".join(lines), keep="\n"))
    return o.code


def parsed(arguments: Sequence[str]) -> tuple[str, Work, command.Options]:
    """Returns the name of the command, the function that does it, and its options.

    Raises:
      SystemExit: the help was printed (code 0), or the arguments are wrong.
    """
    name, rest = "", list(arguments)
    try:
        if rest == ["--version"]:
            _finish(f"{PROGRAM} {sys.modules['jaxdp_episodic'].__version__}")
        if rest[:1] == ["--print-completion"]:
            shell = "".join(rest[1:2])
            _check_word("shell", shell, ("bash", "zsh", "tcsh"))
            _finish(_completion(shell))
        while words := flags.below(name):
            word = rest.pop(0) if rest else ""
            if word in ("-h", "--help"):
                _finish(flags.overview(name, words).format_help())
            _check_word(f"action of {name}" if name else "command", word, words)
            name = f"{name} {word}".lstrip()
        options = flags.read(name, rest)
    except flags.UsageError as error:
        command.print_error(f"{error} (see {f'{PROGRAM} {name}'.rstrip()} --help)")
        raise SystemExit(command.USER_ERROR) from None
    home = f"jaxdp_episodic.tools.cli.{SECTIONS[name].module}"
    work = getattr(importlib.import_module(home), f"do_{name.split()[-1]}")
    first = next(iter(options.values()))
    return name, work, command.Options(subject=first, **options)


def _finish(text: str) -> None:
    print(text.rstrip())
    raise SystemExit(0)


def _check_word(what: str, word: str, known: Iterable[str]) -> None:
    """Refuses a word that is not one of the known ones."""
    if not word:
        raise flags.UsageError(f"no {what} was given")
    if word not in known:
        hint = _validation.nearest(word, known)
        raise flags.UsageError(f"unknown {what} {word!r}{hint}")


def _completion(shell: str) -> str:
    """A script by which a shell completes the commands and their options."""
    words = {n: " ".join([*flags.below(n), *flags.options_of(n)]) for n in SECTIONS}
    commands = words.pop("")
    if shell == "tcsh":
        names = (w[2:] for w in " ".join(words.values()).split() if w[:2] == "--")
        every = " ".join(sorted(set(names)))
        return f"complete {PROGRAM} 'p/1/({commands})/' 'c/--/({every})/'"
    cases = [f'"{name} "*) words="{words[name]}" ;;' for name in reversed(words)]
    lines = [
        "_jaxdp_episodic() {",
        f'  local words="{commands}"',
        '  [ "$COMP_CWORD" = 1 ] || case "${COMP_WORDS[*]:1:2} " in',
        *(f"    {case}" for case in cases),
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
        f"complete -o default -F _jaxdp_episodic {PROGRAM}",
    ]
    return "\n".join(
        ["autoload -U bashcompinit", "bashcompinit"] * (shell == "zsh") + lines
    )
