"""Turn raw text into one global stream of rows."""
