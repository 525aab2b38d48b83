"""One mechanism a file: its dominating pair, moments and loss distribution.

Doors: `allocated_antipodal`, `allocated_gaussian`, `antipodal_gaussian`, `excess`,
`finite`, `gaussian`, `gaussian_mixture`, `independent_episodes`, `laplace`,
`loss_nodes`, `people`, `privacy_loss`, `protocols`, `randomized_response`,
`renyi_curve`, `sampled_gaussian`, `swapped_gaussian`, `truncated_gaussian`,
`zero_concentrated`, `zeroed_gaussian`.
"""
