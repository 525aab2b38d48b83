"""Our accountant dressed as those of opacus; see `stand_ins`."""

from __future__ import annotations

from typing import Any

import numpy as np
import opacus.accountants as accountants
from opacus.accountants import prv, rdp, registry

from experiments.peers.stand_ins import ASKED, Asked
from jaxdp_episodic.accountant.interop.opacus import EpisodicAccountant

THEIRS = {"rdp": accountants.RDPAccountant, "prv": accountants.PRVAccountant}


class _StandIn(EpisodicAccountant):
    """What both share: the answers are remembered."""

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Ours, remembered."""
        ours = super().get_epsilon(delta)
        history, name = list(self.history), self.mechanism()

        def theirs(finer: bool) -> float:
            accountant = THEIRS[name]()
            accountant.history = history
            more = _FINER[name](delta) if finer else options
            return float(accountant.get_epsilon(delta, **more))

        ASKED.append(Asked(ours, theirs))
        return ours


_FINER = {
    "rdp": lambda delta: {"alphas": list(np.linspace(1.02, 63, 1_000))},
    "prv": lambda delta: {"eps_error": 1e-3, "delta_error": delta / 1e4},
}


class RDPStandIn(_StandIn):
    """For ``RDPAccountant``: Rényi-DP at the best order."""

    def __init__(self) -> None:
        super().__init__("rdp")

    @classmethod
    def mechanism(cls) -> str:
        """Its name."""
        return "rdp"


class PRVStandIn(_StandIn):
    """For ``PRVAccountant``: exact."""

    @classmethod
    def mechanism(cls) -> str:
        """Its name."""
        return "prv"


def install() -> None:
    """Puts our stand-ins into opacus' modules and its registry."""
    for place in (accountants, rdp, registry):
        vars(place)["RDPAccountant"] = RDPStandIn
    for place in (accountants, prv, registry):
        vars(place)["PRVAccountant"] = PRVStandIn
    accountants.register_accountant("rdp", RDPStandIn, force=True)
    accountants.register_accountant("prv", PRVStandIn, force=True)
