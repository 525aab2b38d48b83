"""Rényi, exact and certified: three methods against one protocol of losses.

Doors: `certified.method`, `closed_form`, `engine`, `exact.contour`, `exact.integral`,
`exact.method`, `exact.mgf`, `question`, `rdp.method`, `run`.
"""
