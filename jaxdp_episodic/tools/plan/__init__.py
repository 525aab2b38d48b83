"""Which design to run within a budget.

Doors: `designs`, `first_config`, `pipelines`, `plan`, `question`, `source`.
"""
