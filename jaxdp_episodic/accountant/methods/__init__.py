"""Rényi, exact and certified: three methods against one protocol of losses.

Doors: `adaptive.graph`, `adaptive.method`, `adaptive.odometer`, `adaptive.problem`,
`certified.method`, `closed_form`, `engine`, `exact.held`, `exact.method`, `question`,
`rdp.method`, `rdp.on_lattice`, `run`.
"""
