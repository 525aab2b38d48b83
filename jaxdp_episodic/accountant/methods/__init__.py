"""Rényi, exact and certified: three methods against one protocol of losses.

Doors: `adaptive.method`, `adaptive.problem`, `certified.method`, `closed_form`,
`engine`, `exact.held`, `exact.method`, `rdp.method`, `run`.
"""
