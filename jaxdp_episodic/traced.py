"""Privacy accounting inside JAX programs: under jit, vmap, grad, scan and others.

These functions answer the same questions as their namesakes in the package, for
descriptions whose numbers may be traced by JAX. See docs/in_jax.md.
"""

from jaxdp_episodic.accountant.questions.traced import (
    delta as delta,
    epsilon as epsilon,
    noise_multiplier as noise_multiplier,
    rdp as rdp,
)
