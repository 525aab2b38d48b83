"""Data: tables of examples and the units they lie in, and where they come from.

Doors: `adapters`, `folders`, `glyphs`, `import_sources`, `schools`, `sinusoids`,
`sources`, `stored`, `stored_features`, `table`, `user_files`.
"""
