"""Training runs and searches from a config.

Doors: `run`, `search`, `search_space`.
"""
