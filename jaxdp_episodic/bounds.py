"""Standalone theorems: subsampling, composition, shuffling, iteration.

See docs/amplification.md.
"""

from jaxdp_episodic.accountant.bounds.common import smallest_epsilon
from jaxdp_episodic.accountant.bounds.composition import (
    compose_closed_form,
    compose_naive,
    compose_optimal_delta,
    compose_optimal_epsilon,
    compose_strong,
)
from jaxdp_episodic.accountant.bounds.iteration import (
    bounded_iteration_rdp,
    contraction_factors,
    final_variance,
    full_batch_rho,
    one_pass_rho,
    optimal_noise_stds,
    rho_to_epsilon,
)
from jaxdp_episodic.accountant.bounds.mechanisms import (
    Gaussian,
    Laplace,
    Mechanism,
    RandomizedResponse,
    RdpCurve,
    RdpTable,
)
from jaxdp_episodic.accountant.bounds.shuffling import (
    KINDS,
    shuffled_delta,
    shuffled_epsilon,
    shuffled_epsilon_closed_form,
)
from jaxdp_episodic.accountant.bounds.subsampling import (
    advanced_joint_convexity,
    amplified_epsilon,
    amplify_poisson,
    amplify_without_replacement,
    delta_poisson_subsampled,
    delta_with_replacement_subsampled,
    delta_without_replacement_subsampled,
    group_delta,
    rdp_poisson_subsampled,
    rdp_without_replacement_subsampled,
    subsampled_response_epsilon,
    unamplified_epsilon,
)

__all__ = [
    "KINDS",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "RandomizedResponse",
    "RdpCurve",
    "RdpTable",
    "advanced_joint_convexity",
    "amplified_epsilon",
    "amplify_poisson",
    "amplify_without_replacement",
    "bounded_iteration_rdp",
    "compose_strong",
    "compose_closed_form",
    "compose_naive",
    "compose_optimal_delta",
    "compose_optimal_epsilon",
    "contraction_factors",
    "delta_poisson_subsampled",
    "delta_with_replacement_subsampled",
    "delta_without_replacement_subsampled",
    "final_variance",
    "full_batch_rho",
    "group_delta",
    "one_pass_rho",
    "optimal_noise_stds",
    "rdp_poisson_subsampled",
    "rdp_without_replacement_subsampled",
    "rho_to_epsilon",
    "shuffled_delta",
    "shuffled_epsilon",
    "shuffled_epsilon_closed_form",
    "smallest_epsilon",
    "subsampled_response_epsilon",
    "unamplified_epsilon",
]
