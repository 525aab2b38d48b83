"""Grids of settings, evaluated chunk by chunk: the grid's file, shards, and table.

Doors: `description`, `run`.
"""
