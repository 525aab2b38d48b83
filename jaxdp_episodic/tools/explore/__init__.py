"""A local page on which designs of a run are set by hand and compared.

Doors: `questions`, `server`.
"""
