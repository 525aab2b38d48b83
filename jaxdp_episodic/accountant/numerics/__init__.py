"""Numerical kernels: pure functions of arrays, without privacy.

Doors: `binomial`, `chebyshev_tables`, `combinatorics`, `complex_exponentials`,
`convex_sums`, `discrete_gaussian`, `exponential_means`, `lattice_sums`, `loops`,
`mean_moments`, `power_excess`, `quadrature`, `ratio_means`, `roots`, `signed_sums`,
`skewed_starts`, `skewed_sums`, `skewed_terms`, `special`, `table_checks`, `two_terms`.
"""
