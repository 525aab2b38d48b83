"""Audits: measured lower bounds on epsilon, to compare with the claimed epsilon.

They audit described steps, releases, and runs of the trainer. See docs/audit.md.
"""

from jaxdp_episodic.trainer.audit.bounds import (
    EpsilonBound as EpsilonBound,
    Guesses as Guesses,
    best_guesses as best_guesses,
    clopper_pearson as clopper_pearson,
    one_run_epsilon as one_run_epsilon,
    one_run_p_value as one_run_p_value,
    score_bounds as score_bounds,
)
from jaxdp_episodic.trainer.audit.game import (
    ReleaseAudit as ReleaseAudit,
    World as World,
    audit_mechanism as audit_mechanism,
    audit_release as audit_release,
    audit_worlds as audit_worlds,
    claimed_epsilons as claimed_epsilons,
)
from jaxdp_episodic.trainer.audit.report import (
    AuditRow as AuditRow,
    audit_document as audit_document,
    audit_markdown as audit_markdown,
    release_rows as release_rows,
)
from jaxdp_episodic.trainer.audit.training import (
    GRADIENT as GRADIENT,
    INPUT as INPUT,
    KINDS as KINDS,
    OnStep as OnStep,
    Training as Training,
    TrainingAudit as TrainingAudit,
    audit_run as audit_run,
    audit_statistics as audit_statistics,
    audit_steps as audit_steps,
    training_of_config as training_of_config,
)
