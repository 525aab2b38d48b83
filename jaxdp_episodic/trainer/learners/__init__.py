"""Models, and how they learn from an episode.

Doors: `adapted`, `episode`, `features`, `learners`, `models`, `optimizers`.
"""
