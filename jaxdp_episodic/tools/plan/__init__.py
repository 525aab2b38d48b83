"""Which design to run within a budget.

Doors: `designs`, `pipelines`, `plan`, `question`.
"""
