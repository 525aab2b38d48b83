"""Faults in correlated noise: in the noise, the memory, the turns and the sizes."""

from __future__ import annotations

from jaxdp_episodic.accountant.describe import bands as described
from jaxdp_episodic.trainer.gradient import bands, private_gradient
from jaxdp_episodic.trainer.run import ledger, trainer
from mutation import band_audits
from mutation.planting import AUDIT, LEDGER, Edit, Fault

_NORM = "clip_norm.longest(self.clipping) * self._longer"

BAND_FAULTS = (
    Fault(
        "noise of bands without the norm of their coefficients",
        (
            Edit(
                private_gradient.PrivateGradient,
                "noise",
                _NORM,
                "clip_norm.longest(self.clipping)",
            ),
        ),
        AUDIT,
        band_audits.canaries,
        "a contribution is in several releases, and as long as all of its shares",
        is_slow=True,
    ),
    Fault(
        "noise of bands without the count",
        (Edit(private_gradient.PrivateGradient, "noise", _NORM, "self._longer"),),
        AUDIT,
        band_audits.counted,
        "gradient and vote are one contribution, which is longer than the gradient",
        is_slow=True,
    ),
    Fault(
        "sums kept when a step is given up",
        (
            Edit(
                bands.BandMemory,
                "clear",
                "self._sums: list[list[np.ndarray]] = []",
                "self._sums = getattr(self, '_sums', [])",
            ),
        ),
        LEDGER,
        band_audits.decoded,
        "later releases hold a sum that nobody can decode",
        is_slow=True,
    ),
    Fault(
        "groups numbered by released steps",
        (
            Edit(
                ledger.Ledger,
                "turn",
                "number - 1 - len(self._budget.before)",
                "number - 1 - len(self._budget.before) - getattr(self, 'lost', 0)",
            ),
            Edit(
                trainer.Trainer,
                "_give_up_unreleased",
                "self._now = (state, charged)",
                "self._now = (state, charged)\n"
                "    self.ledger.lost = getattr(self.ledger, 'lost', 0) + 1",
            ),
        ),
        LEDGER,
        band_audits.turns,
        "after a step given up the same group is charged again, a step later",
        is_slow=True,
    ),
    Fault(
        "the largest group's size charged",
        (Edit(described, "_part", "number // count", "-(-number // count)"),),
        AUDIT,
        band_audits.sizes,
        "of seven slots in four groups one group has one, which is always drawn",
    ),
)
