"""What leaves a step: clipped, summed, noised.

Doors: `noise`, `precision`, `private_gradient`, `processes`.
"""
