"""The run: trainer, ledger, store.

Doors: `assemble`, `checks`, `evaluation`, `ledger`, `loading`, `release`,
`report`, `run_files`, `selection`, `trainer`.
"""
