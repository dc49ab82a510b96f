"""Find where time and memory went, and what to change."""
