"""Mechanisms: the dominating pair, Rényi moments and loss distribution of each.

Doors: `allocated`, `excess`, `finite`, `gaussian`, `gaussian_mixtures`,
`independent_episodes`, `laplace`, `loss_nodes`, `people`, `privacy_loss`,
`renyi_curve`.
"""
