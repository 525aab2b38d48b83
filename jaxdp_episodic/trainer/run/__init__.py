"""The run: trainer, ledger, store.

Doors: `adaptive`, `assemble`, `calibration`, `checks`, `choosing`, `contributions`,
`evaluation`, `loading`, `parts`, `release`, `report`, `run_files`, `said`,
`selection`, `stages`, `trainer`, `use`, `validation`.
"""
