"""Numerical kernels: pure functions of arrays that know nothing of privacy.

Doors: `band_coefficients`, `binomial`, `complex_exponentials`, `convex_sums`,
`lattice_sums`, `loops`, `mean_moments`, `quadrature`, `roots`, `signed_sums`,
`special`.
"""
