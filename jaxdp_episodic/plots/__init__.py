"""Every picture.

Doors: `audit`, `curve`, `labels`, `pictures`, `plan`, `run`.
"""
