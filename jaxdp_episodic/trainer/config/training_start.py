"""The private statistics of a run, their shares of the budget and their steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.schemes import (
    OWNED,
    PERSON,
    MultistageSampling,
    Poisson,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.training_parts import CLOSED_FORM, MIXED, PLDA
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Positive,
    numbers,
    one_of,
    whole,
    within,
)

MEAN = "mean"
CLASS = "class"
PEOPLE = "people"
TOTAL = "total"
MEANS = "means"
PAIR = "pair"  # level of pairs of examples
GIVEN = "contribution"  # level of each person's contribution
# Default share of the budget if gradient steps follow.
_SHARES = {MEAN: 0.02, PLDA: 0.6}
MOST_FEATURES = 4096  # their covariance takes 128 MB
MOST_SLOPES = 63  # n slopes have (n + 1)^4 moments of pairs
MOST_POWERS = 8
_MOST_STAGES = 64  # of the covariance within classes

Share = Annotated[float, within(0.0, 1.0, "()")]
Stages = functools.partial(
    numbers, most=_MOST_STAGES, check=_validation.positive_array, what="shares"
)


class StartConfig(CheckedSpec):
    """Private statistics that a run begins with.

    Attributes:
      kind: "plda"; "mean": only the mean, which is subtracted; or "mixed", for the
        learner of that name.
      share: of the budget, in (0, 1); see `plan_budget`. None: 0.6 for "plda", 0.02 for
        "mean". All of it if nothing follows (``learner.kind`` "plda", "mixed").
      mean: share of the mean among the statistics; it and the next two sum to 1.
      within: share of each stage of the covariance within classes.
      total: share of the last statistic, which says how classes differ.
      between: the last statistic: "total", the covariance of all examples; or "means",
        the mean of every class, if examples are protected: fewer numbers and so less
        noise, if there are fewer classes than features.
      pairs: if people are protected, "class": examples are paired at random within each
        class, for people who share few classes; or "people": people are paired, and the
        pairs in all classes that they share are one contribution.
      num_people: public number of people, or of slots for them; needed under zero_out
        if people are paired.
      dimensions: largest number of directions that are kept; None: all. Keep all if
        there are few classes or much noise.
      pooled: of "mixed", as the rest: share in (0, 1) of what all tasks have in common;
        the pairs of examples of a task have the rest.
      powers: number of powers of each feature in the common line; see `MixedModel`.
      slopes: number of features, the first ones, that have a slope in each task.
      target_bound: public bound to which the targets are clipped.
    """

    kind: Annotated[str, one_of(MEAN, PLDA, MIXED)] = PLDA
    share: Share | None = None
    mean: Positive = 0.02
    within: Annotated[tuple[float, ...], Stages] = (0.05, 0.1, 0.2, 0.35)
    total: Positive = 0.28
    between: Annotated[str, one_of(TOTAL, MEANS)] = TOTAL
    pairs: Annotated[str, one_of(CLASS, PEOPLE)] = CLASS
    num_people: Count | None = None
    dimensions: Annotated[int, whole(1, MOST_FEATURES)] | None = None
    pooled: Share = 0.5
    powers: Annotated[int, whole(1, MOST_POWERS)] = 2
    slopes: Annotated[int, whole(0, MOST_SLOPES)] = 1
    target_bound: Positive = 1.0

    def check_values(self) -> None:
        """Refuses shares that do not sum to 1."""
        total = math.fsum((self.mean, *self.within, self.total))
        if abs(total - 1) > 1e-9:
            raise ValueError(
                "the shares mean, within and total must sum to 1, got "
                f"{self.mean}, {list(self.within)} and {self.total}: {total:.10g}"
            )

    def check_use(self, learner: str, num_steps: int | None) -> None:
        """Refuses statistics that do not fit the kind of learner and its steps."""
        alone = learner in CLOSED_FORM
        if alone and (self.kind != learner or self.share is not None):
            raise ValueError(
                f"start must be of kind {learner!r} and without a share with "
                f"learner.kind={learner!r}, which spends all of the budget on it"
            )
        if not alone and self.kind == MIXED:
            raise ValueError(
                f"start.kind={MIXED!r} is for learner.kind={MIXED!r}, got {learner!r}"
            )
        if not alone and num_steps is None:
            raise ValueError("num_steps must be given with start, got None")

    def shares(self, is_all: bool) -> tuple[float, ...]:
        """Returns each statistic's share of the budget; ``is_all``: no steps follow."""
        given = _SHARES.get(self.kind, 1.0) if self.share is None else self.share
        own = {
            MEAN: (1.0,),
            PLDA: (self.mean, *self.within, self.total),
            MIXED: (self.pooled, 1 - self.pooled),
        }[self.kind]
        return tuple((1.0 if is_all else given) * share for share in own)


def statistics_steps(
    levels: Sequence[str],
    config: StartConfig,
    *,
    privacy_unit: str,
    neighboring_relation: str,
) -> tuple[GaussianStep, ...]:
    """Returns the step of each statistic, in order, with a noise multiplier of 1."""
    *_, class_level, example_level = levels
    units = (class_level, example_level, *OWNED)
    _validation.choice("privacy_unit", privacy_unit, units)
    if PAIR in levels:
        raise ValueError(
            f"no level of the data may be named {PAIR!r} with private statistics, got "
            f"{tuple(levels)}"
        )
    is_person = privacy_unit in OWNED
    if config.pairs == PEOPLE and not is_person:
        raise ValueError(
            f"start.pairs={PEOPLE!r} is for privacy_unit={PERSON!r}, got "
            f"{privacy_unit!r}"
        )
    if config.between == MEANS and privacy_unit != example_level:
        raise ValueError(
            f"start.between={MEANS!r} is for privacy_unit={example_level!r}, got "
            f"{privacy_unit!r}"
        )

    def step(*names: str, clip_unit: str) -> GaussianStep:
        everybody = [Poisson(name, sampling_probability=1.0) for name in names]
        bounds = dict.fromkeys(("examples", "classes")[: len(names)], 1)
        return GaussianStep(
            MultistageSampling(*everybody),
            noise_multiplier=1.0,
            clip_unit=clip_unit,
            privacy_unit=privacy_unit,
            neighboring_relation=neighboring_relation,
            people=PersonBounds(**bounds) if is_person else None,
        )

    if is_person:
        one = step(GIVEN, clip_unit=GIVEN)
        pairs = step(PAIR, GIVEN, clip_unit=PAIR)
    else:
        one = pairs = step(*levels, clip_unit=privacy_unit)
        if privacy_unit == example_level:
            pairs = step(*levels[:-1], PAIR, example_level, clip_unit=PAIR)
    if config.kind == PLDA:
        return (one, *[pairs] * len(config.within), one)
    return (one,) if config.kind == MEAN else (one, pairs)


def contribution_norm(step: GaussianStep) -> float:
    """Returns the norm that the noise multiplier of a statistic's step is relative to.

    If one contribution is replaced by another the step counts twice its norm, but the
    two are at most sqrt(2) apart, as if each had norm sqrt(1/2). Otherwise it is 1.
    """
    of_pair = step.clip_unit == PAIR
    relation = step.neighboring_relation
    is_replaced = relation == "replace_one" or (of_pair and relation == "add_remove")
    return math.sqrt(0.5) if is_replaced else 1.0
