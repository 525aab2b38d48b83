"""Other libraries' descriptions and accountants.

Doors: `dp_accounting`, `dp_event`, `dp_params`, `jax_privacy`, `opacus`.
"""
