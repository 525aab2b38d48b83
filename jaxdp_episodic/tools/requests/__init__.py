"""Questions in files.

Doors: `batch_files`, `per_unit`, `request`, `request_file`.
"""
