"""Words that everyone shares. No torch."""
