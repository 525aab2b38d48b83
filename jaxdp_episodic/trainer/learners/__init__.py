"""Models, and how they learn from an episode.

Doors: `episode`, `features`, `learners`, `models`, `optimizers`, `own`,
`untrained`.
"""
