"""Bounds for single theorems; the accountant of runs does not use them.

Doors: `common`, `composition`, `iteration`, `mechanisms`, `shuffling`, `subsampling`.

Arguments of the wrong type raise `TypeError`. Values out of range, shapes that do not
broadcast and unknown names raise `ValueError`. Docstrings name only further errors.
"""
