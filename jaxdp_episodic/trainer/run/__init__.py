"""The run: trainer, ledger, journal, checkpoints.

Doors: `adaptive`, `adaptive_report`, `assemble`, `checks`, `evaluation`, `report`,
`run_files`, `selection`, `stages`, `trainer`, `validation`.
"""
