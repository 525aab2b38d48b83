"""Models, and how they learn from an episode.

Doors: `bayesian`, `episode`, `features`, `learners`, `models`, `optimizers`, `own`,
`untrained`.
"""
