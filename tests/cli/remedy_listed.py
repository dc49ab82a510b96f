"""Errors whose remedies no test runs as they are printed, by module, each with the reason."""

DEVICE = "rates of a device that is not here; told inside of a prediction"

LISTED = {
    "costs/host": "rates of a CPU that was probed, which tests/probed_cpu.py stands for in tests",
    "costs/links": "ranks of several machines, where its remedy is a probe",
    "costs/machine:Machine._lacks#1": DEVICE,
    "costs/machine:Machine.read#1": "a damaged file of rates, where the remedy takes minutes",
    "costs/work:Work.seconds#1": "what was not counted of a technique: nothing can be typed",
    "predict/candidates": "a technique's own code that fails in a sweep: our bug, to be reported",
    "predict/on_cpu": "steps of a CPU that no probe timed, where its remedy is a probe",
}
"""Modules, or rooms that end with a slash, of which some errors are no case of a table."""
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
