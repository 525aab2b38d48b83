"""What a step draws, clips, noises and protects: descriptions, no computation.

Doors: `designs`, `people_laws`, `population`, `rates`, `releases`, `runs`, `spec`,
`step`.
"""
