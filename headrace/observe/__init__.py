"""Read signals while a run goes; training and `watch` share this room."""

PHASES: tuple[str, ...] = (
    "input",
    "forward",
    "backward",
    "optimizer",
    "communication_exposed",
    "checkpoint",
    "eval",
    "compile",
)
"""What a run's time is divided into, in the order in which pages show it."""
REPORT_FORMAT = 1
"""Version of the format of report.json, which a run and a watched loop write."""
