"""What leaves a step: clipped, summed, noised.

Doors: `clip_norm`, `noise`, `precision`, `private_gradient`, `processes`.
"""
