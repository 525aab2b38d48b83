"""Every picture.

Doors: `audit`, `book`, `curve`, `pictures`, `plan`, `run`.
"""
