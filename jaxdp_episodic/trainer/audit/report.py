"""Tables of audits: claimed epsilons, lower bounds and the gaps between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.trainer.audit.bounds import EpsilonBound, Guesses
from jaxdp_episodic.trainer.audit.game import ReleaseAudit


class AuditRow(NamedTuple):
    """One claim and its audit.

    Attributes:
      name: of the design or run.
      attacker: what was audited.
      delta: of the claim.
      claimed_rdp: nats, *upper bound*; None if it was not computed.
      claimed_exact: nats, *upper bound*.
      evidence: the audit, whose ``epsilon`` is a *lower bound*.
    """

    name: str
    attacker: str
    delta: float
    claimed_rdp: float | None
    claimed_exact: float
    evidence: EpsilonBound | Guesses

    @property
    def audited(self) -> float:
        """The lower bound, nats."""
        return self.evidence.epsilon

    @property
    def gap(self) -> float:
        """Difference between the exact claim and the lower bound, nats."""
        return self.claimed_exact - self.audited

    @property
    def share(self) -> float:
        """Lower bound divided by the exact claim; 0 if nothing is claimed."""
        return self.audited / self.claimed_exact if self.claimed_exact > 0 else 0.0

    @property
    def claimed(self) -> float:
        """The smallest claim, nats."""
        rdp = math.inf if self.claimed_rdp is None else self.claimed_rdp
        return min(self.claimed_exact, rdp)

    @property
    def is_above(self) -> bool:
        """True if the lower bound exceeds a claim, which may be chance."""
        return self.audited > self.claimed

    @property
    def is_violated(self) -> bool:
        """True if the audit disproves a claim; see the evidence's ``disproves``."""
        return self.evidence.disproves(self.claimed)


def release_rows(name: str, audit: ReleaseAudit, attacker: str) -> list[AuditRow]:
    """Returns one row for each delta."""
    return [
        AuditRow(name, attacker, bound.delta, None, float(claim), bound)
        for claim, bound in zip(audit.claimed, audit.bounds, strict=True)
    ]


def audit_document(rows: Sequence[AuditRow], **facts: Any) -> dict[str, Any]:
    """Returns the rows as plain values for JSON; infinite numbers as strings."""
    document = {
        "version": 1,
        **facts,
        "is_violated": any(row.is_violated for row in rows),
        "rows": [
            {
                **row._asdict(),
                "audited": row.audited,
                "gap": row.gap,
                "share_of_exact": row.share,
                "is_above": row.is_above,
                "is_violated": row.is_violated,
                "evidence": row.evidence._asdict(),
            }
            for row in rows
        ],
    }
    return plain(document)


def audit_markdown(rows: Sequence[AuditRow]) -> str:
    """Returns the rows as a Markdown table; claims rounded up, lower bounds down."""
    lines = [
        "| design | attacker | delta | claimed, RDP | claimed, exact | audited | gap "
        "| audited / exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rdp = "" if row.claimed_rdp is None else upward(row.claimed_rdp)
        mark = " above" if row.is_above else ""
        mark = " **violated**" if row.is_violated else mark
        lines.append(
            f"| {row.name} | {row.attacker} | {row.delta:.15g} | {rdp} | "
            f"{upward(row.claimed_exact)} | {downward(row.audited)}{mark} | "
            f"{upward(row.gap)} | {row.share:.1%} |"
        )
    return "\n".join(lines) + "\n"
