"""Private statistics of classes or tasks, each released once with noise.

Doors: `mixed`, `statistics`.
"""
