"""How far an audit is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class AuditProgress:
    """Draws or steps done, and the time left. Use it as a context.

    Args:
      console: where it is shown.
      what: is counted ("draws").
      total: how many there will be, about.
    """

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, max(total, 1)
        self._done = 0
        self._begun = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("audit"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total)

    def advance(self, number: int) -> None:
        """Counts so many as done."""
        self.show(self._done + number)

    def show(self, done: int) -> None:
        """Says how many are done."""
        self._done = min(done, self._total)
        self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        left = (now - self._begun) * (self._total / self._done - 1)
        self._console.print(
            f"{self._done:,} of {self._total:,} {self._what}, {left:,.0f} s left",
            highlight=False,
        )

    def __enter__(self) -> AuditProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()
