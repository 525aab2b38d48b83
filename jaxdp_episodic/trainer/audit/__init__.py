"""Attempts to break the library's own promises: lower bounds next to claimed epsilons.

Doors: `bounds`, `game`, `training`.
"""
