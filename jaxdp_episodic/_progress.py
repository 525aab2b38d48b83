"""Progress of long work: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import datetime
import math
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0  # without a terminal, such as in a log


def standard_error() -> Console:
    """Standard error; lines are wrapped on a terminal only, as a log is searched."""
    console = Console(stderr=True)
    console.soft_wrap = not console.is_terminal
    return console


class ProgressBar:
    """Shows what is done, the total, and the time left. Use as a context manager.

    The rate is measured from the first count on, because work before it compiles.

    Args:
      console: where to show it; None: nowhere.
      what: the things counted ("steps").
      total: expected number.
      done: number already done.
    """

    def __init__(
        self, console: Console | None, what: str, total: int, done: int = 0
    ) -> None:
        self._console = console = console or Console(quiet=True)
        self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            get_time=lambda: time.monotonic(),
            speed_estimate_period=math.inf,  # seconds
        )
        self._bar.add_task(what, total=total, completed=done, text="")

    def advance(self, number: int) -> None:
        """Counts ``number`` more as done."""
        self.show(int(self._bar.tasks[0].completed) + number)

    def show(
        self, done: int, total: int | None = None, what: str = "", *, text: str = ""
    ) -> None:
        """Shows the number done, with a text; another ``what`` begins a new count."""
        task, now = self._bar.tasks[0], time.monotonic()
        if what and what != task.description:
            self._bar.reset(task.id, description=what)
        total = int(task.total or 0) if total is None else total
        self._bar.update(task.id, total=total, completed=min(done, total))
        rate, notes = task.finished_speed or task.speed or 0.0, [text] if text else []
        if rate >= 1:
            notes.append(f"{rate:,.{0 if rate >= 10 else 1}f} a second")
        elif rate:
            notes.append(f"{1 / rate:,.1f} s each")
        self._bar.update(task.id, text=", ".join(notes))
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        if rate:
            seconds = round(task.time_remaining or 0.0)
            notes.append(f"{datetime.timedelta(seconds=seconds)} left")
        line = f"{task.completed:,.0f} of {total:,} {task.description}"
        self._console.print(", ".join([line, *notes]), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()
