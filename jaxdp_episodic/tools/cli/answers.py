"""``jaxdp-episodic epsilon`` and ``calibrate``: what a request asks for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.report.adaptive_words import owed_by_plan
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent
from jaxdp_episodic.accountant.report.ledgers import LedgersContent, read_ledgers
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.table_file import check_suffix
from jaxdp_episodic.tools.cli.answer_text import answer_document, answer_table
from jaxdp_episodic.tools.cli.choices import is_adaptive, print_choices
from jaxdp_episodic.tools.cli.messages import (
    USER_ERROR,
    File,
    Files,
    Name,
    Number,
    TomlFile,
    Whole,
    complain,
    option,
    reported,
    waiting,
    warnings_of,
)
from jaxdp_episodic.tools.cli.process import ended_by_sigterm
from jaxdp_episodic.tools.requests.batch_files import answer_file
from jaxdp_episodic.tools.requests.per_unit import unit_budgets, write_unit_budgets
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
    caveats_on,
    steps_of,
)
from jaxdp_episodic.tools.requests.request_file import read_request

# Relative, above the tolerance of calibration: a run whose epsilon is further below its
# target than that has not taken all its steps.
_CALIBRATION_SLACK = 1e-3
_NOTHING = "; nothing was written"


@dataclass(frozen=True)
class Epsilon:
    """What a run costs in privacy: epsilon at a delta, or delta at an epsilon."""

    file: Annotated[File, tyro.conf.Positional, option("[FILE.toml]")] = None
    """The request: a step, the number of steps, and a delta or an epsilon."""
    delta: Number = None
    """Takes the place of the file's delta."""
    num_steps: Whole = None
    """Takes the place of the file's number of steps."""
    json: bool = False
    """Print JSON in place of a table."""
    batch: File = None
    """Requests, one a row: .jsonl, .csv or .parquet; in place of FILE.toml."""
    ledger: Files = ()
    """What a training run was charged, its ledger.jsonl; in place of FILE.toml. Of
    several runs, or copies of one, each time it is given: what they cost together."""
    per_unit: bool = False
    """Write each protected unit's own epsilon to --out."""
    out: File = None
    """Where --batch and --per-unit write: .jsonl, .csv or .parquet."""
    method: Name = None
    """With --batch: how rows that name no method are answered; rdp by default. With
    --ledger: exact, rdp or pld; exact by default."""

    def run(self) -> int:
        """Prints or writes epsilon or delta; returns the exit code."""
        wrong = self._what_does_not_fit()
        if wrong is not None:
            complain(wrong)
            return USER_ERROR
        if self.batch is not None and self.out is not None:
            return _run_batch(self.batch, self.out, method=self.method or "rdp")
        if self.ledger:
            return self._of_ledgers([Path(name) for name in self.ledger])
        assert self.file is not None  # checked above
        file = self.file
        if self.out is not None:
            return _run_per_unit(file, self.out)
        return _print_answer(
            file,
            lambda: read_request(
                file, EpsilonRequest, delta=self.delta, num_steps=self.num_steps
            ),
            as_json=self.json,
        )

    def _of_ledgers(self, paths: list[Path]) -> int:
        """Answers what ledgers alone say was charged."""
        if len(paths) == 1 and is_adaptive(paths[0]):
            if self.method is not None:
                complain("--method does not go with the ledger of a run that chose")
                return USER_ERROR
            return print_choices(
                paths[0],
                delta=self.delta,
                as_json=self.json,
                caveats_on=_caveats_on_ledger,
            )
        found: list[LedgersContent] = []

        def read() -> EpsilonRequest:
            found.append(ledgers := read_ledgers(paths))
            step, num_steps = ledgers.run_charged()
            return EpsilonRequest(
                step=step,
                num_steps=num_steps,
                delta=ledgers.delta if self.delta is None else self.delta,
                method=self.method or "exact",
            )

        def notes(answer: Any) -> list[str]:
            (ledgers,) = found
            # At another delta the answer says nothing of how much of the plan is spent.
            spent = answer if self.delta is None else None
            return [
                *_caveats_on_ledgers(ledgers),
                *_caveats_on_plans(ledgers, spent, self.method or "exact"),
            ]

        def planned() -> dict[str, Any]:
            epsilon, delta = found[0].planned
            return {"planned": {"epsilon": plain(epsilon), "delta": delta}}

        return _print_answer(
            paths[0], read, as_json=self.json, notes=notes, facts=planned
        )

    def _what_does_not_fit(self) -> str | None:
        """Options that exclude or need one another."""
        table = self.batch is not None or self.per_unit
        sources = (self.file, self.batch, self.ledger or None)
        if sum(source is not None for source in sources) != 1:
            return "give exactly one of FILE.toml, --batch FILE and --ledger FILE"
        if self.file is None and self.per_unit:
            return "--per-unit goes with FILE.toml, not with --batch or --ledger"
        if self.ledger and self.num_steps is not None:
            return "--num-steps does not go with --ledger, which says how many"
        if table != (self.out is not None):
            return "--out FILE goes with --batch or --per-unit, and they need it"
        given = {"--delta": self.delta, "--num-steps": self.num_steps}
        named = [name for name, value in given.items() if value is not None]
        named += ["--json"] if self.json else []
        if table and named:
            return f"{named[0]} does not go with --batch or --per-unit"
        if self.method is not None and self.file is not None:
            return (
                "--method goes with --batch or --ledger; a FILE.toml names its own "
                "method"
            )
        return None


@dataclass(frozen=True)
class Calibrate:
    """Which noise, number of steps or rate keeps a run within a target epsilon."""

    file: TomlFile
    """The request: as for `epsilon`, with what is sought and the target."""
    json: bool = False
    """Print JSON in place of a table."""

    def run(self) -> int:
        """Prints what was sought; returns the exit code."""
        return _print_answer(
            self.file,
            lambda: read_request(self.file, CalibrationRequest),
            as_json=self.json,
        )


def _run_batch(source: Path, out: Path, *, method: str) -> int:
    """Answers a file of requests into another; returns the exit code.

    Rows with errors do not fail the command: it says how many there are.
    """

    def answered() -> list[str]:
        _prepare(out)
        with waiting("answering") as say:
            result = answer_file(
                source,
                out,
                method=method,
                on_rows=lambda rows: say(f"{rows:,} rows answered"),
            )
        lines = [f"{result.num_rows:,} rows, {result.num_errors:,} with an error"]
        if result.first_error is not None:
            lines.append(f"the first: {result.first_error}")
        return [*lines, f"written: {out}"]

    return reported(source, answered, interrupted=_NOTHING, says_warnings=True)


def _run_per_unit(file: Path, out: Path) -> int:
    """Writes each protected unit's own epsilon; returns the exit code."""

    def answered() -> list[str]:
        request = read_request(file, EpsilonRequest)
        if request.delta is None:
            raise ValueError("--per-unit gives epsilons, so the request needs a delta")
        step = request.planned("--per-unit")
        _prepare(out)
        budgets = unit_budgets(
            step,
            num_steps=request.num_steps,
            delta=request.delta,
            method=request.method,
        )
        write_unit_budgets(out, budgets)
        largest = upward(float(budgets.epsilon.max(initial=0.0)), 5)
        lines = [f"{budgets.epsilon.size:,} units, largest epsilon {largest}"]
        if budgets.rate_rounding:
            share = upward(budgets.rate_rounding, 2)
            lines.append(f"with rates rounded up by at most a share of {share}")
        if steps_of(request)[0].neighboring_relation == "add_remove":
            lines.append("private: under add_remove the table discloses sizes")
        return [*lines, f"written: {out}"]

    return reported(file, answered, interrupted=_NOTHING, says_warnings=True)


def _prepare(out: Path) -> None:
    """Refuses a name, or makes its folder, before the work rather than after it."""
    check_suffix(out)
    out.parent.mkdir(parents=True, exist_ok=True)


def _caveats_on_ledgers(ledgers: LedgersContent) -> list[str]:
    """What an epsilon computed from ledgers does not show by itself."""
    caveats = []
    for name, content, beginning in zip(*ledgers, strict=True):
        named = f"{name}: " if len(ledgers.contents) > 1 else ""
        caveats += [named + text for text in _caveats_on_ledger(content)]
        if beginning is None:
            continue
        other = ledgers.names[beginning.of]
        if common := sum(beginning.charged):
            caveats.append(
                f"{name} has its first {common:,} steps in common with {other}: they "
                "are counted once"
            )
        if not beginning.is_all:
            caveats.append(
                f"{name} and {other} may have more in common: their processes have no "
                "names, so what both charged is counted twice"
            )
    if len(ledgers.names) > 1:
        caveats.append(
            "composed as if all had been planned at the start: no guarantee where one "
            "run was designed in view of what another released; a book, kept from the "
            "first run on, has one (jaxdp-episodic book)"
        )
    if ledgers.num_shared_epochs:
        caveats.append(
            "epochs that several copies of a run went on with, released as often from "
            f"where they parted and counted so: {ledgers.num_shared_epochs:,}"
        )
    return caveats


def _caveats_on_plans(
    ledgers: LedgersContent, of_all: Any | None, method: str
) -> list[str]:
    """What runs owe that chose when to stop, if any stopped before its plan did."""
    early = []
    for name, content in zip(ledgers.names, ledgers.contents, strict=True):
        spent = of_all
        if spent is None or len(ledgers.contents) > 1:
            step, num_steps = content.run_charged()
            spent = epsilon(
                step, num_steps=num_steps, delta=content.delta, method=method
            )
        if float(spent) < content.target_epsilon * (1 - _CALIBRATION_SLACK):
            target = f"{content.target_epsilon:g} at delta {content.delta:g}"
            early.append(
                f"{name}: {content.charged:,} steps are charged, epsilon "
                f"{upward(float(spent), 5)}; planned was {target}"
            )
    if not early:
        return []
    total, delta = ledgers.planned
    together = len(ledgers.contents) > 1
    return [*early, owed_by_plan(total, delta, together=together)]


def _caveats_on_ledger(content: LedgerContent) -> list[str]:
    """What an epsilon computed from a ledger does not show by itself."""
    caveats = []
    if content.is_seeded:
        caveats.append(
            "not private: draws and noise came from a fixed seed; the answer holds for "
            "the same run with fresh entropy"
        )
    if content.search is not None:
        caveats.append(
            "one run of a search: the search's own epsilon, in its release/privacy.md, "
            "counts the other runs and the choice among them; this one does not"
        )
    if content.book is not None:
        what = "the run" if content.search is None else "the search as a whole"
        caveats.append(
            f"{what} is charged to the book {content.book}, whose guarantee holds for "
            "all of its runs together (jaxdp-episodic book show); this one is of the "
            "run alone"
        )
    if content.adaptive is None and content.owed > content.charged:
        caveats.append(
            f"{content.charged:,} steps were charged, the last within an epoch, and "
            f"{content.owed:,} are accounted, to the end of the epoch or of the plan: "
            "an end that was not planned may depend on what was released"
        )
    if not content.is_sealed:
        caveats.append(
            "the ledger does not end with a seal: its run goes on, was killed, or "
            "lines are missing at the end"
        )
    return caveats


def _print_answer(
    file: Path,
    read: Callable[[], Request],
    *,
    as_json: bool,
    notes: Callable[[Any], list[str]] = lambda answer: [],
    facts: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Prints what a request asks for, with notes on the answer; as JSON with facts."""

    def answered() -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as caught:
            request = read()
            # A terminal is left as it was, however the work ends.
            with ended_by_sigterm(), waiting("computing (new kinds compile first)"):
                answer = request.answer()
                noted = notes(answer)
        said = [*warnings_of(caught), *noted, *caveats_on(request)]
        if as_json:
            document = answer_document(request, answer, said) | facts()
            return [json.dumps(document, allow_nan=False)]
        return [answer_table(request, answer, said)]

    return reported(file, answered)
