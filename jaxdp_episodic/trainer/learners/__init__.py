"""Models, learners of episodes, fixed features and optimizers.

Doors: `adapted`, `episode`, `features`, `learners`, `models`, `optimizers`.
"""
