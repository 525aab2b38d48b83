"""Readers and writers of outside files, with bounds on what they may contain.

Doors: `archive`, `atomic`, `column_folder`, `json_file`, `onnx_file`,
`optional`, `parquet_file`, `sqlite_file`, `table_file`, `toml_file`.
"""
