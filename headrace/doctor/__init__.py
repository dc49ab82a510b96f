"""Floor 5: where time and memory went."""
