"""The sampler of what was described."""

from jaxdp_episodic.draw.sampler import Draw, EpisodeSampler, step_generator

__all__ = ["Draw", "EpisodeSampler", "step_generator"]
