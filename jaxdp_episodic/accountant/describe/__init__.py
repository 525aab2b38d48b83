"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `blocks`, `designs`, `mechanisms`, `people`, `people_laws`, `population`,
`rates`, `releases`, `schemes`, `serialization`, `spec`, `step`, `tree`, `units`.
"""
