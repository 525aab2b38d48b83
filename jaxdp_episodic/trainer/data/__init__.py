"""Data: tables of examples and the units they lie in, and where they come from.

Doors: `adapters`, `built_in`, `examples`, `fields`, `folders`, `owners`, `people`,
`sources`, `splits`, `stored`, `stored_features`, `table`, `user_files`.
"""
