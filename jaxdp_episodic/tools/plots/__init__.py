"""Every picture.

Doors: `audit`, `curve`, `pictures`, `plan`, `run`.
"""
