"""The private gradient of a step: clipped, summed, noised.

Doors: `clip_norm`, `noise`, `precision`, `private_gradient`, `processes`.
"""
