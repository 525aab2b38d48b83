"""Other libraries' descriptions and accountants.

Doors: `dp_accounting`, `dp_event`, `jax_privacy`, `opacus`.
"""
