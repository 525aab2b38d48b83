"""Numerical kernels: pure functions of arrays that know nothing of privacy.

Doors: `band_coefficients`, `binomial`, `convex_sums`, `lattice_sums`, `loops`,
`mean_moments`, `quadrature`, `roots`, `signed_sums`, `special`.
"""
