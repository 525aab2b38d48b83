"""What is said of a run: report, statement, caveats, ledger format.

Doors: `adaptive_words`, `in_words`, `ledger_content`, `ledger_file`, `ledgers`,
`privacy_statement`, `protected`, `report`, `rounding`.
"""
