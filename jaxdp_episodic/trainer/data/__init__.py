"""Data: tables of examples, the units that contain them, and their loaders.

Doors: `adapters`, `built_in`, `fields`, `folders`, `owners`, `people`, `scales`,
`sources`, `splits`, `stored`, `table`, `user_files`.
"""
