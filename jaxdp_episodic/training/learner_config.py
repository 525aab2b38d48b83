"""The learner of a run, as its config has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.spec import (
    Spec,
    check_flags,
    set_positive,
    set_whole_numbers,
)
from jaxdp_episodic.training.learners import (
    ANIL,
    COSINE,
    CROSS_ENTROPY,
    DISTANCES,
    EUCLIDEAN,
    LOSSES,
    MAML,
    SQUARED_ERROR,
    ProtoNet,
)

PLDA, MIXED = "plda", "mixed"
CLOSED_FORM = (PLDA, MIXED)  # private statistics alone, without gradient steps
KINDS = ("protonet", "maml", "anil", *CLOSED_FORM)
_LOSS_OF = {"protonet": CROSS_ENTROPY, PLDA: CROSS_ENTROPY, MIXED: SQUARED_ERROR}
# What an untrusted config may make of an episode's inner loop.
_MOST_INNER_STEPS = 10_000


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnerConfig(Spec):
    """What an episode teaches, and how.

    Attributes:
      kind: "protonet", "maml", "anil"; "plda", "mixed": private statistics alone.
      shots: support examples, of each class or of the task.
      distance: of "protonet": "euclidean" or "cosine".
      temperature: of "protonet": factor of the logits.
      resplits: of "protonet": train on every example as support.
      inner_steps: gradient steps on the support set (not for ProtoNet).
      inner_learning_rate: of these steps.
      first_order: do not differentiate through the inner steps' gradients.
      checkpoint: recompute the inner steps in the backward pass: less memory, more
        time.
      loss: "cross_entropy" (classification) or "squared_error" (regression).
      head: of "anil": top-level key of the parameters that are adapted.
    """

    kind: str
    shots: int
    distance: str = EUCLIDEAN
    temperature: float = 1.0
    resplits: bool = False
    inner_steps: int = 3
    inner_learning_rate: float = 0.1
    first_order: bool = False
    checkpoint: bool = False
    loss: str = CROSS_ENTROPY
    head: str = "head"

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, KINDS)
        _validation.choice("loss", self.loss, LOSSES)
        set_whole_numbers(self, "shots")
        _validation.choice("distance", self.distance, DISTANCES)
        set_whole_numbers(self, "inner_steps", maximum=_MOST_INNER_STEPS)
        set_positive(self, "inner_learning_rate", "temperature")
        check_flags(self, "first_order", "checkpoint", "resplits")
        if not isinstance(self.head, str):
            raise TypeError(f"head must be a string, got {self.head!r}")
        loss = _LOSS_OF.get(self.kind, self.loss)
        if self.loss != loss:
            raise ValueError(f"loss must be {loss!r} with kind={self.kind!r}")

    @property
    def is_regression(self) -> bool:
        """True if the targets are numbers."""
        return self.loss == SQUARED_ERROR

    def learner(self, apply: Any, ways: int | None) -> Any:
        """Returns the learner for a model's ``apply(params, inputs)``."""
        if self.kind in ("protonet", PLDA):
            return ProtoNet(
                apply,
                ways=int(ways or 1),
                distance=COSINE if self.kind == PLDA else self.distance,
                temperature=self.temperature,
                resplits=self.resplits,
            )
        inner = {
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "first_order": self.first_order,
            "checkpoint": self.checkpoint,
            "task_loss": self.loss,
        }
        if self.kind == "maml":
            return MAML(apply, **inner)
        return ANIL(apply, head=self.head, **inner)
