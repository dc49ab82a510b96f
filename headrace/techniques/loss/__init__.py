"""This room holds what computes the loss, and what changes it."""
