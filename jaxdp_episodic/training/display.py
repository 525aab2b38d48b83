"""How far a run is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jaxdp_episodic.accounting.budget import PrivacyBudget
from jaxdp_episodic.training.run_files import StepProgress

_SECONDS_BETWEEN_LINES = 10.0


class _Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        """Returns the column's text."""
        return Text(f"{task.speed or 0:.1f} steps/s")


class Display:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, console: Console, budget: PrivacyBudget) -> None:
        self._console, self._target = console, f"{budget.epsilon:g}"
        self._total = budget.num_steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"epsilon {{task.fields[epsilon]:.3f}} of {self._target}"),
            _Rate(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=self._total, epsilon=0.0)
        self._begun = self._last = 0.0
        self._first: int | None = None

    def start_at(self, step: int) -> None:
        """Says where a resumed run stands."""
        self._bar.update(self._task, completed=step)

    def show(self, progress: StepProgress) -> None:
        """Is called after every step."""
        self._bar.update(self._task, completed=progress.step, epsilon=progress.epsilon)
        now = time.monotonic()
        if self._first is None:  # the first step compiles: the clock starts after it
            self._begun = self._last = now
            self._first = progress.step
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        taken = progress.step - self._first
        left = (now - self._begun) / taken * (self._total - progress.step)
        self._console.print(
            f"step {progress.step:,} of {self._total:,}, epsilon "
            f"{progress.epsilon:.3f} of {self._target}, "
            f"{taken / (now - self._begun):.1f} steps/s, {left:,.0f} s left",
            highlight=False,
        )

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()
