"""The run: trainer, ledger, store.

Doors: `assemble`, `checks`, `evaluation`, `ledger`, `loading`, `loop`, `release`,
`report`, `run_files`, `trainer`.
"""
