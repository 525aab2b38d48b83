"""JAX Privacy: accounts for its plans, strategies and training parameters."""

from jaxdp_episodic.accountant.interop.dp_accounting import EpisodicAccountant
from jaxdp_episodic.accountant.interop.jax_privacy import (
    from_dp_params,
    from_execution_plan,
    training_config,
)

__all__ = [
    "EpisodicAccountant",
    "from_dp_params",
    "from_execution_plan",
    "training_config",
]
