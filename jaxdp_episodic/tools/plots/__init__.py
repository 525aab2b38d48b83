"""Every picture.

Doors: `curve`, `figures`, `pictures`, `plan`, `run`.
"""
