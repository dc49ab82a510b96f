"""The trunk's optimizer and schedules."""
