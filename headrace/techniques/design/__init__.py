"""Techniques that change the model's design."""
