"""Loops that each setting leaves separately."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics.loops import by_blocks, namespace, while_each


class Steps(NamedTuple):
    count: Any
    total: Any


def _walk(need, lengths, *, block):
    """Each setting's number of steps of two lengths, and their total length."""
    xp = namespace(need)

    def step(given, steps):
        _, lengths = given
        return Steps(steps.count + 1, steps.total + xp.sum(lengths, axis=0))

    def unfinished(steps):
        return steps.total < 10 * xp.ones_like(steps.total)

    none = xp.zeros_like(need)
    start = Steps(none, 10 - need * xp.sum(lengths, axis=0))
    return while_each(xp, unfinished, step, (need, lengths), start, block)


@pytest.mark.parametrize("block", [4, 8, 40])
def test_each_setting_has_its_own_number_of_turns(engine, block):
    """In any order of long and short ones, independent of its neighbours."""
    rng = np.random.default_rng(block)
    need, lengths = rng.integers(0, 9, 40), 2.0 ** rng.integers(-3, 3, (2, 40))
    count, total = float64_boundary(_walk, ("block",))(need, lengths, block=block)
    np.testing.assert_array_equal(count, need)
    np.testing.assert_array_equal(total, 10)


def test_blocks_are_joined_in_order(engine):
    def both(x, *, block):
        return by_blocks(lambda a, b: (a, b[0] + b[1]), (x, (x, x[None])), block)

    x = np.arange(12.0)
    for block in (3, 12):
        first, second = float64_boundary(both, ("block",))(x, block=block)
        np.testing.assert_array_equal([first, second.reshape(-1)], [x, 2 * x])
