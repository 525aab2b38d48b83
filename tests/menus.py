"""Adaptive runs that several test files use."""

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods.adaptive.problem import explored


def two_groups():
    """A run whose options "a" and "b" draw one of two groups more often each.

    So neither path is the worst for all strategies.
    """
    tree = jde.Population.from_sizes([10, 30])

    def drawn(size):
        draw = jde.MultistageSampling(
            jde.WithoutReplacement("group", size=1),
            jde.WithoutReplacement("example", size=size),
        )
        return jde.GaussianStep(
            draw,
            noise_multiplier=2.0,
            clip_unit="example",
            population=tree,
            small_units="keep",
        )

    options = {"a": drawn(1), "b": drawn(20)}
    return jde.AdaptiveRun(options, prices={"a": 1, "b": 2}, budget=6)


def budget_graph(prices, budget):
    """The states of a budget: the reachable remainders."""

    def moves(left):
        return ((k, left - price) for k, price in enumerate(prices) if price <= left)

    return explored([budget], moves, lambda left: budget - left)[0]
