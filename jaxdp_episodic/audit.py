"""Audits: measured lower bounds on epsilon, to compare with the claimed epsilon.

They audit described steps, releases, and runs of the trainer. See docs/audit.md.
"""

from jaxdp_episodic.trainer.audit.bounds import (
    AuditRow,
    EpsilonBound,
    Guesses,
    audit_document,
    audit_markdown,
    best_guesses,
    clopper_pearson,
    one_run_epsilon,
    one_run_p_value,
    release_rows,
    score_bounds,
)
from jaxdp_episodic.trainer.audit.game import (
    ReleaseAudit,
    World,
    audit_mechanism,
    audit_release,
    audit_worlds,
    claimed_epsilons,
)
from jaxdp_episodic.trainer.audit.training import (
    GRADIENT,
    INPUT,
    KINDS,
    OnStep,
    Training,
    TrainingAudit,
    audit_run,
    audit_statistics,
    audit_steps,
    training_of_config,
)

__all__ = [
    "GRADIENT",
    "INPUT",
    "KINDS",
    "AuditRow",
    "EpsilonBound",
    "Guesses",
    "OnStep",
    "ReleaseAudit",
    "Training",
    "TrainingAudit",
    "World",
    "audit_document",
    "audit_markdown",
    "audit_mechanism",
    "audit_release",
    "audit_run",
    "audit_statistics",
    "audit_steps",
    "audit_worlds",
    "best_guesses",
    "claimed_epsilons",
    "clopper_pearson",
    "one_run_epsilon",
    "one_run_p_value",
    "release_rows",
    "score_bounds",
    "training_of_config",
]
