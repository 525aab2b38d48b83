"""Private statistics of classes, released as whole.

Doors: `mixed`, `statistics`.
"""
