"""The run: trainer, ledger, journal, checkpoints.

Doors: `adaptive`, `adaptive_report`, `assemble`, `checks`, `evaluation`, `parts`,
`report`, `run_files`, `stages`, `trainer`, `validation`.
"""
