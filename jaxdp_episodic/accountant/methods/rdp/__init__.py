"""Rényi-DP: an upper bound of every question, in closed form but for an integral."""
