"""``jaxdp-episodic epsilon`` and ``calibrate``: what a request asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxdp_episodic.accountant.report.ledgers import read_ledgers
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.table_file import check_suffix
from jaxdp_episodic.tools.cli.answer_text import answer_document, answer_table
from jaxdp_episodic.tools.cli.command import (
    Command,
    File,
    Files,
    Name,
    Number,
    TomlFile,
    UsageError,
    Whole,
    noted,
    option,
    waiting,
)
from jaxdp_episodic.tools.cli.ledgers import (
    adaptive_lines,
    caveats_on_ledgers,
    is_adaptive,
)
from jaxdp_episodic.tools.requests.batch_files import (
    answer_file,
    unit_budgets,
    write_unit_budgets,
)
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    caveats_on,
    steps_of,
)
from jaxdp_episodic.tools.requests.request_file import read_request


@dataclass
class Epsilon(Command):
    """The command ``epsilon``."""

    file: Annotated[File, tyro.conf.Positional, option("[FILE.toml]")] = None
    """The request: a step, the number of steps, and a delta or an epsilon."""
    delta: Number = None
    """Delta; default: the file's."""
    num_steps: Whole = None
    """Number of steps; default: the file's."""
    json: bool = False
    """Print JSON in place of a table."""
    batch: File = None
    """Requests, one a row: .jsonl, .csv or .parquet; in place of FILE.toml."""
    ledger: Files = ()
    """The folder of a training run, in place of FILE.toml. Give it once for each of
    several runs, or copies of one: the answer is what they cost together.
    """
    per_unit: bool = False
    """Write each protected unit's own epsilon to --out."""
    out: File = None
    """Where --batch and --per-unit write: .jsonl, .csv or .parquet."""
    method: Name = None
    """exact, rdp or pld: with --ledger (default: exact), and with --batch for rows that
    name none (default: rdp)."""

    def _subject(self) -> Any:
        return self.file or self.batch or next(iter(self.ledger), "")

    def _left(self) -> str | None:
        return "; nothing was written" if self.out is not None else None

    def _lines(self) -> list[str]:
        self._check_options()
        if self.out is not None:
            # A wrong name is refused, or the folder made, before the work.
            check_suffix(self.out)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            return self._batch(self.out) if self.batch else self._per_unit(self.out)
        if self.ledger:
            return self._of_ledgers([Path(name) for name in self.ledger])
        with noted() as said, waiting():
            request = self._request()
            answer = request.answer()
        return _answered(request, answer, said, as_json=self.json)

    def _check_options(self) -> None:
        """Refuses options that exclude or need one another."""
        sources = (self.file, self.batch, self.ledger or None)
        is_table = self.batch is not None or self.per_unit
        given = {"--delta": self.delta, "--num-steps": self.num_steps}
        given["--json"] = self.json or None
        named = [name for name, value in given.items() if value is not None]
        rules = {
            "give exactly one of FILE.toml, --batch FILE and --ledger FILE": (
                sum(source is not None for source in sources) != 1
            ),
            "--per-unit goes with FILE.toml, not with --batch or --ledger": (
                self.file is None and self.per_unit
            ),
            "--num-steps does not go with --ledger, which says how many": (
                bool(self.ledger) and self.num_steps is not None
            ),
            "--out FILE goes with --batch or --per-unit, and they need it": (
                is_table != (self.out is not None)
            ),
            f"{' '.join(named[:1])} does not go with --batch or --per-unit": (
                is_table and bool(named)
            ),
            "--method goes with --batch or --ledger; a FILE.toml names its own": (
                self.method is not None and self.file is not None
            ),
        }
        for message, is_broken in rules.items():
            if is_broken:
                raise UsageError(message)

    def _request(self) -> EpsilonRequest:
        assert self.file is not None  # as was checked
        return read_request(
            self.file, EpsilonRequest, delta=self.delta, num_steps=self.num_steps
        )

    def _of_ledgers(self, paths: list[Path]) -> list[str]:
        """Answers what ledgers alone say was charged."""
        if len(paths) == 1 and is_adaptive(paths[0]):
            if self.method is not None:
                raise UsageError("--method does not go with a run that chose")
            return adaptive_lines(paths[0], delta=self.delta, as_json=self.json)
        with noted() as said, waiting():
            ledgers = read_ledgers(paths)
            step, num_steps = ledgers.run_charged()
            delta, method = self.delta, self.method or "exact"
            request = EpsilonRequest(
                step=step,
                num_steps=num_steps,
                delta=ledgers.delta if delta is None else delta,
                method=method,
            )
            answer = request.answer()
            # At another delta the answer says nothing of how much of the plan is spent.
            spent = answer if delta is None else None
            caveats = caveats_on_ledgers(ledgers, spent, method)
        target, at = ledgers.planned
        planned = {"planned": {"epsilon": plain(target), "delta": at}}
        said += caveats
        return _answered(request, answer, said, as_json=self.json, more=planned)

    def _batch(self, out: Path) -> list[str]:
        """Answers a file of requests; says how many rows have errors."""
        assert self.batch is not None
        with waiting("answering") as say:
            result = answer_file(
                self.batch,
                out,
                method=self.method or "rdp",
                on_rows=lambda rows: say(f"{rows:,} rows answered"),
            )
        lines = [f"{result.num_rows:,} rows, {result.num_errors:,} with an error"]
        if result.first_error is not None:
            lines.append(f"the first: {result.first_error}")
        return [*lines, f"written: {out}"]

    def _per_unit(self, out: Path) -> list[str]:
        """Writes each protected unit's own epsilon."""
        request = self._request()
        if request.delta is None:
            raise ValueError("--per-unit gives epsilons, so the request needs a delta")
        budgets = unit_budgets(
            request.planned("--per-unit"),
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


@dataclass
class Calibrate(Command):
    """The command ``calibrate``."""

    file: TomlFile
    """The request: as for `epsilon`, with what is sought and the target."""
    json: bool = False
    """Print JSON in place of a table."""

    def _lines(self) -> list[str]:
        with noted() as said, waiting():
            request = read_request(self.file, CalibrationRequest)
            answer = request.answer()
        return _answered(request, answer, said, as_json=self.json)


def _answered(
    request: Any,
    answer: Any,
    said: list[str],
    *,
    as_json: bool,
    more: dict[str, Any] | None = None,
) -> list[str]:
    """The answer, with warnings; as JSON with more facts."""
    said = [*said, *caveats_on(request)]
    if not as_json:
        return [answer_table(request, answer, said)]
    document = answer_document(request, answer, said) | (more or {})
    return [json.dumps(document, allow_nan=False)]
