"""Privacy accounting inside JAX programs: under jit, vmap, grad, scan and others.

These functions answer the same questions as their namesakes in the package, for
descriptions whose numbers may be traced by JAX. See docs/in_jax.md.
"""

from jaxdp_episodic.accountant.questions.traced import (
    delta,
    epsilon,
    noise_multiplier,
    rdp,
)

__all__ = ["delta", "epsilon", "noise_multiplier", "rdp"]
