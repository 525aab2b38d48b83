"""One privacy budget for a data set: its terms, its storage, and charging runs to it.

Doors: `book`, `content`, `storage`.
"""
