"""The run: trainer, ledger, journal, checkpoints.

Doors: `adaptive`, `adaptive_report`, `assemble`, `checks`, `contributions`,
`evaluation`, `report`, `run_files`, `trainer`, `validation`.
"""
