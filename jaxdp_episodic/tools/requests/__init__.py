"""Questions in files.

Doors: `batch_files`, `request`, `request_file`.
"""
