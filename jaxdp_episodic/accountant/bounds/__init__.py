"""Theorems that stand alone: no run of steps uses them.

Doors: `approximate_dp`, `common`, `composition`, `iteration`, `mechanisms`,
`shuffling`, `subsampled_rdp`.

Arguments of the wrong type raise `TypeError`, values out of range, shapes that do not
broadcast and unknown names `ValueError`; functions name what they refuse besides.
"""
