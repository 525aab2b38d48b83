"""Rényi, exact and certified: three methods against one protocol of losses.

Doors: `adaptive.comparison`, `adaptive.graph`, `adaptive.method`, `adaptive.odometer`,
`adaptive.problem`, `adaptive.profile`, `certified.method`, `closed_form`,
`exact.method`, `learning`, `question`, `rdp.method`, `run`, `slopes`.
"""
