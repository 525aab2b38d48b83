"""Checks of the sampler: exact tests of its draws, and of the blocks of a step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import RandomAllocation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw import Draw, EpisodeSampler
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from mutation.verdicts import Effort, Verdict
from oracles.draws import false_alarm, outcome_tally
from trainer.draw.test_draw_statistics import FALSE_ALARMS, case_of, check

# A block size that most draws of a Poisson design exceed.
_FEW = 1


def drawn(name: str, effort: Effort) -> Verdict:
    """One of the designs of the sampler's own tests."""
    return _verdict(check(case_of(name), effort.draws, seed=21))


def drawn_tasks(effort: Effort) -> Verdict:
    """Poisson-sampled tasks, examples without replacement."""
    return drawn("tasks-poisson-subset", effort)


def drawn_examples(effort: Effort) -> Verdict:
    """Poisson-sampled examples."""
    return drawn("examples-poisson", effort)


def fixed_number_of_tasks(effort: Effort) -> Verdict:
    """Tasks without replacement, one of them empty."""
    return drawn("tasks-subset-poisson", effort)


def blocks_of_tasks(effort: Effort) -> Verdict:
    """What `make_blocks` hands to the trainer, by the tests of the sampler."""
    case = case_of("tasks-poisson-subset")
    case = case._replace(sampler=_InBlocks(case.sampler))
    return _verdict(check(case, effort.draws, seed=22))


def bins_of_two_epochs(effort: Effort) -> Verdict:
    """The steps, of three, of two units in one epoch and in the next."""
    tree = Population.from_sizes(2, level_names=("unit",))
    scheme = RandomAllocation("unit", steps_per_epoch=3)
    sampler = EpisodeSampler(scheme, tree, clip_unit="unit")
    outcomes = []
    for entropy in range(effort.draws // 8):
        found = np.zeros((2, 2), int)
        draws = RunDraws(sampler, Keys(entropy), all_processes(), 1)
        for step in range(6):
            for unit in draws.draw(draws.secret(step + 1)).units:
                found[step // 3, unit] = step % 3
        outcomes.append(tuple(found.ravel().tolist()))
    dist = {places: 3.0**-4 for places in itertools.product(range(3), repeat=4)}
    return _verdict(false_alarm(outcome_tally(outcomes, dist)))


class _InBlocks:
    """Draws, makes blocks, and reads from the blocks what was drawn."""

    def __init__(self, sampler: EpisodeSampler) -> None:
        self._sampler, tree = sampler, sampler.population
        # An example's only feature is its place.
        places = np.arange(tree.children_counts[-1].sum(), dtype=np.float32)
        self._table = ExampleTable(places[:, None], None, tree)

    def draw(self, generator: np.random.Generator) -> Draw:
        """The draw as it stands in the blocks."""
        draw = self._sampler.draw(generator)
        made = list(episode.make_blocks(draw, self._table, block_size=_FEW))
        rows = [np.asarray(block.unit_mask) > 0 for block in made]
        inputs, mask = (
            np.concatenate([get(b)[r] for b, r in zip(made, rows, strict=True)])
            for get in (lambda b: b.inputs[..., 0], lambda b: b.slot_mask > 0)
        )
        return Draw(inputs.astype(np.int64), mask, draw.units[: len(mask)])


def _verdict(rejected_at: float) -> Verdict:
    """Caught if a correct sampler would draw this with probability at most 1e-6."""
    is_caught = rejected_at < FALSE_ALARMS
    chance = f"{rejected_at:.1g}" if rejected_at > 1e-300 else "less than 1e-300"
    sign = "<" if is_caught else ">="
    return Verdict(is_caught, f"corrected p-value {chance} {sign} {FALSE_ALARMS:g}")


def batch_of_an_epoch(levels: Any, generator: np.random.Generator) -> np.ndarray:
    """A fault: the next units of a shuffled order."""
    (level,) = levels
    size, rest = round(level.expected[0]), vars(level).get("rest", [])
    if len(rest) < size:
        rest = generator.permutation(int(level.counts[0]))
    vars(level)["rest"] = rest[size:]
    return rest[:size]


def without_empty(population: Any) -> Any:
    """A fault: empty units of the first level are removed."""
    first, below = population.children_counts
    kept = below[below > 0]
    return type(population)((np.full_like(first, len(kept)), kept))
