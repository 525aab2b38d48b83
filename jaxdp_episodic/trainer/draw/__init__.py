"""Samplers that draw exactly what a description says.

Doors: `complete`, `generators`, `groups`, `sampler`, `step_loader`.
"""

from jaxdp_episodic.trainer.draw.generators import step_generator
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler

__all__ = ["Draw", "EpisodeSampler", "step_generator"]
