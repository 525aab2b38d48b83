"""Training runs, and searches over them, from a config.

Doors: `booked`, `run`, `search`, `search_space`.
"""
