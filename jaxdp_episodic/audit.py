"""Audits: measured lower bounds of epsilon beside the claimed ones.

Of mechanisms, releases, runs of the trainer and people. See docs/audit.md.
"""

from jaxdp_episodic.trainer.audit.confidence import EpsilonBound, clopper_pearson
from jaxdp_episodic.trainer.audit.mechanism import MechanismAudit, audit_mechanism
from jaxdp_episodic.trainer.audit.one_run import (
    Guesses,
    best_guesses,
    one_run_epsilon,
    one_run_p_value,
)
from jaxdp_episodic.trainer.audit.people import audit_person
from jaxdp_episodic.trainer.audit.release import (
    ReleaseAudit,
    audit_release,
    claimed_epsilons,
)
from jaxdp_episodic.trainer.audit.report import (
    AuditRow,
    audit_document,
    audit_markdown,
    mechanism_rows,
    release_rows,
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
    "MechanismAudit",
    "OnStep",
    "ReleaseAudit",
    "Training",
    "TrainingAudit",
    "audit_document",
    "audit_markdown",
    "audit_mechanism",
    "audit_person",
    "audit_release",
    "audit_run",
    "audit_statistics",
    "audit_steps",
    "best_guesses",
    "claimed_epsilons",
    "clopper_pearson",
    "mechanism_rows",
    "one_run_epsilon",
    "one_run_p_value",
    "release_rows",
    "training_of_config",
]
