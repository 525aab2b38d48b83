"""Data: tables of examples, the units that contain them, and their loaders.

Doors: `adapters`, `built_in`, `examples`, `fields`, `folders`, `owners`, `people`,
`scales`, `sources`, `splits`, `stored`, `stored_features`, `table`, `user_files`.
"""
