"""What a person costs in Omniglot's episodes: the noise for epsilon 8, by design.

``python experiments/people_table.py`` prints the smallest noise multipliers for
epsilon 8 at delta 1e-5 after 300 steps: 964 training classes of 20 drawings, each by
another of 20 people; 5-way episodes of one shot and one query, 8 of them a step.
"""

from __future__ import annotations

import math
import time

import jaxdp_episodic as jde

# 8 of 192 episodes a step on average.
EPISODES = jde.Poisson("episode", sampling_probability=1 / 24)
DRAWINGS = jde.WithoutReplacement("example", size=2, population=20)
EVERYBODY = jde.PersonBounds(examples=1, classes=964)


def grouped(**fields: object) -> jde.GaussianStep:
    """Returns the step that partitions all classes into episodes."""
    design = jde.GroupedClasses(
        num_classes=964, ways=5, episodes=EPISODES, examples=DRAWINGS
    )
    return jde.GaussianStep(design, noise_multiplier=1.0, **fields)  # pyright: ignore[reportArgumentType]: by name


def blocks(
    people: int, each: int, rate: float, relation: str, *, of_slots: bool = False
) -> jde.GaussianStep:
    """Returns the step of episodes within blocks of people."""
    inside = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=5, population=964),
        jde.WithoutReplacement("example", size=2, population=each),
    )
    design = jde.PeopleBlocks(
        num_people=people,
        people_per_block=each,
        episodes=jde.Poisson("episode", sampling_probability=rate),
        sampling=inside if of_slots else None,
    )
    return jde.GaussianStep(
        design,
        noise_multiplier=1.0,
        neighboring_relation=relation,
        people=EVERYBODY if of_slots else None,
    )


def person(relation: str) -> jde.GaussianStep:
    """Returns the step whose unit is a person."""
    return grouped(
        privacy_unit="person", people=EVERYBODY, neighboring_relation=relation
    )


STEPS = {
    "one drawing": grouped(neighboring_relation="zero_out"),
    "one class": grouped(privacy_unit="class", neighboring_relation="zero_out"),
    "one person, zero_out": person("zero_out"),
    "one person, replace_one": person("replace_one"),
    "one person, add_remove": person("add_remove"),
    "10 blocks of 2, zero_out": blocks(20, 2, 0.8, "zero_out"),
    "10 blocks of 2, replace_one": blocks(20, 2, 0.8, "replace_one"),
    "10 blocks of 2, all in every step": blocks(20, 2, 1.0, "zero_out"),
    "5 blocks of 4, among slots": blocks(20, 4, 0.8, "zero_out", of_slots=True),
    "20,000 people, blocks of 20, zero_out": blocks(20_000, 20, 0.008, "zero_out"),
    "20,000 people, blocks of 20, add_remove": blocks(20_000, 20, 0.008, "add_remove"),
}


def main() -> None:
    """Prints the table."""
    targets = {name: (step, 8.0, 1e-5) for name, step in STEPS.items()}
    # What one drawing must have for 964 of them to have these (Vadhan 2017, Lemma 2.2).
    one = 8.0 / 964
    delta = 1e-5 * math.expm1(one) / math.expm1(8.0)
    targets["964 drawings by group privacy, zero_out"] = (
        STEPS["one drawing"],
        one,
        delta,
    )
    for name, (step, epsilon, delta) in targets.items():
        start = time.perf_counter()
        noise = jde.calibrate_noise_multiplier(
            step, epsilon=epsilon, delta=delta, num_steps=300
        )
        print(f"{name:42} {noise:10.6f}  {time.perf_counter() - start:5.1f} s")


if __name__ == "__main__":
    main()
