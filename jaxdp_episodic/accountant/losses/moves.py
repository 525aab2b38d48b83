"""What one step of a dominating pair does to a sum, as a table to draw from.

Audits and simulations draw releases of the very pair that is accounted.
"""

from __future__ import annotations

from typing import NamedTuple


class Moves(NamedTuple):
    """Means of the release, in noise deviations, given that the outer unit was drawn.

    Attributes:
      weight: chances, which add up to 1.
      with_unit: the mean under P, in each case.
      without_unit: the same under Q.
      turn: the release at which both are equally likely.
      draws: (number, rate) where all means are multiplied by a binomial number of
        them, given that it is not 0, and the number is visible; else None.
    """

    weight: tuple[float, ...]
    with_unit: tuple[float, ...]
    without_unit: tuple[float, ...]
    turn: float
    draws: tuple[int, float] | None = None


def one_move(
    rate: float, shift: float, draws: tuple[int, float] | None = None
) -> Moves:
    """The sum moves by ``shift`` with probability ``rate``."""
    return Moves((1 - rate, rate), (0.0, shift), (0.0, 0.0), 0.5 * shift, draws)
