"""Faults in a person's charge, or in the draw of a person's examples."""

from __future__ import annotations

from jaxdp_episodic.accountant.questions import contribution_pairs, dominating_pair
from jaxdp_episodic.trainer.draw import blocks, rows
from mutation import person_audits
from mutation.planting import AUDIT, Edit, Fault

PERSON_FAULTS = (
    Fault(
        "a person charged as one example",
        (Edit(dominating_pair, "in_one_place", "np.greater(bound, 1)", "False"),),
        AUDIT,
        person_audits.person_in_episodes,
        "she is in three classes, and moves the contribution of each",
    ),
    Fault(
        "the mixture of Gaussians charged for a person in episodes",
        (
            Edit(
                contribution_pairs,
                "_clip_units",
                "theorem_a(counts * unit.bound, masses, unit.rate, held)",
                "theorem_a(counts * unit.bound, masses, unit.rate * held, 1.0)",
            ),
        ),
        AUDIT,
        person_audits.person_in_episodes,
        "an episode without her contains somebody else, who tells that she is not in "
        "it; the mixture holds where nobody reacts",
    ),
    Fault(
        "group privacy by fewer than a person has",
        (
            Edit(
                contribution_pairs,
                "person_stages",
                "column(step.people.numbers[name])",
                "column(step.people.numbers[name]) // 2",
            ),
        ),
        AUDIT,
        person_audits.examples_of_person,
        "half of her examples are charged, and all of them are drawn",
        is_slow=True,
    ),
    Fault(
        "a person's examples drawn together",
        (
            Edit(
                rows.TreeRows,
                "draw",
                "draw_units(self.levels, generator)",
                "together(draw_units(self.levels, generator))",
            ),
        ),
        AUDIT,
        person_audits.examples_of_person,
        "a coin each hides how many of hers are drawn; one coin for all shows her",
        {"together": person_audits.together},
    ),
    Fault(
        "blocks of people by who is in the data",
        (
            Edit(
                blocks,
                "random_blocks",
                "generator.permutation(int(np.asarray(design.num_people)))",
                "np.arange(int(np.asarray(design.num_people)))",
            ),
        ),
        AUDIT,
        person_audits.people_in_blocks,
        "who leaves moves everybody behind her into another block",
        is_slow=True,
    ),
)
