"""Numerical kernels: pure functions of arrays, without privacy."""
