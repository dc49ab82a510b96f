"""Floor 2: the trunk's optimizer and schedules."""
