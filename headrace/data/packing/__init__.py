"""Hold what decides how documents become rows: best-fit packing, and a ledger of every policy."""
