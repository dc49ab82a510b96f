"""Floor 0: words that everyone shares. No torch."""
