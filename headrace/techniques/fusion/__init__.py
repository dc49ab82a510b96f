"""Several elementwise operations in one kernel."""
