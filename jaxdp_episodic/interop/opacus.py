"""Opacus: our accountants and draws under its interface.

Importing it registers the accountant "episodic".
"""

from jaxdp_episodic.accountant.interop.opacus import EpisodicAccountant, StepAccountant
from jaxdp_episodic.trainer.draw.step_loader import step_loader

__all__ = ["EpisodicAccountant", "StepAccountant", "step_loader"]
