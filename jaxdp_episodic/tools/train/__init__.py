"""Training runs, and searches over them, from a config.

Doors: `run`, `search`.
"""
