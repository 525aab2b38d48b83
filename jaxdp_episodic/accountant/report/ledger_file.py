"""The file of what a run was charged: its format, and how it is read and checked.

One JSON value a line, in UTF-8. The first line says what the file is, then each line
says what happened:

    {"format":"jaxdp-episodic ledger","version":1,"run":"…","epsilon":8.0,
        "delta":1e-05,"seeded":false,"hash":"…"}       (one line in the file;
        of steps in epochs also "planned":25, the steps fixed in advance; where the run
        is charged to a book, or one of a search, also "book":"…", "search":"…")
    {"step":{…},"hash":"…"}                what the steps that follow are
    {"opened":{…},"charged":0,"hash":"…"}  a process begins, on this machine; of what is
        opened "process" is its random name
    1                                      one such step is charged
    1
    {"charged":2,"hash":"…"}               a seal

A run that chooses on the way has, in place of the step, its whole budget, and before
each change of option a line that names it, written with its first charge at once:

    {"adaptive":{…},"hash":"…"}            second line: what the run may take
    {"option":"check","hash":"…"}          of which option the charges are that follow
    {"ended":true,"hash":"…"}              the run has chosen to end

Equal steps are grouped: the step is described once, and a charge is two bytes, appended
and on the disk before anything of the step exists. ``hash`` is the SHA-256 of all bytes
of the file before ``,"hash"``, so each line that has one holds the chain of all that
went before; between two of them nothing but lines ``1`` can stand, whose number the
second one repeats. Nothing is ever rewritten.

What a file alone cannot show is that lines are missing at its very end. A checkpoint
therefore stores a `LedgerMark`, and a ledger that does not begin with exactly what the
mark saw is refused. Neither stops somebody who rewrites both: no key protects them.

A ledger is not trusted: nothing in it is executed, and what it can make a reader keep
in memory is bounded.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from jaxdp_episodic._validation import shown
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.report.ledger_content import (
    LedgerContent,
    LedgerMark,
    Opening,
)
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.json_file import parse_json

T = TypeVar("T")
FORMAT = "jaxdp-episodic ledger"
VERSION = 1
CHARGE = b"1\n"
ADAPTIVE, OPTION, ENDED, PROCESS = "adaptive", "option", "ended", "process"
MOST_DESCRIBED = 2**26
"""Bytes of all steps and machines that are described: tens of millions of units."""

_HASH_KEY = b',"hash":"'
_HASH_END = b'"}\n'
_HASH_BYTES = len(_HASH_KEY) + 64 + len(_HASH_END)
_PLANNED, _BOOK, _SEARCH = "planned", "book", "search"
_HEADER_KEYS = {"format", "version", "run", "epsilon", "delta", "seeded"}


class LedgerError(ValueError):
    """A ledger that is damaged, cut, edited, or another run's; the message says."""


class Chain:
    """The running hash of a ledger: what its next line must contain.

    Attributes:
      num_bytes: bytes of the lines that were added.
    """

    def __init__(self) -> None:
        self._digest, self.num_bytes = hashlib.sha256(), 0

    def add(self, data: bytes) -> None:
        """Takes up whole lines."""
        self._digest.update(data)
        self.num_bytes += len(data)

    def sha256(self, more: bytes = b"") -> str:
        """Returns the hash of all that was added, and of ``more`` after it."""
        digest = self._digest.copy()
        digest.update(more)
        return digest.hexdigest()

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Returns the line of a record, with its hash, after all that was added."""
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        body = text[:-1].encode()
        return body + _HASH_KEY + self.sha256(body).encode() + _HASH_END


def header(
    run: str,
    *,
    epsilon: float,
    delta: float,
    is_seeded: bool,
    planned: int | None = None,
    book: str | None = None,
    search: str | None = None,
) -> dict[str, Any]:
    """Returns the first record of a ledger; ``planned`` of steps in epochs."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "run": run,
        "epsilon": float(epsilon) if math.isfinite(epsilon) else "inf",
        "delta": delta,
        "seeded": is_seeded,
    }
    more = {_PLANNED: planned, _BOOK: book, _SEARCH: search}
    return record | {name: value for name, value in more.items() if value is not None}


def opening(environment: Mapping[str, Any], charged: int) -> dict[str, Any]:
    """Returns the record of a process that begins, under a random name.

    By this name two copies of a run that both went on differ from there on, whatever
    else they did alike; see `read_ledgers`.
    """
    opened = {**environment, PROCESS: secrets.token_hex(16)}
    return {"opened": opened, "charged": charged}


def read_ledger(path: Path, *, checkpoint: LedgerMark | None = None) -> LedgerContent:
    """Returns what a ledger says, after checking all of it.

    A charge that a crash cut off in the middle counts; another line cut off does not.
    Time grows with the number of steps (a second for a million), memory does not.

    Args:
      path: the file.
      checkpoint: a mark that the ledger must contain.

    Raises:
      OSError: a file that cannot be read.
      LedgerError: no ledger, one of a version that is not known, or one that is
        damaged, cut, edited, rolled back or another run's.
    """
    try:
        check_plain_file(path)
    except ValueError as error:
        raise LedgerError(f"ledger {error}") from None
    with open(path, "rb") as file:
        return scan(file, path, checkpoint)[0]


def scan(
    file: IO[bytes], path: Path, checkpoint: LedgerMark | None
) -> tuple[LedgerContent, Chain]:
    """What an open ledger says, and the chain to go on with; see `read_ledger`."""
    reader = _Reader()
    number = 0
    try:
        while line := file.readline(MOST_DESCRIBED + 1):
            number += 1
            if not line.endswith(b"\n"):
                reader.take_unfinished(line)
                break
            reader.take(line)
            if checkpoint is not None:
                reader.check_mark(checkpoint)
        number = 0  # what is wrong from here on is wrong with the whole
        content = reader.content()
        if checkpoint is not None:
            reader.check_reached(checkpoint)
    except LedgerError as error:
        where = f"line {number}: " if number else ""
        raise LedgerError(f"ledger {path}: {where}{error}") from None
    except RecursionError:
        raise LedgerError(f"ledger {path}: line {number}: nested too deeply") from None
    return content, reader.chain


def has_charges(path: Path) -> bool:
    """Returns whether a ledger, damaged or not, has more than descriptions in it."""
    try:
        with open(path, "rb") as file:
            while line := file.readline(MOST_DESCRIBED + 1):
                if not line.startswith(b"{"):
                    return True
    except FileNotFoundError:
        pass
    return False


class _Reader:
    """Checks a ledger line by line."""

    def __init__(self) -> None:
        self.chain = Chain()
        self._header: dict[str, Any] | None = None
        self._groups: list[tuple[GaussianStep, int]] = []
        self._openings: list[Opening] = []
        self._charged = self._described = 0
        self._unfinished, self._cut_charges = b"", 0
        self._is_sealed = False
        self._adaptive: AdaptiveBudget | None = None
        self._options: list[str] = []
        self._has_ended = False

    def take(self, line: bytes) -> None:
        """Takes up a whole line."""
        if line == CHARGE:
            self._charge()
            self._is_sealed = False
        else:
            self._describe(self._record(line), len(line))
        self.chain.add(line)

    def take_unfinished(self, line: bytes) -> None:
        """Takes up a last line without an end."""
        self._unfinished, self._is_sealed = line, False
        if len(line) > MOST_DESCRIBED:
            raise LedgerError(f"longer than {MOST_DESCRIBED:,} bytes")
        if CHARGE.startswith(line):
            self._charge()
            self._cut_charges = 1
        elif not line.startswith(b"{") or self._header is None:
            raise LedgerError("neither a charge nor the beginning of a record")

    def check_mark(self, mark: LedgerMark) -> None:
        """Refuses another run's ledger, and one that differs before the mark."""
        assert self._header is not None  # there was a line
        if self._header["run"] != mark.run:
            raise LedgerError(
                f"it is of another run ({self._header['run']}) than the checkpoint "
                f"({mark.run})"
            )
        if self.chain.num_bytes == mark.num_bytes and (
            self.chain.sha256() != mark.sha256 or self._charged != mark.charged
        ):
            raise LedgerError(
                f"it was edited: its first {mark.num_bytes:,} bytes are not those that "
                f"the checkpoint saw, with {mark.charged:,} steps charged"
            )

    def check_reached(self, mark: LedgerMark) -> None:
        """Refuses a ledger that is shorter than the mark says."""
        if self.chain.num_bytes < mark.num_bytes:
            raise LedgerError(
                f"it was cut or rolled back: it ends with {self._charged:,} steps "
                f"charged, and when the checkpoint was made it had {mark.charged:,} "
                f"({self.chain.num_bytes:,} of {mark.num_bytes:,} bytes)"
            )

    def content(self) -> LedgerContent:
        """Returns what was read, if it is a ledger at all."""
        if self._header is None:
            raise LedgerError("empty")
        if not self._groups and self._adaptive is None:
            raise LedgerError("it was cut: no step is described")
        whole = self._charged - self._cut_charges
        return LedgerContent(
            target_epsilon=float(self._header["epsilon"]),
            delta=self._header["delta"],
            is_seeded=self._header["seeded"],
            planned=self._header.get(_PLANNED),
            book=self._header.get(_BOOK),
            search=self._header.get(_SEARCH),
            groups=tuple(self._groups),
            openings=tuple(self._openings),
            end=LedgerMark(
                self._header["run"], whole, self.chain.num_bytes, self.chain.sha256()
            ),
            unfinished=self._unfinished,
            is_sealed=self._is_sealed,
            adaptive=self._adaptive,
            options=tuple(self._options),
            has_ended=self._has_ended,
        )

    def _charge(self) -> None:
        if not self._groups:
            raise LedgerError("a charge before any step is described")
        if self._has_ended:
            raise LedgerError("a charge after the run has chosen to end")
        step, count = self._groups[-1]
        self._groups[-1] = (step, count + 1)
        self._charged += 1

    def _record(self, line: bytes) -> dict[str, Any]:
        """The record in a line, its hash checked and taken out."""
        body, end = line[:-_HASH_BYTES], line[-_HASH_BYTES:]
        if not line.startswith(b"{") or not end.startswith(_HASH_KEY):
            raise LedgerError("neither a charge nor a record with a hash")
        if end != _HASH_KEY + self.chain.sha256(body).encode() + _HASH_END:
            raise LedgerError(
                "its hash is not that of what stands before it: it or an earlier line "
                "was edited, added or taken away"
            )
        try:
            return parse_json(body + b"}", allow_infinity=False)
        except ValueError as error:
            raise LedgerError(str(error)) from None

    def _describe(self, record: dict[str, Any], size: int) -> None:
        """Takes up a record that was this long a line."""
        self._is_sealed = False
        if self._header is None:
            self._header = _checked_header(record)
        elif record.keys() == {ADAPTIVE} and not self._described:
            self._keep(size)
            self._adaptive = _or_refused(AdaptiveBudget.from_dict, record[ADAPTIVE])
        elif record.keys() == {OPTION} and self._adaptive is not None:
            self._keep(size)
            name = record[OPTION]
            self._groups.append((_or_refused(self._adaptive.option, name), 0))
            self._options.append(name)
        elif record == {ENDED: True} and self._adaptive is not None:
            self._has_ended = True
        elif record.keys() == {"step"} and self._adaptive is None:
            self._keep(size)
            self._groups.append((_step(record["step"]), 0))
        elif record.keys() == {"opened", "charged"}:
            self._check_count(record)
            self._open(record["opened"], size)
        elif record.keys() == {"charged"}:
            self._check_count(record)
            self._is_sealed = True
        else:
            raise LedgerError(f"a record of an unknown kind: {shown(list(record))}")

    def _open(self, environment: Any, size: int) -> None:
        if not isinstance(environment, dict):
            raise LedgerError(f"opened must be a table, got {shown(environment)}")
        environment.pop(PROCESS, None)  # differs always
        if not self._openings or self._openings[-1].environment != environment:
            self._keep(size)
            self._openings.append(Opening(self._charged, environment))

    def _check_count(self, record: dict[str, Any]) -> None:
        count = record["charged"]
        if type(count) is not int or count != self._charged:
            raise LedgerError(
                f"it says that {shown(count)} steps were charged, the lines before it "
                f"say {self._charged:,}"
            )

    def _keep(self, size: int) -> None:
        """Counts what stays in memory."""
        self._described += size
        if self._described > MOST_DESCRIBED:
            raise LedgerError(f"more than {MOST_DESCRIBED:,} bytes of descriptions")


def _checked_header(record: dict[str, Any]) -> dict[str, Any]:
    """The first record, if it is that of a ledger."""
    if record.get("format") != FORMAT:
        raise LedgerError(f"no ledger: format must be {FORMAT!r}")
    if type(record.get("version")) is not int or record["version"] != VERSION:
        raise LedgerError(
            f"version must be {VERSION}, got {shown(record.get('version'))}"
        )
    if record.keys() - {_PLANNED, _BOOK, _SEARCH} != _HEADER_KEYS:
        raise LedgerError(f"the keys must be {sorted(_HEADER_KEYS)}")
    planned = record.get(_PLANNED, 1)
    if type(planned) is not int or planned < 1:
        raise LedgerError(f"planned must be a number of steps, got {shown(planned)}")
    for key in (_BOOK, _SEARCH):
        if not isinstance(record.get(key, ""), str):
            raise LedgerError(f"{key} must be a name, got {shown(record[key])}")
    epsilon, delta = record["epsilon"], record["delta"]
    if epsilon != "inf" and not (isinstance(epsilon, float) and epsilon > 0):
        raise LedgerError(f"epsilon must be > 0 or 'inf', got {shown(epsilon)}")
    if not (isinstance(delta, float) and 0 < delta < 1):
        raise LedgerError(f"delta must lie in (0, 1), got {shown(delta)}")
    if not isinstance(record["run"], str) or not isinstance(record["seeded"], bool):
        raise LedgerError("run must be a string and seeded true or false")
    return record


def _step(description: Any) -> GaussianStep:
    """The step that a record describes."""
    step = _or_refused(GaussianStep.from_dict, description, where="step")
    if step.shape:
        raise LedgerError(f"step must be one setting, got fields of shape {step.shape}")
    return step


def _or_refused(make: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a function makes of a record, whose errors are the ledger's."""
    try:
        return make(*arguments, **named)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise LedgerError(str(error)) from None
