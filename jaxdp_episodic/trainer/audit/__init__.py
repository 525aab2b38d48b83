"""Attempts to break the library's own promises: lower bounds next to claimed epsilons.

Doors: `confidence`, `mechanism`, `one_run`, `people`, `release`, `report`, `training`.
"""
