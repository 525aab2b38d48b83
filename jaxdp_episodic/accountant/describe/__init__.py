"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `designs`, `mechanisms`, `population`, `rates`, `releases`, `schemes`,
`serialization`, `spec`, `step`, `tree`.
"""
