"""Floor 2: from raw text to one global stream of rows."""
