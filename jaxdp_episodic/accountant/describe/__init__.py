"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `designs`, `disjoint`, `menu`, `people_laws`, `population`, `rates`, `releases`,
`spec`, `step`.
"""
