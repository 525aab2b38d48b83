"""Progress of long work: a bar on a terminal, lines elsewhere."""

import io

import pytest
from rich.console import Console

from jaxdp_episodic import _progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when set."""
    times = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: times[0])
    return times


def test_lines_come_every_ten_seconds_and_count_from_the_first_piece(clock, capsys):
    _progress.standard_error().print("word " * 40 + "end")  # it is not wrapped
    assert capsys.readouterr().err.count("\n") == 1
    out = io.StringIO()
    bar = _progress.ProgressBar(Console(file=out, width=200), "steps", 4000, 1000)
    with bar:
        bar.show(1100, text="epsilon 0.1")  # compilation only: no rate yet
        for second in (5, 11, 12, 22):
            clock[0] = 100.0 + second
            bar.show(1100 + 10 * second, text=f"epsilon 0.{second}")
        clock[0] = 1000.0
        bar.advance(10_000)  # at most the total
    assert out.getvalue().splitlines() == [
        "1,210 of 4,000 steps, epsilon 0.11, 10 a second, 0:04:39 left",
        "1,320 of 4,000 steps, epsilon 0.22, 10 a second, 0:04:28 left",
        "4,000 of 4,000 steps, 3.2 a second, 0:00:00 left",
    ]


def test_a_terminal_has_a_bar(clock):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with _progress.ProgressBar(console, "draws", 20_000) as bar:
        bar.show(1)
        clock[0] += 20
        bar.show(15_001)
    shown = out.getvalue()
    assert "15,001 of 20,000" in shown and "750 a second" in shown
    assert "left" not in shown


def test_another_kind_has_its_own_rate(clock):
    out = io.StringIO()
    kinds = (4, "private statistics"), (300, "gradient steps")
    with _progress.ProgressBar(Console(file=out, width=200), kinds[0][1], 4) as bar:
        for second, done in ((0, 1), (40, 2), (80, 4), (120, 5), (140, 105)):
            clock[0] = 100.0 + second
            bar.show(done - 4 * (done > 4), *kinds[done > 4])
    assert out.getvalue().splitlines() == [
        "2 of 4 private statistics, 40.0 s each, 0:01:20 left",
        "4 of 4 private statistics, 26.7 s each, 0:00:00 left",
        "1 of 300 gradient steps",
        "101 of 300 gradient steps, 5.0 a second, 0:00:40 left",
    ]
