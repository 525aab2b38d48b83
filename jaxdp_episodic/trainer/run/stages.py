"""What a run can release after each stage: post-processing of its releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxdp_episodic.trainer.config.training_parts import BOTH, HIDDEN, LOGITS
from jaxdp_episodic.trainer.learners.learners import Classifier
from jaxdp_episodic.trainer.learners.untrained import untrained
from jaxdp_episodic.trainer.run.state import TrainingState, released_params
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

FEATURES = "features"
INITIAL = "initial"
STEPS = "steps"


class Stage(NamedTuple):
    """Something that a run can release: ``evaluation(learner, params)`` scores it.

    Attributes:
      name: from the simplest on: "features" (as they are: nearest class mean or, of
        numbers, `Ridge` on the task's own support; nothing of anybody is in it),
        "initial" (of a run without statistics: the network before any step), "mean"
        (the mean taken off; of a mixed model the line of all tasks), "within" (before
        means of classes: whitened within these, and no more), "statistics", "steps"
        (the parameters after gradient steps, or their average, where the optimizer
        keeps one), "steps@N" (those after step N); of a `Classifier` also
        "steps/logits" and the like, of what else prototypes can be taken.
      learner: that predicts.
      params: its released parameters.
    """

    name: str
    learner: Any
    params: Any


@dataclass(frozen=True)
class Stages:
    """Makes the stages of a run; ``initial`` are its first parameters."""

    learner: Any
    start: PrivateStatistics | None
    initial: Any
    ways: int

    @property
    def judged(self) -> Any:
        """The learner on examples that predicts by the run's parameters."""
        return self.learner if self.start is None else self.start.learner(self.learner)

    def of(self, state: TrainingState, *, has_stepped: bool) -> tuple[Stage, ...]:
        """Returns the stages of a state, the simplest first."""
        simple = untrained(self.learner, self.ways)
        found = [Stage(FEATURES, simple, {})]
        if self.start is not None:
            on_features = self.start.learner(simple)
            for name, released in self.start.stages(state.start).items():
                params = {"start": released, "model": {}}
                found.append(Stage(name, on_features, params))
        elif jax.tree.leaves(self.initial):
            found.append(Stage(INITIAL, self.judged, self.initial))
        if has_stepped:
            found += self.stepped(released_params(state))
        return tuple(found)

    def stepped(self, params: Any, at: str = "") -> list[Stage]:
        """The stages that parameters after gradient steps give; the run's own last."""
        whole = Stage(f"{STEPS}{at}", self.judged, params)
        learner = self.learner
        if not isinstance(learner, Classifier) or learner.features is None:
            return [whole]
        # A model of the last layer alone sees the examples' own features.
        has_more = isinstance(self.initial, Mapping) and len(self.initial) > 1
        others = (LOGITS, HIDDEN, BOTH) if has_more else (LOGITS, BOTH)
        stages = []
        for embed in others:
            if embed != learner.embed:
                other = dataclasses.replace(learner, embed=embed)
                judged = other if self.start is None else self.start.learner(other)
                stages.append(Stage(f"{STEPS}/{embed}{at}", judged, params))
        return [*stages, whole]
