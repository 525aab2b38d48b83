"""The run: trainer, ledger, store.

Doors: `adaptive`, `assemble`, `checks`, `choosing`, `contributions`,
`evaluation`, `loading`, `parts`, `release`, `report`, `run_files`, `said`,
`selection`, `stages`, `trainer`, `use`, `validation`.
"""
