"""Hold the baseline's optimizer and schedules."""
