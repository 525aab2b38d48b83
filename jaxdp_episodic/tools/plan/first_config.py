"""A first training config for a source of data, as `plan` would write it, explained.

It runs as it is. What it states of the data was counted in the data: where such a
number is private, a comment says so, and what else would do.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import STEP
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.plan.explanations import (
    ADD_REMOVE,
    ZERO_OUT,
    heading,
    notes,
)
from jaxdp_episodic.tools.plan.pipelines import Pipeline, recommended_pipeline
from jaxdp_episodic.tools.plan.plan import (
    Plan,
    advice,
    config_around,
    make_plan,
    training_config,
)
from jaxdp_episodic.tools.plan.question import (
    Compute,
    EpisodeShape,
    Learning,
    PlanDescription,
    PlanRequest,
)
from jaxdp_episodic.tools.plan.source import Source
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import LEAST_SIDE, WAVELETS
from jaxdp_episodic.trainer.data.people import fitting_bounds
from jaxdp_episodic.trainer.data.splits import TRAIN, VALIDATION
from jaxdp_episodic.trainer.draw.complete import mean_product
from jaxdp_episodic.trainer.run.contributions import LEAST_SHARE

EPSILON = 8.0
DELTA = 1e-5
WAYS = 5  # of an episode, if there are so many classes: the custom of the field
SHOTS = 1  # of a class; of a task
_TASK_SHOTS = 4
_STEPS = 300  # as were measured, see `pipelines`
_MOST_EPISODES = 360  # of a step, as the demo has
# Settings of the demo, which all kinds of data were measured with.
_OF_CLASSES: dict[str, Any] = {
    "l2_clip_norm": 0.1,
    "learner": {
        "kind": "protonet",
        "distance": "cosine",
        "temperature": 4.0,
        "resplits": True,
    },
    "model": {"kind": "linear", "embedding": 128},
    "optimizer": {"kind": "adam", "learning_rate": 0.01, "ema": 0.97},
}
# Those of train_schools.toml.
_OF_TASKS: dict[str, Any] = {
    "l2_clip_norm": 0.1,
    "learner": {
        "kind": "maml",
        "inner_steps": 1,
        "inner_learning_rate": 0.05,
        "loss": "squared_error",
    },
    "model": {"kind": "mlp", "channels": [32]},
    "optimizer": {"kind": "adam", "learning_rate": 5e-3, "schedule": "cosine"},
}


@dataclass(frozen=True)
class Wishes:
    """What a first config is to be.

    Attributes:
      epsilon: the target.
      delta: the target.
      unit: what is protected, a level of the data or "person"; None: an example.
      population: public number of examples of a class or task: of the fewest under
        add_remove, of the most under zero_out. None: counted in the data.
      relation: "add_remove" or "zero_out"; None: the one with more complete episodes
        a unit of noise, by the rule of thumb of `first_config`.
      ways: classes an episode.
      shots: support examples of each class, or of a task.

    Raises:
      TypeError, ValueError: a population or shots that are no whole number >= 1.
    """

    epsilon: float = EPSILON
    delta: float = DELTA
    unit: str | None = None
    population: int | None = None
    relation: str | None = None
    ways: int | None = None
    shots: int | None = None

    def __post_init__(self) -> None:
        for name in ("population", "shots"):
            if (value := getattr(self, name)) is not None:
                _validation.whole_number(name, value)


def first_config(source: Source, wishes: Wishes) -> tuple[str, list[str]]:
    """Returns the text of the config, and what to say beside it.

    Raises:
      TypeError, ValueError: wishes that the data, or the trainer, cannot fulfil.
      NotImplementedError: data of more levels than two.
    """
    data = source.parts[TRAIN]
    if len(data.level_names) != 2:
        raise NotImplementedError(
            "a first config is for classes (or tasks) and their examples, got levels "
            f"{data.level_names}; write one by hand (docs/training.md)"
        )
    description = _question(source, wishes)
    is_chosen = VALIDATION in source.parts
    pipeline = recommended_pipeline(description, is_chosen=is_chosen)
    asked = description.request
    if pipeline is not None:
        asked = pipeline.left_for_steps(asked)
    plan, said = None, []
    if asked.episode.ways is None or data.level_names[0] == CLASS:
        try:
            plan = make_plan(asked, description.population)
            said = advice(plan, asked, description.population)
        except (ValueError, NotImplementedError) as error:
            if pipeline is None or pipeline.learner is None:
                raise
            said = [f"no design of episodes: {error}"]
    config = _config(description, plan, pipeline)
    has_bound = wishes.population is not None
    comments = notes(source, description, has_bound)
    head = heading(description, plan, pipeline)
    if pipeline is not None:
        said = [f"pipeline: {pipeline.name}: {pipeline.reason}", *said]
    text = head + to_toml(config, comments)
    read = {"type": "TrainingConfig", **tomllib.loads(text)}
    TrainingConfig.from_dict(read, where="config")
    return text, said


def _question(source: Source, wishes: Wishes) -> PlanDescription:
    """What is asked of `plan`."""
    data = source.parts[TRAIN]
    classes, example = data.level_names
    unit = example if wishes.unit is None else wishes.unit
    if unit not in (classes, example, PERSON):
        raise ValueError(
            f"unit must be one of {(classes, example, PERSON)}, got {unit!r}"
        )
    is_regression = data.targets is not None
    sizes = data.population.children_counts[1]
    shots = _TASK_SHOTS if is_regression else SHOTS
    shots = shots if wishes.shots is None else wishes.shots
    _check_shots(source, shots)
    ways = None if is_regression else _ways(source, wishes)
    size = 2 * shots
    relation, population = _sizes(sizes, size, ways, wishes, unit == example)
    most = max(1, len(sizes) // (ways or 1))
    a_step = min(most, _MOST_EPISODES)
    people = None
    if unit == PERSON:
        if data.owners is None:
            raise ValueError("owner must be given with unit='person': whose what is")
        people = fitting_bounds(data)
    request = PlanRequest(
        epsilon=wishes.epsilon,
        delta=wishes.delta,
        episode=EpisodeShape(
            shots=shots, examples=(size,), ways=ways, population=population
        ),
        compute=Compute(episodes_per_step=a_step, total_episodes=_STEPS * a_step),
        learning=Learning(learning_rate_steps=_STEPS),
        privacy_unit=unit,
        people=people,
        neighboring_relation=relation,
        schemes=("poisson",),
    )
    return PlanDescription(
        request,
        data.population,
        _train_table(source, ways),
        source.table,
        source.feature_shape,
        None if data.people is None else data.people.people,
        data.has_public_units,
    )


def _check_shots(source: Source, shots: int) -> None:
    """Refuses so many that no class of a part has a query beside them."""
    for name, part in source.parts.items():
        most = int(part.population.children_counts[-1].max())
        if shots >= most:
            raise ValueError(
                f"shots must be less than {most}, the examples of the largest "
                f"{part.level_names[0]} of {name!r}, got {shots}: none is left to ask"
            )


def _ways(source: Source, wishes: Wishes) -> int:
    """Classes an episode: as many as every part has."""
    fewest = min(
        int(np.count_nonzero(part.population.children_counts[-1]))
        for part in source.parts.values()
    )
    if wishes.ways is not None and wishes.ways > fewest:
        raise ValueError(
            f"ways must be at most {fewest}, the classes of the smallest of "
            f"{tuple(source.parts)}, got {wishes.ways}"
        )
    if wishes.ways is not None and wishes.ways < 2:
        raise ValueError(
            f"ways must be at least 2, got {wishes.ways}: of one class every answer is "
            "right"
        )
    return wishes.ways or min(WAYS, fewest)


def _sizes(
    sizes: np.ndarray, size: int, ways: int | None, wishes: Wishes, is_example: bool
) -> tuple[str, int | None]:
    """The relation, and the public number of examples that goes with it.

    Slots (zero_out) cost less noise, and an empty one the whole episode: they are taken
    where a third of the episodes are complete.
    """
    most, fewest = int(sizes.max()), max(int(sizes.min()), 1)  # empty classes count
    if not is_example:
        return wishes.relation or ADD_REMOVE, wishes.population
    slots = wishes.population or most
    relation = wishes.relation
    if relation is None:
        drawn = min(size, slots)
        chances = [mean_product(np.ones(n), slots, drawn) for n in sizes.tolist()]
        share = mean_product(np.array(chances), len(sizes), ways or 1)
        fits = most <= slots and share >= LEAST_SHARE and ways is not None
        relation = ZERO_OUT if fits else ADD_REMOVE
    if relation == ZERO_OUT:
        return relation, slots
    return relation, wishes.population or fewest


def _train_table(source: Source, ways: int | None) -> dict[str, Any]:
    """The rest of the config, before a pipeline is chosen."""
    table = dict(_OF_TASKS if ways is None else _OF_CLASSES)
    shape = source.feature_shape
    if ways is not None and len(shape) == 3 and min(shape[:2]) >= LEAST_SIDE:
        table["features"] = {"kind": WAVELETS}
    held_out = [name for name in source.parts if name != TRAIN]
    if held_out:
        table["evaluation"] = {
            "splits": held_out,
            "queries": 5,
            "num_episodes": 600,
            "every": 100,
        }
    if ways is not None and VALIDATION not in held_out:
        # The last stage is released as it comes: it is to keep the features.
        table["model"] = {**table["model"], "skip": True}
    return table


def _config(
    description: PlanDescription, plan: Plan | None, pipeline: Pipeline | None
) -> dict[str, Any]:
    """The config of the pipeline, and of the recommended design if it takes any."""
    takes_episodes = pipeline is None or pipeline.learner is None
    if plan is not None and takes_episodes:
        config = training_config(plan, description)
        assert config is not None  # there are data, and a table train
    else:
        config = _without_episodes(description)
    if pipeline is not None:
        config = pipeline.config(config)
    order = ("version", "epsilon", "delta", "num_steps", "l2_clip_norm", "normalizer")
    first = {key: config[key] for key in order if key in config}
    tables = ("data", "features", "start", "step", "people", "learner", "model")
    then = {key: config[key] for key in tables if key in config}
    return {**first, **then, **{k: v for k, v in config.items() if k not in then}}


def _without_episodes(description: PlanDescription) -> dict[str, Any]:
    """A config whose step is never taken as it stands: statistics are all, or first."""
    names, tree = description.population.level_names, description.population
    episode = description.request.episode
    if episode.ways is None:
        levels: list[dict[str, Any]] = [
            {"type": "Poisson", "name": name, "sampling_probability": 1.0}
            for name in names
        ]
    else:
        sizes = (
            (episode.ways, tree.num_units(1)),
            (episode.examples[0], episode.population),
        )
        levels = [
            {
                "type": "WithoutReplacement",
                "name": name,
                "size": size,
                **({} if number is None else {"population": number}),
            }
            for name, (size, number) in zip(names, sizes, strict=True)
        ]
    clip_unit = names[0] if episode.ways is None else STEP
    sampling = {"type": "MultistageSampling", "levels": levels}
    return config_around(description, _STEPS, clip_unit, sampling)
