"""How far long work is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0  # where there is no terminal, such as in a log


class ProgressBar:
    """What is done, of how much, and the time left. Use it as a context.

    The clock of the rate starts with the first count: whatever comes before compiles.

    Args:
      console: where it is shown.
      what: is counted ("steps").
      total: how many there will be, about.
      done: how many there are already.
      first: what the first of them are, and how many: they have a rate of their own.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: int,
        done: int = 0,
        *,
        first: tuple[str, int] = ("", 0),
    ) -> None:
        self._console, self._done, self._last = console, done, time.monotonic()
        name, number = first
        # What is counted, from where, and how many.
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
        """Shows how many are done, and a text beside it."""
        self._done, now = done, time.monotonic()
        kind = self._kinds[done > self._kinds[0][2]]
        what, start, total = kind
        if kind != self._kind:
            self._kind, self._first = kind, None
            self._bar.reset(self._task, description=what, total=total)
        done = min(done - start, total)
        begun, before = self._first = self._first or (now, done)
        rate = (done - before) / (now - begun) if now > begun else 0.0
        said = [text] if text else []
        if rate:
            said.append(_in_words(rate))
        self._bar.update(self._task, completed=done, text=", ".join(said))
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        if rate:
            said.append(f"{_duration((total - done) / rate)} left")
        line = f"{done:,} of {total:,} {what}"
        self._console.print(", ".join([line, *said]), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()


def _in_words(rate: float) -> str:
    """A rate, of what is slow the seconds that each takes."""
    if rate < 1:
        return f"{1 / rate:,.1f} s each"
    return f"{rate:,.{0 if rate >= 10 else 1}f} a second"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, for a person."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
