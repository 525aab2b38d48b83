"""Texts about a run (report, statement, caveats) and the format of its ledger.

Doors: `in_words`, `ledger_file`, `ledgers`, `report`, `sentences`.
"""
