"""Rényi, exact, certified and adaptive: the methods, against the protocols of losses.

Doors: `adaptive.method`, `adaptive.problem`, `certified.method`, `exact.method`,
`rdp`, `run`.
"""
