"""Other libraries' descriptions and accountants.

Doors: `dp_event`.
"""
