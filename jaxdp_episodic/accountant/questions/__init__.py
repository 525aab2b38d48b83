"""The questions, and the methods that answer them.

Arguments of the wrong type raise `TypeError`, values out of range and shapes that do
not broadcast `ValueError`; functions name what they refuse besides.

Doors: `adaptive`, `adaptive_budget`, `api`, `bands`, `budget`, `calibration`,
`dominating_pair`, `gdp`, `gradients`, `strategies`, `traced`, `tuning`, `worst_path`.
"""
