"""Predict what a plan needs and takes, and find what it could be changed into."""
