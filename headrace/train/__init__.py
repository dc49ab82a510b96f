"""Hold the life of a run, from its first step to its report."""
