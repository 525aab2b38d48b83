"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `bands`, `blocks`, `designs`, `disjoint`, `menu`, `people`, `people_laws`,
`population`, `rates`, `releases`, `schemes`, `spec`, `step`.
"""
