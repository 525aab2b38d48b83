"""Privacy accounting inside JAX programs: under jit, vmap, grad, scan and others.

The functions answer the same questions as those of `jaxdp_episodic`, for descriptions
whose numbers may be traced by JAX. See docs/in_jax.md.
"""

from jaxdp_episodic.accountant.questions.traced import (
    delta,
    epsilon,
    noise_multiplier,
    rdp,
)

__all__ = ["delta", "epsilon", "noise_multiplier", "rdp"]
