"""One privacy budget for a data set: what it is, where it is kept, what runs take.

Doors: `book`, `content`, `storage`.
"""
