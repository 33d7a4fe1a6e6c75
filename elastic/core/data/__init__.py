"""Which sample is trained on in which step by which rank, and the ledger that says so."""
