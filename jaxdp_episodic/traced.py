"""Questions within JAX programs: under jit, vmap, grad, scan and all the others.

The same questions as outside, of descriptions whose numbers JAX may trace.
See docs/in_jax.md.
"""

from jaxdp_episodic.accountant.questions.traced import (
    delta,
    epsilon,
    noise_multiplier,
    rdp,
)

__all__ = ["delta", "epsilon", "noise_multiplier", "rdp"]
