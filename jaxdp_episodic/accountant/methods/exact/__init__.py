"""Exact epsilon and delta, as a contour integral."""
