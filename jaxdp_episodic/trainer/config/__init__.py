"""Training configs: what a file says, checked.

Doors: `training_config`, `training_parts`, `training_start`.
"""
