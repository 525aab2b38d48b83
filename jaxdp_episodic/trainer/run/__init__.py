"""The run: trainer, ledger, store.

Doors: `adaptive`, `assemble`, `calibration`, `checks`, `choosing`, `contributions`,
`evaluation`, `loading`, `release`, `report`, `run_files`, `selection`,
`trainer`, `use`, `validation`.
"""
