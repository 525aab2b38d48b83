"""Writes a first training config for a source of data, with comments.

It runs without edits. A comment marks each number that was counted in private data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import CLASS, PERSON
from jaxdp_episodic.accountant.describe.spec import spec_from_dict
from jaxdp_episodic.accountant.describe.step import STEP
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.plan import pipelines, plan as plans, question
from jaxdp_episodic.tools.plan.plan import make_plan
from jaxdp_episodic.tools.plan.source import WAYS, Source
from jaxdp_episodic.trainer.config.training_parts import (
    LEAST_SIDE,
    MIXED,
    SCALED,
    WAVELETS,
)
from jaxdp_episodic.trainer.data import fields
from jaxdp_episodic.trainer.data.people import fitting_bounds
from jaxdp_episodic.trainer.data.scales import advice, largest_target, scales_of
from jaxdp_episodic.trainer.data.sources import SOURCES
from jaxdp_episodic.trainer.data.splits import TRAIN, VALIDATION
from jaxdp_episodic.trainer.run.checks import LEAST_SHARE

EPSILON = 8.0
DELTA = 1e-5
SHOTS = 1  # per class
_TASK_SHOTS = 4  # per task of regression
QUERIES = 15  # per class, as usual in the field; fewer if a class has fewer
ADD_REMOVE = "add_remove"
ZERO_OUT = "zero_out"
_EPSILONS = (1.0, 2.0, 4.0, 8.0)  # other targets, for which the heading states noise
_HELD_OUT = "of this split's validation data, unprotected; released: better public ones"
_BEFORE = "from the data: private unless it was public before"
_WIDTH = 88  # characters of a line of comment
_MOST_NAMED = 20  # duplicates that are named
# The first keys of a config; TOML writes tables after all others.
_ORDER = (
    *("version", "epsilon", "delta", "num_steps", "l2_clip_norm", "normalizer"),
    *("data", "features", "start", "step", "people", "learner", "model"),
)
# A note if people are protected.
_UNCHOSEN = (
    "the last stage is released even if it is worse than the features, as people may "
    "be in validation classes, too. With `select = true` under [evaluation] a stage is "
    "chosen, and data with people in both parts are refused"
)


class Wishes(fields.CheckedSpec):
    """What the user wants of a first config; None: a default."""

    epsilon: float = EPSILON  # the target
    delta: float = DELTA  # the target
    unit: str | None = None  # protected: a level or "person"; None: an example
    # Public bound on the examples of a class or task: a lower bound under add_remove,
    # an upper bound under zero_out. None: counted in the data.
    population: fields.Count | None = None
    relation: str | None = None  # None: see `_relation_and_population`
    ways: int | None = None  # classes per episode
    shots: fields.Count | None = None  # support examples of each class, or of a task


def first_config(source: Source, wishes: Wishes) -> tuple[str, list[str]]:
    """Returns the text of the config, and remarks to print with it."""
    data = source.parts[TRAIN]
    if len(data.level_names) != 2:
        raise NotImplementedError(
            "a first config is for classes (or tasks) and their examples, got levels "
            f"{data.level_names}; write one by hand (docs/training.md)"
        )
    description = _description(source, wishes)
    is_chosen = VALIDATION in source.parts
    pipeline = pipelines.recommended_pipeline(description, is_chosen=is_chosen)
    request = pipeline.left_for_steps(description.request)
    plan, remarks = None, []
    if pipeline.learner is None and (
        request.episode.ways is None or data.level_names[0] == CLASS
    ):
        plan = make_plan(request, description.population)
        remarks = plans.advice(plan)
    config: Any = _without_episodes(description)
    if plan is not None:  # then there are data, and a table train
        config = plans.training_config(plan, description)
    config = pipeline.config(config)
    config = {key: config[key] for key in _ORDER if key in config} | config
    if pipeline.learner == MIXED:
        most = largest_target(source.parts.get(VALIDATION, data))
        config["start"] = {**config["start"], "target_bound": most}
    are = {"are_scaled": "features" in config, "are_bounded": "start" in config}
    remarks += advice(data, **are)
    if plan is not None:
        config, weighed = plans.with_bands(config, plan)
        remarks.append(weighed)
    comments = _notes(source, description, wishes.population is not None)
    head = _heading(description, plan, pipeline, remarks[-1:])
    remarks = [*pipeline.lines, *remarks]
    if description.request.privacy_unit == PERSON:
        remarks.append(f"stage: {_UNCHOSEN}")
    if number := len(source.duplicates):
        done = "evaluation.drop_duplicates leaves them out of training"
        if source.keeps_duplicates:
            done = "they stay, so no stage is chosen by held-out data (select = false)"
        are = "example is" if number == 1 else "examples are"
        rest = number - _MOST_NAMED
        remarks.append(
            f"duplicates: {number:,} training {are} held out, too; {done}: "
            f"{', '.join(source.duplicates[:_MOST_NAMED])}"
            f"{f' and {rest:,} more' * (rest > 0)}"
        )
    return head + to_toml(config, comments), remarks


def _description(source: Source, wishes: Wishes) -> question.PlanDescription:
    """The plan for a source and the user's wishes."""
    data = source.parts[TRAIN]
    classes, example = data.level_names
    unit = example if wishes.unit is None else wishes.unit
    if unit not in (classes, example, PERSON):
        raise ValueError(
            f"--unit must be one of {(classes, example, PERSON)}, got {unit!r}"
        )
    is_regression = data.targets is not None
    shots = wishes.shots
    if shots is None:
        shots = _TASK_SHOTS if is_regression else SHOTS
    for name, part in source.parts.items():
        most = int(part.population.children_counts[-1].max())
        if shots >= most:
            raise ValueError(
                f"--shots must be less than {most}, the number of examples of the "
                f"largest {part.level_names[0]} of {name!r}, as a query is needed, "
                f"got {shots}"
            )
    ways = None if is_regression else _ways(source, wishes)
    sizes, size = data.population.children_counts[1], 2 * shots
    relation, population = wishes.relation or ADD_REMOVE, wishes.population
    if unit == example:
        relation, population = _relation_and_population(sizes, size, ways, wishes)
    a_step = min(max(1, len(sizes) // (ways or 1)), question.MOST_EPISODES)
    read = spec_from_dict(SOURCES, {"version": 1, **source.table}, where="data")
    people = None
    if unit == PERSON:
        if data.owners is None:
            raise ValueError("--owner must be given with --unit person")
        people = fitting_bounds(data)
        if read.copies > 1:  # bounds count classes without their rotated copies
            own = int(people.numbers["classes"]) // read.copies
            people = dataclasses.replace(people, classes=own)
    request = question.PlanRequest(
        epsilon=wishes.epsilon,
        delta=wishes.delta,
        episode=question.EpisodeShape(
            shots=shots, examples=(size,), ways=ways, population=population
        ),
        compute=question.Compute(
            episodes_per_step=a_step, total_episodes=question.STEPS * a_step
        ),
        learning=question.Learning(learning_rate_steps=question.STEPS),
        privacy_unit=unit,
        people=people,
        neighboring_relation=relation,
        schemes=("poisson",),
        data=read,
    )
    tables = _train_table(source, ways, unit), source.table
    return question.PlanDescription.of(request, data, *tables)


def _ways(source: Source, wishes: Wishes) -> int:
    """Classes per episode: at most those of each part, fewer than for validation."""
    sizes = {name: p.population.children_counts[-1] for name, p in source.parts.items()}
    numbers = {name: int(np.count_nonzero(one)) for name, one in sizes.items()}
    smallest = min(numbers, key=numbers.__getitem__)
    fewest = numbers[smallest]
    if fewest < 2:
        raise ValueError(
            f"{smallest!r} must have at least 2 classes to tell apart, got {fewest}; "
            "split the data differently"
        )
    if wishes.ways is None:
        compared = max(numbers.get(VALIDATION, WAYS + 1) - 1, 2)
        return min(WAYS, fewest, compared)
    if not 2 <= wishes.ways <= fewest:
        raise ValueError(
            f"--ways must be from 2 to {fewest}, the number of classes of "
            f"{smallest!r}, got {wishes.ways}"
        )
    return wishes.ways


def _relation_and_population(
    sizes: np.ndarray, size: int, ways: int | None, wishes: Wishes
) -> tuple[str, int]:
    """The relation for examples, and the public bound on those of a class it needs."""
    most, fewest = int(sizes.max()), max(int(sizes.min()), 1)  # empty classes count
    slots, relation = wishes.population or most, wishes.relation
    if relation is None:  # zero_out if enough episodes draw no empty slot
        drawn = np.arange(min(size, slots))
        filled = np.maximum(sizes[:, None] - drawn, 0) / (slots - drawn)
        share = np.prod(filled, axis=1).mean() ** (ways or 1)  # draw no empty slot
        fits = most <= slots and share >= LEAST_SHARE and ways is not None
        relation = ZERO_OUT if fits else ADD_REMOVE
    if relation == ZERO_OUT:
        return relation, slots
    return relation, wishes.population or fewest


def _train_table(source: Source, ways: int | None, unit: str) -> dict[str, Any]:
    """The rest of the config, before a pipeline is chosen."""
    table = dict(question.OF_TASKS if ways is None else question.OF_CLASSES)
    shape = source.parts[TRAIN].features.shape[1:]
    if ways is not None and len(shape) == 3 and min(shape[:2]) >= LEAST_SIDE:
        table["features"] = {"kind": WAVELETS}
    # Protected people, or copies of protected examples, may be in these data, too.
    if VALIDATION in source.parts and unit != PERSON and not source.keeps_duplicates:
        if scales := scales_of(source.parts[VALIDATION]):
            table["features"] = {"kind": SCALED, **scales}
    held_out = [name for name in source.parts if name != TRAIN]
    if held_out:
        how = {"queries": QUERIES, "num_episodes": 600, "every": 100}
        table["evaluation"] = {"splits": held_out, **how}
        if source.duplicates:
            key = "select" if source.keeps_duplicates else "drop_duplicates"
            table["evaluation"][key] = key == "drop_duplicates"
    if ways is not None and VALIDATION not in held_out:
        # The last stage is always released, so it should retain the features.
        table["model"] = {**table["model"], "skip": True}
    return table


def _without_episodes(description: question.PlanDescription) -> dict[str, Any]:
    """A config with a placeholder step, for a pipeline of statistics alone."""
    tree, episode = description.population, description.request.episode
    kind, clip_unit = "WithoutReplacement", STEP
    one, each = (
        {"size": episode.ways, "population": tree.num_units(1)},
        {"size": episode.examples[0], "population": episode.population},
    )
    if episode.ways is None:
        kind, clip_unit = "Poisson", tree.level_names[0]
        one = each = {"sampling_probability": 1.0}
    names = zip(tree.level_names, (one, each), strict=True)
    levels = [{"type": kind, "name": name, **sizes} for name, sizes in names]
    sampling = {"type": "MultistageSampling", "levels": levels}
    return plans.config_around(description, question.STEPS, clip_unit, sampling)


def _notes(
    source: Source, description: question.PlanDescription, has_bound: bool
) -> dict[str, str]:
    """Dotted name of a key -> the comment behind its line."""
    request, unit = description.request, description.request.privacy_unit
    one = description.population.level_names[0]
    counted = "from the data: private unless"
    number = f"{counted} the list of all {one} units is public"
    if unit == one:
        number = (
            f"from the data: PRIVATE, as one {one} is protected; state a public one"
        )
    is_free = VALIDATION in source.parts and not source.keeps_duplicates
    limit = "more" if request.neighboring_relation == ZERO_OUT else "fewer"
    bound = f"{counted} it was public that no {one} has {limit}; state such a bound"
    found = {f"data.{key}": note for key, note in source.notes.items()} | {
        "evaluation.drop_duplicates": "held-out examples are not trained on",
        "evaluation.select": "no stage is chosen: held-out examples are trained on",
        "step.sampling.num_classes": number,
        "start.between": number,
        "start.target_bound": _HELD_OUT if is_free and unit != PERSON else _BEFORE,
        "features.mean": _HELD_OUT,
        "features.std": _HELD_OUT,
        "normalizer": f"{counted} sizes are public; a guess will do",
        "people": f"{counted} these bounds were public before; state such bounds",
    }
    if isinstance(source.table.get(VALIDATION), float):
        found["data.validation"] = "share of the classes, by a hash of their names"
        found["data.test"] = "likewise; held-out data are not protected"
    if not has_bound:
        found["step.sampling.examples.population"] = bound
        found["step.sampling.levels"] = f"its numbers of units are {bound}"
    return found


def _heading(
    description: question.PlanDescription,
    plan: plans.Plan | None,
    pipeline: pipelines.Pipeline,
    weighed: list[str],
) -> str:
    """The comment at the top: the reasons for this config, and the alternatives."""
    request = description.request
    unit, relation = request.privacy_unit, request.neighboring_relation
    copies = " with all of its rotations" if request.copies > 1 else ""
    lines = [
        "Written by `jaxdp-episodic init`. Train with it as it is:",
        "",
        "    jaxdp-episodic train THIS.toml --out runs/first",
        "",
        f"One {unit}{copies} is protected ({relation}), at epsilon "
        f"{request.epsilon:.15g} and delta {request.delta:.15g}.",
        "Comments mark the numbers that are private. So this file is private.",
    ]
    said = [_UNCHOSEN] if unit == PERSON else []
    for texts in (said, pipeline.lines, weighed if plan is not None else []):
        if texts:
            lines += ["", *(f"{text[0].upper()}{text[1:]}." for text in texts)]
    if plan is not None:
        lines += ["", "Best setting of each design of episodes:"]
        lines += [
            f"  {one.design.name}: {one.episodes_per_step:,.4g} a step, "
            f"{one.complete_per_step:,.3g} complete, {one.num_steps:,} steps, noise "
            f"{one.noise_multiplier:.4g}"
            for one in plan.best
        ]
    lines += ["", *_prices(description, plan, pipeline)]
    wrapped = [
        textwrap.fill(line, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
        for line in lines
    ]
    text = "\n".join(line or "#" for line in wrapped) + "\n\n"
    # Names of columns may contain control characters, which TOML's comments may not.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _prices(
    description: question.PlanDescription,
    plan: plans.Plan | None,
    pipeline: pipelines.Pipeline,
) -> list[str]:
    """The noise of the same design at other epsilons, and under the other relation."""
    request, tree = description.request, description.population
    others = [dataclasses.replace(request, epsilon=epsilon) for epsilon in _EPSILONS]
    if plan is None:
        lines = ["Noise of one sum of all examples, as a multiple of their norm:"]
        for one in others:
            noise = pipelines.noise_of_one(pipelines.one_release(one), one)
            lines.append(f"  epsilon {one.epsilon:g}: {noise:.4g}")
        return lines
    best, design = plan.recommended, plan.recommended.design
    setting = np.array([best.episodes_per_step]), np.array([best.num_steps])

    def price(target: question.PlanRequest) -> str:
        left = pipeline.left_for_steps(target)
        asked = dataclasses.replace(design, request=left)
        noise, (complete, _) = asked.noise(*setting), asked.complete(setting[0])
        return f"noise {noise[0]:.4g}, {complete[0]:.3g} complete a step"

    lines = ["The recommended design at other epsilons:"]
    lines += [f"  epsilon {one.epsilon:g}: {price(one)}" for one in others]
    if request.privacy_unit != tree.level_names[1]:
        return lines
    sizes = tree.children_counts[1]
    relation, number = ZERO_OUT, int(sizes.max())
    if request.neighboring_relation == ZERO_OUT:
        relation, number = ADD_REMOVE, int(sizes[sizes > 0].min())
    episode = dataclasses.replace(request.episode, population=number)
    other = dataclasses.replace(request, neighboring_relation=relation, episode=episode)
    with contextlib.suppress(ValueError, NotImplementedError):
        lines.append(f"  {relation}, population {number}: {price(other)}")
    return lines
