"""A trained model out of its run, and text from it."""
