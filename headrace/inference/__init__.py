"""Load a trained model from its run, and generate text with it."""
