"""Read signals while a run goes; training and `watch` share this room."""

REPORT_FORMAT = 1
"""Version of the format of report.json, which a run and a watched loop write."""
