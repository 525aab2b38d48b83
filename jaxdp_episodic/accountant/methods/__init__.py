"""Rényi, exact and certified: three methods against one protocol of losses.

Doors: `adaptive.comparison`, `adaptive.graph`, `adaptive.method`, `adaptive.odometer`,
`adaptive.problem`, `certified.method`, `closed_form`, `engine`, `exact.method`,
`question`, `rdp.method`, `run`, `slopes`.
"""
