"""Standalone theorems: subsampling, composition, shuffling, iteration.

See docs/amplification.md.
"""

from jaxdp_episodic.accountant.bounds.approximate_dp import (
    advanced_joint_convexity as advanced_joint_convexity,
    amplified_epsilon as amplified_epsilon,
    amplify_poisson as amplify_poisson,
    amplify_without_replacement as amplify_without_replacement,
    delta_poisson_subsampled as delta_poisson_subsampled,
    delta_with_replacement_subsampled as delta_with_replacement_subsampled,
    delta_without_replacement_subsampled as delta_without_replacement_subsampled,
    group_delta as group_delta,
    subsampled_response_epsilon as subsampled_response_epsilon,
    unamplified_epsilon as unamplified_epsilon,
)
from jaxdp_episodic.accountant.bounds.common import smallest_epsilon as smallest_epsilon
from jaxdp_episodic.accountant.bounds.composition import (
    compose_closed_form as compose_closed_form,
    compose_naive as compose_naive,
    compose_optimal_delta as compose_optimal_delta,
    compose_optimal_epsilon as compose_optimal_epsilon,
    compose_strong as compose_strong,
)
from jaxdp_episodic.accountant.bounds.iteration import (
    bounded_iteration_rdp as bounded_iteration_rdp,
    contraction_factors as contraction_factors,
    final_variance as final_variance,
    full_batch_rho as full_batch_rho,
    one_pass_rho as one_pass_rho,
    optimal_noise_stds as optimal_noise_stds,
    rho_to_epsilon as rho_to_epsilon,
)
from jaxdp_episodic.accountant.bounds.mechanisms import (
    Gaussian as Gaussian,
    Laplace as Laplace,
    Mechanism as Mechanism,
    RandomizedResponse as RandomizedResponse,
    RdpCurve as RdpCurve,
    RdpTable as RdpTable,
)
from jaxdp_episodic.accountant.bounds.shuffling import (
    KINDS as KINDS,
    shuffled_delta as shuffled_delta,
    shuffled_epsilon as shuffled_epsilon,
    shuffled_epsilon_closed_form as shuffled_epsilon_closed_form,
)
from jaxdp_episodic.accountant.bounds.subsampled_rdp import (
    rdp_poisson_subsampled as rdp_poisson_subsampled,
    rdp_without_replacement_subsampled as rdp_without_replacement_subsampled,
)
