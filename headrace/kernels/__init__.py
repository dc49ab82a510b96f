"""This package holds torch and Triton functions beside plain references; they know no plan."""
