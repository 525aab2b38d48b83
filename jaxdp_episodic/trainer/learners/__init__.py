"""Models, and how they learn from an episode.

Doors: `adapted`, `bayesian`, `episode`, `features`, `learners`, `models`, `optimizers`,
`own`, `untrained`.
"""
