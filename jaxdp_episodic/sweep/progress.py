"""How far a sweep is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class SweepProgress:
    """Settings done, settings a second, and the time left.

    The clock of the rate starts with the first finished chunk, as the kernels are
    compiled before. Use it as a context.

    Args:
      console: where it is shown.
      total: settings of the sweep.
      done: those that were there before.
    """

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total = console, total
        self._done = done
        self._first: tuple[float, int] | None = None
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("sweep"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, text="")

    def advance(self, settings: int) -> None:
        """Counts so many settings as done."""
        self._done += settings
        now = time.monotonic()
        if self._first is None:
            self._first = now, self._done
        text = self._text(now)
        self._bar.update(self._task, completed=self._done, text=text)
        if self._console.is_terminal or now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        done = f"{self._done:,} of {self._total:,} settings"
        self._console.print(f"{done}, {text}" if text else done, highlight=False)

    def _text(self, now: float) -> str:
        """Rate and time left, as far as they are known."""
        assert self._first is not None
        begun, before = self._first
        if now <= begun or self._done == before:
            return ""
        rate = (self._done - before) / (now - begun)
        return (
            f"{rate:,.0f} a second, {_duration((self._total - self._done) / rate)} left"
        )

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, for a person."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
