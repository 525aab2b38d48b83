"""What is said of a run: report, statement, caveats, ledger format."""
