"""The run: trainer, ledger, journal, checkpoints.

Doors: `assemble`, `checks`, `evaluation`, `report`, `run_files`, `trainer`.
"""
