"""Torch and Triton functions, each beside its plain reference. They know no plan."""
