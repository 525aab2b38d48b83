"""Questions in files.

Doors: `batch`, `request`.
"""
