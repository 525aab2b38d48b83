"""Numerical kernels: pure functions of JAX arrays, with no privacy in them."""
