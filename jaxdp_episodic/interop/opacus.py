"""Opacus: these accountants, and data loaders, with its interface.

Importing this module registers the accountant "episodic" with Opacus.
"""

from jaxdp_episodic.accountant.interop.opacus import EpisodicAccountant, StepAccountant
from jaxdp_episodic.trainer.draw.step_loader import step_loader

__all__ = ["EpisodicAccountant", "StepAccountant", "step_loader"]
