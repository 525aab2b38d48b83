"""Which design to run within a budget.

Doors: `first_config`, `pipelines`, `plan`, `question`, `source`.
"""
