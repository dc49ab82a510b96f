"""The head and the loss."""
