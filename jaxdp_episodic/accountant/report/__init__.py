"""Texts about a run (report, statement, caveats) and the format of its ledger.

Doors: `adaptive_words`, `in_words`, `ledger_content`, `ledger_file`, `ledgers`,
`privacy_statement`, `protected`, `report`, `rounding`.
"""
