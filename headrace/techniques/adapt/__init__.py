"""Train a small correction of a frozen model."""
