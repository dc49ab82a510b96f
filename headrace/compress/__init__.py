"""Make a trained model smaller: how its numbers are stored, and what that computes."""
