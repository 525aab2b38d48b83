"""Rényi DP: an upper bound for every question."""
