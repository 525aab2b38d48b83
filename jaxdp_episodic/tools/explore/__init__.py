"""A local page on which a user changes designs of a run and compares them.

Doors: `questions`, `server`.
"""
