"""Floor 1: torch and Triton functions, each beside its plain reference. They know no plan."""
