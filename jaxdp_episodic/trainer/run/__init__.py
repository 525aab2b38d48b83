"""The run: trainer, ledger, store, the format of its file.

Doors: `assemble`, `checks`, `evaluation`, `ledger`, `ledger_file`, `ledgers`,
`loading`, `loop`, `release`, `report`, `run_files`, `trainer`.
"""
