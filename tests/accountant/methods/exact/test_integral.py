"""The trapezoidal rule's error against closed forms; the search at kinks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral


@pytest.mark.parametrize("rare", [0.0, 1e-4])
def test_the_error_estimate_has_no_coincidental_zeros(rare):
    """Bumps ``1 / cosh`` on both sides of 0, and rare ones a tenth as wide."""
    step = 0.45
    place = step * np.arange(4.0, 9.0, 1 / 8)
    u = step * np.arange(97)[:, None]
    weight = step * np.where(u > 0, 1.0, 0.5)

    def bumps(width: float) -> np.ndarray:
        below, above = ((u + sign * place) / width for sign in (1, -1))
        return (1 / np.cosh(below) + 1 / np.cosh(above)) / width

    values = weight * (bumps(1.0) + rare * bumps(0.1))
    error = np.abs(values.sum(axis=0) - np.pi * (1 + rare))
    halved = np.abs(values.sum(axis=0) - 2 * values[::2].sum(axis=0))
    stated = integral._aliasing(integral._waves(97, 1)[0] @ values)
    assert np.any(halved < 0.5 * error)  # the estimate by one difference
    assert np.all(stated > error)
    # At most nine times the largest change by halving the nodes.
    assert np.all(stated < 9 * halved.max())


@pytest.mark.parametrize("guess", [0.9999, 1.0003])
def test_the_search_does_not_stop_across_an_atom(guess, monkeypatch):
    """The slope jumps there, which no curvature before it announces."""

    def kinked(_, __, x):
        value = np.where(x < 1, -x, -1 - 4 * (x - 1))
        return value, np.where(x < 1, 1.0, 4.0), 0 * x, np.full_like(x, 1e-6), 0 * x

    monkeypatch.setattr(integral, "_prepare", lambda *_: None)
    monkeypatch.setattr(integral, "_integrate", kinked)
    steps: Any = SimpleNamespace(count=np.ones((1, 1)), is_discrete=True)
    true = 1.0001 if guess < 1 else 0.9999  # beyond the kink
    goal, start, highest = (np.array([x]) for x in (kinked(0, 0, true)[0], guess, 2.0))
    line = contours.Contour(*[np.ones(1)] * 6)
    found = integral.search(
        goal, start, highest, line, (steps,), integral.Blocks(1, 2, 1)
    )
    assert abs(found.value[0] - true) * 4 <= found.log_error[0] <= 2e-6
