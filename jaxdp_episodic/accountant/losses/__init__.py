"""One mechanism a file: its dominating pair, moments and loss distribution.

Doors: `allocated_antipodal`, `allocated_gaussian`, `excess`, `finite`, `gaussian`,
`gaussian_mixtures`, `independent_episodes`, `laplace`, `loss_nodes`, `people`,
`privacy_loss`, `protocols`, `randomized_response`, `renyi_curve`, `sampled_gaussian`,
`truncated_gaussian`, `zero_concentrated`.
"""
