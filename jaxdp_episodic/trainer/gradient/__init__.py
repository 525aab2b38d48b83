"""The private gradient of a step: clipped, summed, noised.

Doors: `clipping`, `noise`, `precision`, `private_gradient`, `processes`.
"""
