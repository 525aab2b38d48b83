"""Questions in files.

Doors: `batch_files`, `request`, `request_file`, `training_config`, `training_parts`,
`training_start`.
"""
