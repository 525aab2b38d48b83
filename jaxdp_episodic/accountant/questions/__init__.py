"""The questions, and the methods that answer them.

Doors: `api`, `attacker`, `budget`, `calibration`, `dominating_pair`, `gradients`,
`intervals`, `paths`, `profile`, `trial_counts`, `tuning`, `worst_path`.
"""
