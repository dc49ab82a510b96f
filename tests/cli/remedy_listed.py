"""Errors that print no remedy, by module, each with the reason: all others are run as printed."""

UNTIMED = "said inside of a prediction that goes on without a time: nothing can be typed"

LISTED = {
    "costs/host:_seconds#1": UNTIMED,
    "costs/host:_seconds#2": UNTIMED,
    "costs/host:_attention_s#1": UNTIMED,
    "costs/host:_attention_s#2": UNTIMED,
    "costs/work:Work.seconds#1": UNTIMED,
}
"""Modules, rooms that end with a slash, or sites of which some errors are no case of a table."""
BARE = {
    "core/files": "the message names the line and the column of a TOML file",
    "costs/host": "said inside of a prediction that goes on without",
    "costs/work": "said inside of a prediction that goes on without",
    "costs/machine": "said inside of a prediction that goes on without",
    "data/": "the message names the file and the line that are to be mended",
    "core/errors": "the remedy is made with the error",
    "assemble/build": "the session adds what learns to a step that is not finite",
}
"""Where an error may have no remedy, and why."""
