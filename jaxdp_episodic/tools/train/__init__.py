"""Training runs and searches from a config.

Doors: `booked`, `run`, `search`, `search_space`.
"""
