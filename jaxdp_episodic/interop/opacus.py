"""Opacus: these accountants, and data loaders, with its interface.

Importing this module registers the accountant "episodic" with Opacus.
"""

from jaxdp_episodic.accountant.interop.opacus import (
    EpisodicAccountant as EpisodicAccountant,
    StepAccountant as StepAccountant,
)
from jaxdp_episodic.trainer.draw.step_loader import step_loader as step_loader
