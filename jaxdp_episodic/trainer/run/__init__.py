"""The run: trainer, ledger, journal, checkpoints.

Doors: `adaptive`, `adaptive_report`, `assemble`, `checks`, `contributions`,
`evaluation`, `loading`, `parts`, `release`, `report`, `run_files`, `said`,
`selection`, `stages`, `trainer`, `use`, `validation`.
"""
