"""The run: trainer, ledger, journal, checkpoints.

Doors: `assemble`, `evaluation`, `report`, `run_files`, `trainer`.
"""
