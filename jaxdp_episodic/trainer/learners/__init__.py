"""Models, learners of episodes, fixed features and optimizers.

Doors: `episode`, `features`, `learners`, `models`, `optimizers`.
"""
