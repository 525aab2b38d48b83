"""``jaxdp-episodic epsilon --batch`` and ``--per-unit``: many budgets, in tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxdp_episodic.cli.messages import reported, waiting
from jaxdp_episodic.describe.step import ComposedSteps
from jaxdp_episodic.plots.labels import upward
from jaxdp_episodic.requests.batch_files import answer_file
from jaxdp_episodic.requests.batch_rows import check_suffix
from jaxdp_episodic.requests.per_unit import unit_budgets, write_unit_budgets
from jaxdp_episodic.requests.request import EpsilonRequest
from jaxdp_episodic.requests.request_file import read_request


def run_batch(source: Path, out: Path, *, method: str) -> int:
    """Answers a file of requests into another; returns the exit code.

    Rows with errors do not fail the command: it says how many there are.
    """

    def answered() -> list[str]:
        _make_place(out)
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

    return _said(source, answered)


def run_per_unit(file: Path, out: Path) -> int:
    """Writes each protected unit's own epsilon; returns the exit code."""

    def answered() -> list[str]:
        request = read_request(file, EpsilonRequest)
        if request.delta is None:
            raise ValueError("--per-unit gives epsilons, so the request needs a delta")
        _make_place(out)
        budgets = unit_budgets(
            request.step,
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
        if _is_add_remove(request):
            lines.append("private: under add_remove the table discloses sizes")
        return [*lines, f"written: {out}"]

    return _said(file, answered)


def _make_place(out: Path) -> None:
    """Refuses a name, or makes its folder, before the work rather than after it."""
    check_suffix(out)
    out.parent.mkdir(parents=True, exist_ok=True)


def _is_add_remove(request: EpsilonRequest) -> bool:
    step = request.step
    first = step.steps[0] if isinstance(step, ComposedSteps) else step
    return first.neighboring_relation == "add_remove"


def _said(file: Path, act: Callable[[], list[str]]) -> int:
    """Does something, and says what came of it or went wrong."""
    return reported(
        file, act, interrupted=lambda: "; nothing was written", says_warnings=True
    )
