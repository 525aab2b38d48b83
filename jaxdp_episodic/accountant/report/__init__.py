"""Texts about a run: report, statement, caveats.

Doors: `in_words`, `report`, `sentences`.
"""
