"""Options of runs that adapt that several test files ask about."""

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods.adaptive.problem import explored


def two_groups():
    """A run whose option "a" draws the first of two groups more often, "b" the second.

    So neither path is the worst of all.
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
    """The states of a budget: what is left, as far as a path leads there."""

    def moves(left):
        return ((k, left - price) for k, price in enumerate(prices) if price <= left)

    return explored([budget], moves, lambda left: budget - left)[0]
