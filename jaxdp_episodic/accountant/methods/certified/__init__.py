"""Certified intervals, by composing privacy loss distributions on a lattice."""
