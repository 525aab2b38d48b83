"""What a first config says of itself: why it is so, and what else there is."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap

from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.tools.plan.designs import POISSON, Design, possible_designs
from jaxdp_episodic.tools.plan.pipelines import Pipeline
from jaxdp_episodic.tools.plan.plan import Plan
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.tools.plan.ratios import noise_of_one, one_release
from jaxdp_episodic.tools.plan.settings import calibrated_noise, complete_contributions
from jaxdp_episodic.tools.plan.source import Source
from jaxdp_episodic.trainer.data.splits import VALIDATION

ADD_REMOVE = "add_remove"
ZERO_OUT = "zero_out"
_EPSILONS = (1.0, 2.0, 4.0, 8.0)  # whose noise is said, beside the one asked for
_WIDTH = 88  # letters of a line of comment


def notes(
    source: Source, description: PlanDescription, has_bound: bool
) -> dict[str, str]:
    """Returns what stands behind lines of a config, by their dotted names.

    ``has_bound`` says that the public number of examples was given, not counted.
    """
    request = description.request
    one = description.population.level_names[0]
    found = {f"data.{key}": note for key, note in source.notes.items()}
    if VALIDATION in source.table:
        found["data.validation"] = "of the classes, by a hash of their names"
        found["data.test"] = "likewise; both are held out, and protected by nothing"
    counted = "from the data: private unless"
    number = f"{counted} the list of all {one} units is public"
    if request.privacy_unit == one:
        number = f"from the data: PRIVATE, as one {one} is protected; take a public one"
    found["step.sampling.num_classes"] = number
    found["start.between"] = number
    limit = "more" if request.neighboring_relation == ZERO_OUT else "fewer"
    bound = f"{counted} it was public that no {one} has {limit}; take such a bound"
    if not has_bound:
        found["step.sampling.examples.population"] = bound
        found["step.sampling.levels"] = f"numbers of units in it are {bound}"
    found["normalizer"] = f"{counted} sizes are public; a guess will do"
    found["people"] = f"{counted} these bounds were known before the data; take such"
    return found


def heading(
    description: PlanDescription, plan: Plan | None, pipeline: Pipeline | None
) -> str:
    """Returns the comment on top: why this, and what else there is at which price."""
    request = description.request
    unit, relation = request.privacy_unit, request.neighboring_relation
    lines = [
        "Written by `jaxdp-episodic init`; it runs as it is:",
        "",
        "    jaxdp-episodic train THIS.toml --out runs/first",
        "",
        f"Protected is one {unit} ({relation}), at epsilon {request.epsilon:g} and "
        f"delta {request.delta:g}.",
        "Private numbers are marked; they are in this file, which is then private too.",
    ]
    if unit == PERSON:
        lines += [
            "",
            "The last stage is released, be it worse than the features: people may be "
            "in validation classes, too. With `select = true` under [evaluation] these "
            "choose, and data with people in both parts are refused.",
        ]
    if pipeline is not None:
        lines += ["", f"Pipeline: {pipeline.name}: {pipeline.reason}."]
        lines += pipeline.comparison()
    if plan is not None:
        is_taken = pipeline is None or pipeline.learner is None
        unused = "" if is_taken else " (the pipeline takes none)"
        lines += ["", f"Designs of episodes in this budget, their noise{unused}:"]
        for index, design in enumerate(plan.designs):
            if (plan.design == index).any():
                best = plan.best_of(index)
                lines.append(
                    f"  {design.name}: {plan.episodes_per_step[best]:,.4g} a step, "
                    f"{plan.complete_per_step[best]:,.3g} complete, "
                    f"{int(plan.num_steps[best]):,} steps, noise "
                    f"{plan.noise_multiplier[best]:.4g}"
                )
    lines += _prices(description, plan, pipeline)
    wrapped = [
        textwrap.fill(line, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
        if line
        else "#"
        for line in lines
    ]
    text = "\n".join(wrapped) + "\n\n"
    # A name of a column may have controls, which TOML's comments may not.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _prices(
    description: PlanDescription, plan: Plan | None, pipeline: Pipeline | None
) -> list[str]:
    """What the same would take at other epsilons, and under the other relation."""
    request, tree = description.request, description.population
    if plan is None or (pipeline is not None and pipeline.learner is not None):
        lines = ["", "Noise of one sum of all examples, in their norm:"]
        for epsilon in _EPSILONS:
            asked = dataclasses.replace(request, epsilon=epsilon)
            noise = noise_of_one(one_release(asked), asked)
            lines.append(f"  epsilon {epsilon:g}: {noise:.4g}")
        return lines
    best = plan.recommended
    design = plan.designs[int(plan.design[best])]
    setting = plan.episodes_per_step[[best]], plan.num_steps[[best]]

    def priced(asked: PlanRequest, design: Design) -> str:
        left = asked if pipeline is None else pipeline.left_for_steps(asked)
        complete = complete_contributions(asked, tree, design, setting[0])
        noise = calibrated_noise(left, tree, design, *setting)
        return f"noise {noise[0]:.4g}, {complete[0]:.3g} complete a step"

    lines = ["", "The recommended design at other prices:"]
    for epsilon in _EPSILONS:
        asked = dataclasses.replace(request, epsilon=epsilon)
        lines.append(f"  epsilon {epsilon:g}: {priced(asked, design)}")
    if request.privacy_unit != tree.level_names[1]:
        return lines
    is_slots = request.neighboring_relation == ZERO_OUT
    other = ADD_REMOVE if is_slots else ZERO_OUT
    filled = tree.children_counts[1][tree.children_counts[1] > 0]
    number = int(filled.min() if is_slots else filled.max())
    episode = dataclasses.replace(request.episode, population=number)
    asked = dataclasses.replace(request, neighboring_relation=other, episode=episode)
    same = possible_designs(
        tree, ways=episode.ways, sizes=episode.examples, stated_size=number
    )
    kind = POISSON, design.examples, design.clip_unit
    found = [d for d in same if (d.scheme, d.examples, d.clip_unit) == kind]
    with contextlib.suppress(ValueError, NotImplementedError):
        for one in found:
            lines.append(f"  {other}, population {number}: {priced(asked, one)}")
    return lines
