"""From raw text to one global stream of rows."""
