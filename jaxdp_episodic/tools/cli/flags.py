"""What each command takes: one table, of which argparse reads a command line.

A heading has a command's name and its module; text follows, then a row for each option
or argument. Brackets: it may be left out; ``=`` has its default, ``...`` takes several
values. The word in capitals tells the type; words with ``|`` are the only values.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxdp_episodic import _validation

PROGRAM = "jaxdp-episodic"
_TABLE = """\
#
Privacy accounting for episodic training, and training itself. Examples of files are
in configs/; jaxdp-episodic COMMAND --help lists the options of a command.
# epsilon (answers)
Compute the privacy cost of a run: epsilon at a delta, or the reverse.
  [FILE.toml]  The request: a step, the number of steps, and a delta or an epsilon.
  [--delta FLOAT]  Delta; default: the file's.
  [--num-steps INT]  Number of steps; default: the file's.
  [--json]  Print JSON in place of a table.
  [--batch FILE]  Requests, one a row: .jsonl, .csv or .parquet; in place of FILE.toml.
  [--ledger FILE (repeat)]  A run's folder, in place of FILE.toml; repeat it for what
      several runs, or copies of one, cost together.
  [--per-unit]  Write each protected unit's own epsilon to --out.
  [--out FILE]  Where --batch and --per-unit write: .jsonl, .csv or .parquet.
  [--method NAME]  exact, rdp or pld; default: exact with --ledger, rdp with --batch.
# report (plan)
Explain what a run protects, how strongly, and under which conditions.
  FILE.toml  A request, a training config, a plan (its recommended run), or the folder
      of a run (what was charged).
# calibrate (answers)
Find the noise, number of steps or sampling rate for a target epsilon.
  FILE.toml  The request: as for `epsilon`, with what to find and the target.
  [--json]  Print JSON in place of a table.
# curve (pictures)
Draw delta against epsilon, and the success of membership attacks.
  FILE.toml  The request, as for `epsilon`; its delta or epsilon is not used.
  --out FILE.png  The picture, .png or .svg. Its numbers are written beside it as .json.
  [--num-steps INT]  Number of steps; default: the file's.
  [--method NAME]  exact, pld or rdp; default: the file's.
# explore (pictures)
Open a local page where you change a design and see its privacy cost.
  [FILE.toml]  The first design, a request as for `epsilon`; default: the README's.
  [--port INT = 0]  Port at 127.0.0.1; 0: a free one.
  [--no-browser]  Print the address and open no browser.
# sweep (pictures)
Evaluate a grid of settings into a table and a picture. If it is killed, the same
command continues.
  FILE.toml  The sweep: a request as for `epsilon`, with axes in place of numbers.
  --out DIR  Folder for the table and the picture; made if missing.
  [--shard I/N]  Evaluate part I of N (from 1), for job arrays that share DIR.
  [--collect]  Only join the parts of job arrays into the table.
  [--engine local|ray = local]  Evaluate on this machine, or on Ray workers.
  [--ray-address ADDRESS = local]  Ray cluster; "auto": one running here; "local": new.
  [--ray-cpus FLOAT = 1.0]  CPUs for each task on Ray.
  [--ray-gpus FLOAT = 0.0]  GPUs for each task on Ray.
  [--ray-retries INT = 5]  Restarts of a task whose worker was lost.
# plot (pictures)
Draw a finished sweep: contour lines, a heat map, lines, or a Pareto front.
  DIR  The folder that `sweep` made.
  [--kind contours|heatmap|lines|pareto]  Default: the one that suits the axes.
  [--x FIELD]  The axis of the sweep that runs across.
  [--y FIELD]  The axis that runs upwards, or the answer of a Pareto front.
  [--value FIELD]  The quantity to draw, if the sweep has several.
  [--by FIELD]  The axis of which some values get a line or a panel each.
  [--fix FIELD=VALUE ...]  Fixed values of the other axes; default: the middle ones.
  [--levels NUMBER ...]  Levels of the contour lines; default: round numbers.
  [--mark FIELD=VALUE ...]  Draw a star on a map at this x and y, in this panel.
  [--out FILE]  The pictures, FILE.png and FILE.svg; default: DIR/KIND.
# plan (plan)
Search designs within a privacy and a compute budget; write the best config.
  FILE.toml  The plan: data or sizes, the target, the episodes, how much to compute.
  --out DIR  Folder for the table, the picture and the config; made if missing.
# data (data)
Import data into a folder that training reads from disk, or check one.
# data import (data)
Write images or columns into a folder that training reads from disk.

An import that fails leaves no folder. In the config, give `type = "Stored"` and
`path = "FOLDER"` in the table [data].
  SOURCE  A folder of images, an .npz or a .parquet file.
  FOLDER  The folder to make.
  [--layout auto|class-folders|omniglot|mini-imagenet|npz|parquet = auto]  Layout of
      SOURCE, see docs/stored_data.md.
  [--validation SHARE|SOURCE]  Validation data: a share of the classes, or a source.
  [--test SHARE|SOURCE]  Test data, in the same way.
  [--split-salt TEXT]  Key of the hash of names that chooses a share of the classes.
  [--size INT]  Side of images; default: Omniglot 28, mini-ImageNet 84, else their own.
  [--grey]  Store one channel instead of three.
  [--alphabets]  Omniglot: keep the alphabets as the top level.
  [--owner NAME]  Who owns an example: a column, an array, a regular expression for
      file names, or "drawer" for Omniglot; default: unknown.
  [--groups NAME ...]  Parquet: columns of unit ids, top level first.
  [--features NAME ...]  Parquet: columns of numbers. Or give --images.
  [--images NAME]  Parquet: a column of image files, or of lists of numbers.
  [--shape INT ...]  Parquet: shape of an image that is a list, such as 32 32 3.
  [--target NAME]  Parquet: column of numbers to predict; default: none.
  [--public-units ID ...]  Parquet: public list of all ids of the only group.
# data check (data)
Compare every byte of a folder with the checksums of its manifest.
  FOLDER  The folder made by `data import`.
# init (plan)
Read data and write a commented config that runs without edits. Nothing is trained or
released. The config marks numbers that were counted in the data: they are private
unless they were public before.
  SOURCE  A folder with a folder of images for each class, Omniglot, mini-ImageNet, an
      .npz, .csv or .parquet file, or a folder that `data import` wrote.
  [--out FILE.toml = train.toml]  The config to write. The file must not exist yet.
  [--epsilon FLOAT = 8.0]  Target epsilon.
  [--delta FLOAT = 1e-5]  Target delta.
  [--unit NAME]  Protected: "example" (default), "class" (or column of tasks), "person".
  [--relation add_remove|zero_out]  One unit is added or removed, or one slot of a
      public number of slots is emptied or filled. Default: zero_out if a third of all
      episodes would have no empty slot.
  [--population INT]  Public bound on the examples of a class: lower for add_remove,
      upper for zero_out. Default: counted in the data, and marked as private.
  [--ways INT]  Classes per episode. Default: 5, or fewer if there are few classes.
  [--shots INT]  Labelled examples per class. Default: 1, or 4 per task.
  [--size INT]  Height and width of the images after scaling, in pixels. Default: 28.
  [--grey]  Convert images to grey. Default: if a sample of them has no colour.
  [--rotations]  Turn each class into four by rotations, which are protected together.
  [--owner NAME]  Who owns an example: the name of a column or array, or a regular
      expression with one group that is matched to file names.
  [--label NAME]  Table column with the class or task. Default: one whose values repeat.
  [--features NAME ...]  Table columns of features. Default: all other numeric ones.
  [--target NAME]  Table column with numbers to predict. Default: classes are predicted.
  [--validation FILE]  Data for validation. Default: a share of the classes of SOURCE.
  [--test FILE]  Data for the test. Default: another share of the classes of SOURCE.
  [--plan FILE]  Also write a file for `plan`, with the same data and target.
  [--tune FILE]  Also write a file for `tune`, with a search around this config.
  [--keep-duplicates]  Keep training examples that are also in held-out data; no
      stage is then chosen by these data.
# train (train)
Train on episodes with differential privacy; stop before the target epsilon is exceeded.
  FILE.toml  Training config, such as `init` writes: data, target, step, model, learner.
  --out DIR  Folder for the log, the report and the release. It is created if missing.
  [--resume]  Continue the run in DIR.
  [--book FILE_OR_URL]  Charge the run to this book before it starts (see `book`).
  [--floor FLOAT]  Part of the book's delta, if prices are mu-GDP; default: 1 %.
  [--distributed]  Train in several processes; give this to all (docs/distributed.md).
  [--coordinator HOST:PORT]  Host of process 0 and a free port on it.
  [--num-processes INT]  Number of processes.
  [--process-index INT]  Index of this process, from 0. Only process 0 writes into DIR.
# log (answers)
Print the charges of a run and its private log as JSON lines.
  DIR  The run's folder, or its file run.sqlite.
# tune (train)
Search hyperparameters privately: train a random number of runs, release the best, and
account for the choice.
  FILE.toml  A search (number of runs, run, hyperparameters), or a training config.
  --out DIR  Folder for the runs and the release. It is created if missing.
  [--resume]  Continue the search in DIR. The number of runs stays the same.
  [--book FILE_OR_URL]  Charge the search to this book before it starts (see `book`).
  [--floor FLOAT]  Part of the book's delta, if prices are mu-GDP; default: 1 %.
  [--cost-only]  Print the privacy cost of each run and of the search; train nothing.
  [--held-out-is-public]  State that held-out data are public, so that scores on them
      may choose the best run. Required for a training config.
# predict (train)
Predict the class or the value of examples with the release of a run.
  RELEASE  The folder `release` of a run or a search.
  --support PATH  Labelled examples: images in a folder for each class, or a file.
  --queries PATH ...  Examples to predict. If they have classes or values, a score is
      printed.
  [--network FILE]  The ONNX file of the run's features, if it had one.
  [--out FILE]  Write all predictions: .csv, .jsonl or .parquet.
# book (book)
Keep one privacy budget for everything that is run on a data set.
# book create (book)
Make a book: the data, who is protected, and the total budget. None can be changed.

By default any run can be charged (its mu-GDP price and a floor). With --quota or
--menu only the runs of a fixed menu can. See docs/book.md.
  FILE_OR_URL  An SQLite file to make, or the URL of a database.
  RUN.toml  A training config, for its data, privacy unit, relation, bounds of people.
  --epsilon FLOAT  Epsilon of all runs together.
  --delta FLOAT  Delta of all runs together.
  [--floors FLOAT]  The part of delta for the floors of all runs; default: a fifth.
  [--quota RUN.toml=N (repeat)]  A run of a menu (a config or a request), and how often
      it may run. Replaces mu-GDP prices.
  [--menu RUN.toml (repeat)]  As --quota, but in any mixture, each run at a price.
  [--method NAME]  Method for prices: exact (default), or pld (certified, slower).
# book charge (book)
Charge a query outside of training, before you run it.

A request (as for `epsilon`) describes it: a statistic, a validation query, or a run
by other means. Every call charges again.
  FILE_OR_URL  The book.
  FILE.toml  The query; its delta or epsilon is not used.
  [--name NAME]  Name of the entry; default: the file's name.
  [--floor FLOAT]  The query's floor, without a menu; default: 1 % of the book's delta.
# book show (book)
Show what a book guarantees, what was charged, and what is left.

The guarantee is the same from the first run to the last. For information only, it
also shows what the runs so far would cost if all had been fixed in advance.
  FILE_OR_URL  The book.
  [--plot FILE]  Draw what each run spent, into a .png or .svg.
  [--json]  Print JSON in place of a table.
# book close (book)
Close a book for good: nothing can be charged any more.
  FILE_OR_URL  The book.
# audit (audit)
Test a claimed epsilon: measure a lower bound by simulation or with canaries.
  FILE.toml  A request, as for `epsilon`, or a run, as for `train`.
  --out DIR  Folder for audit.json, audit.md and audit.png; made if missing.
  [--kind mechanism|step|gradient|input]  Simulate the mechanism (default of a request),
      repeat a step with a canary (default of a run), or train with canaries.
  [--draws INT]  Simulations, or steps, with the unit; default: 20,000, or 2,000 steps.
  [--canaries INT]  Canaries in a run (gradient, input); default: 100.
  [--num-steps INT]  Number of steps; default: the file's.
  [--delta FLOAT]  Delta; default: the file's (mechanism).
  [--privacy-unit LEVEL]  Privacy unit to audit; default: the run's.
  [--confidence FLOAT = 0.95]  Confidence of every lower bound.
  [--seed INT = 0]  Seed of the simulation, or of the choice of canaries.
"""
_SECTION = re.compile(r"^#(?: ([a-z ]+) \((\w+)\))?\n([^#]+)", re.MULTILINE)
_PATHS = ("FILE", "DIR", "PATH", "FOLDER", "SOURCE", "RELEASE", "RUN")
_TYPES: dict[str, Any] = {"FLOAT": float, "NUMBER": float, "INT": int}
_TYPES |= dict.fromkeys(_PATHS, Path)
# What is a value and no option; argparse knows none with an exponent.
_NEGATIVE = re.compile(r"-[\d.]+([eE][-+]?\d+)?$")
# Argparse's message on a value: the argument, a type, the value, and the choices.
_INVALID = re.compile(
    r"argument (\S+): invalid (\w+)(?: value)?: (.*?)(?: \(choose from (.*)\))?"
)
_WIDTH = 88  # characters of a line of a help
_LEFT = 24  # characters of its left column


class UsageError(ValueError):
    """Options that are wrong or do not go together; the message names no file."""


class Section(NamedTuple):
    """The program (its name is ""), a command, or an action of one."""

    about: str
    module: str
    rows: list[str]  # none if there are actions


SECTIONS: dict[str, Section] = {}
for _name, _module, _text in _SECTION.findall(_TABLE):
    _about, *_rows = re.split(r"\n  (?=\S)", _text.rstrip())
    SECTIONS[_name] = Section(_about, _module, _rows)


class _Layout(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions."""

    def __init__(self, **how: Any) -> None:
        layout = functools.partial(_Layout, width=_WIDTH, max_help_position=_LEFT)
        super().__init__(formatter_class=layout, allow_abbrev=False, **how)
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        if (found := _INVALID.fullmatch(message)) is not None:
            name, kind, word, choices = found.groups()
            what, hint = "a whole number" if kind == "int" else "a number", ""
            if choices:
                known = re.findall(r"[\w-]+", choices)
                what = f"one of {', '.join(known)}"
                hint = _validation.nearest(word.strip("'"), known)
            message = f"{name} must be {what}, got {word}{hint}"
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Completion(argparse.Action):
    """Prints the script of a shell, and ends."""

    def __call__(self, parser: Any, found: Any, shell: Any, option: Any = None) -> None:
        print(completion(shell))
        parser.exit()


def program() -> Parser:
    """Returns the parser of all commands and their actions."""
    first, below = Parser(prog=PROGRAM, description=SECTIONS[""].about), {}
    version = f"{PROGRAM} {sys.modules['jaxdp_episodic'].__version__}"
    how: dict[str, Any] = {"action": "version", "version": version}
    first.add_argument("--version", help="print the version", **how)
    shells = ("bash", "zsh", "tcsh")
    how = {"action": _Completion, "choices": shells, "default": argparse.SUPPRESS}
    how["help"] = "print a script that completes commands and options in this shell"
    first.add_argument("--print-completion", metavar="|".join(shells), **how)
    for name, (about, _, rows) in SECTIONS.items():
        above, _, word = name.rpartition(" ")
        line, parser = " ".join(about.partition("\n\n")[0].split()), first
        if name:
            parser = below[above].add_parser(word, help=line, description=about)
        for row in rows:
            _declare(parser, row)
        parser.set_defaults(command=name)
        if not rows:
            what = "action" if name else "command"
            how = {"title": f"{what}s", "metavar": what.upper(), "required": True}
            below[name] = parser.add_subparsers(**how)
    return first


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the name of the command, "command", and its options by their keys."""
    name, written = "", []
    for word in arguments:
        option, *value = word.split("=", 1)
        if word.startswith("--") and word != "--" and "--" not in written:
            option, known = option.replace("_", "-"), ["--help", *options_of(name)]
            if name and option not in known:
                what = f"unknown option {option!r}{_validation.nearest(option, known)}"
                Parser(prog=f"{PROGRAM} {name}").error(what)
        elif (longer := f"{name} {word}".lstrip()) in SECTIONS:
            name = longer
        written.append("=".join([option, *value]))
    found, more = program().parse_known_args(written)
    if more:
        what = f"unrecognized arguments: {' '.join(more)}"
        Parser(prog=f"{PROGRAM} {name}").error(what)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(found).items()}


def options_of(name: str) -> list[str]:
    """Returns the names of the options of a command or an action."""
    found = (re.match(r"\[?(--[\w-]+)", row) for row in SECTIONS[name].rows)
    return [option[1] for option in found if option]


def _declare(parser: Parser, row: str) -> None:
    """Adds the option or argument that a row of the table declares."""
    shown, _, about = row.partition("  ")
    named, _, default = shown.strip("[]").partition(" = ")
    name, value, mark, *_ = *named.split(" "), "", ""
    is_needed = not shown.startswith("[")
    about = " ".join(about.split()) + (f" Default: {default}." if default else "")
    more: dict[str, Any] = {"help": about.replace("%", "%%")}
    if not name.startswith("--"):
        name, value = name.partition(".")[0].lower(), name
        more["nargs"] = None if is_needed else "?"
    elif value:
        more["required"] = is_needed
    if not value:
        more["action"] = "store_true"
    else:
        kind = str if "=" in value else _TYPES.get(value.partition(".")[0], str)
        more |= {"metavar": value, "type": kind}
        more["choices"] = value.split("|") if value.islower() else None
    if mark:
        more["action"] = "append"
    if mark == "...":  # also if it is repeated
        more |= {"action": "extend", "nargs": "*"}
    if mark or default:
        more["default"] = default or []
    parser.add_argument(name, **more)


def completion(shell: str) -> str:
    """Returns a script by which a shell completes the commands and their options."""
    words = {name: " ".join(options_of(name)) for name in SECTIONS}
    for name in SECTIONS:
        above, _, word = name.rpartition(" ")
        words[above] = f"{words[above]} {word}".strip()
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
