"""The run: trainer, ledger, store.

Doors: `adaptive`, `assemble`, `calibration`, `checks`, `contributions`, `evaluation`,
`ledger`, `loading`, `release`, `report`, `run_files`, `selection`, `trainer`, `use`,
`validation`.
"""
