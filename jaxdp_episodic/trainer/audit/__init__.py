"""Attempts to break the library's own promises: lower bounds next to claimed epsilons.

Audits of real training runs are in `jaxdp_episodic.trainer.audit.training`, and those
of people in `jaxdp_episodic.trainer.audit.people`; they are imported by themselves,
because they bring the trainer.

Doors: `mechanism`, `report`, `training`.
"""

from jaxdp_episodic.trainer.audit.confidence import EpsilonBound, clopper_pearson
from jaxdp_episodic.trainer.audit.mechanism import MechanismAudit, audit_mechanism
from jaxdp_episodic.trainer.audit.one_run import (
    Guesses,
    best_guesses,
    one_run_epsilon,
    one_run_p_value,
)
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

__all__ = [
    "AuditRow",
    "EpsilonBound",
    "Guesses",
    "MechanismAudit",
    "ReleaseAudit",
    "audit_document",
    "audit_markdown",
    "audit_mechanism",
    "audit_release",
    "best_guesses",
    "claimed_epsilons",
    "clopper_pearson",
    "mechanism_rows",
    "one_run_epsilon",
    "one_run_p_value",
    "release_rows",
]
