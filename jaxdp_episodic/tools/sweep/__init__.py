"""Grids of settings, evaluated chunk by chunk: grid file, shards, table, pictures.

Doors: `description`, `run`.
"""
