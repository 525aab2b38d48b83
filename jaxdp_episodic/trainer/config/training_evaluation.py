"""How a training config has its model judged: no arrays, no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec, check_flags, set_whole_numbers

_MOST_EPISODES = 10**7  # that an untrusted config may ask of an evaluation


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationConfig(Spec):
    """How the model is judged on held-out tasks.

    Attributes:
      splits: names of the held-out parts of the data, e.g. ("validation",).
      ways: classes an episode, of prototypes only, which tell as many apart as there
        are; None: as in training.
      shots: support examples, of each class or of the task; None: as in training.
      queries: query examples, of each class or of the task.
      num_episodes: episodes, at least 2; 600 is the custom of the field.
      every: steps between evaluations; None: steps are scored after the last alone.
      select: release the simplest stage within a standard error of the best on the
        split "validation", else on the first that is not "test"; false: the last one.
        None: true, but where people are protected, who may be in both parts.
      without_noise: also train without noise, for the private report's picture. Only
        the scores are kept.
    """

    splits: tuple[str, ...] = ("validation",)
    ways: int | None = None
    shots: int | None = None
    queries: int = 5
    num_episodes: int = 600
    every: int | None = None
    select: bool | None = None
    without_noise: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "without_noise", *["select"] * (self.select is not None))
        if not isinstance(self.splits, list | tuple) or not all(
            isinstance(name, str) for name in self.splits
        ):
            shown = _validation.shown(self.splits)
            raise TypeError(f"splits must be a list of names, got {shown}")
        object.__setattr__(self, "splits", tuple(self.splits))
        set_whole_numbers(self, "queries")
        set_whole_numbers(self, "num_episodes", minimum=2, maximum=_MOST_EPISODES)
        for name in ("ways", "shots", "every"):
            if getattr(self, name) is not None:
                set_whole_numbers(self, name)
