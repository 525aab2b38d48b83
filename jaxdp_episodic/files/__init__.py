"""Readers and writers of files from outside, with their bounds.

Doors: `archive`, `atomic`, `column_folder`, `csv_file`, `json_file`, `onnx_file`,
`optional`, `parquet_file`, `sqlite_file`, `table_file`, `toml_file`.
"""
