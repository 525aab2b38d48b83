"""Progress of long work: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

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
      first: name and number of the first things, which have a rate of their own.
    """

    def __init__(
        self,
        console: Console | None,
        what: str,
        total: int,
        done: int = 0,
        *,
        first: tuple[str, int] = ("", 0),
    ) -> None:
        self._console = console = console or Console(quiet=True)
        self._done, self._last = done, time.monotonic()
        name, number = first
        # (name, index of the first, number) of each kind of things.
        self._kinds = [(name, 0, number), (what, number, max(total - number, 1))]
        self._kind = self._kinds[done >= number]
        self._first: tuple[float, int] | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        what, start, total = self._kind
        self._task = self._bar.add_task(
            what, total=total, completed=done - start, text=""
        )

    def advance(self, number: int) -> None:
        """Counts ``number`` more as done."""
        self.show(self._done + number)

    def show(self, done: int, text: str = "") -> None:
        """Shows the number done, with a text."""
        self._done, now = done, time.monotonic()
        kind = self._kinds[done > self._kinds[0][2]]
        what, start, total = kind
        if kind != self._kind:
            self._kind, self._first = kind, None
            self._bar.reset(self._task, description=what, total=total)
        done = min(done - start, total)
        begun, before = self._first = self._first or (now, done)
        rate = (done - before) / (now - begun) if now > begun else 0.0
        notes = [text] if text else []
        if rate >= 1:
            notes.append(f"{rate:,.{0 if rate >= 10 else 1}f} a second")
        elif rate:
            notes.append(f"{1 / rate:,.1f} s each")
        self._bar.update(self._task, completed=done, text=", ".join(notes))
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        if rate:
            notes.append(f"{_duration((total - done) / rate)} left")
        line = f"{done:,} of {total:,} {what}"
        self._console.print(", ".join([line, *notes]), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    """Returns a duration as text in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
