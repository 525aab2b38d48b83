"""All pictures.

Doors: `curve`, `figures`, `pictures`, `plan`, `run`.
"""
