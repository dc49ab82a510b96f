"""This room holds what computes several elementwise operations in one kernel."""
