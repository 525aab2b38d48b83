"""Which design to run within a budget.

Doors: `bands`, `first_config`, `pipelines`, `plan`, `question`, `source`.
"""
