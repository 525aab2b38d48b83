"""Training configs: what a file says, checked.

Doors: `training_adaptive`, `training_config`, `training_parts`.
"""
