"""Errors whose remedies no test runs as they are printed, by module, each with the reason."""

GPU = "needs a GPU, or kernels that are not here"
RANKS = "needs several ranks; tests/distributed and tests/test_guard_ranks.py raise them"
DEVICE = "rates of a device that is not here; told inside of a prediction"
CUT_OFF = "a signal, a full disk or a rank that is gone; tests raise them in real processes"

LISTED = {
    "build": "given weights and steps that are not finite; tests/export and tests/cli raise them",
    "checkpoint": CUT_OFF,
    "choose": GPU,
    "core/host": DEVICE,
    "core/links": DEVICE,
    "core/machine": DEVICE,
    "core/work": DEVICE,
    "evaluate": "a run that diverged; tests/cli/test_diverged.py runs these",
    "export/": "a model that no format has; tests/export raise them",
    "filled": "a technique that is not in force; tests/contract raise it",
    "guard": RANKS,
    "identity": "a resume with another plan or other weights; tests of resumes run these",
    "interrupts:Interrupts._cut_off#1": CUT_OFF,
    "load": "a run whose files were changed; tests of resumes and of weights run these",
    "model/": "given weights and masks; tests/model and tests/export raise them",
    "parallel/pipeline": RANKS,
    "planner/candidates": "a technique's own code that fails in a sweep: our bug, to be reported",
    "planner/on_cpu": DEVICE,
    "probes/__init__": GPU,
    "probes/at_hand": DEVICE,
    "report/": "files of a run that are damaged; tests/report raise them",
    "run_folder": CUT_OFF,
    "sample": "weights that diverged, and learned positions; tests/cli raise them",
    "session": CUT_OFF,
    "state": "weights that are no numbers; tests/test_resealed.py raises it",
    "techniques/": "found while a run is built on a GPU, on ranks or with given weights",
    "trials/command:locked#2": "another process that measures; tests/cli/test_tune_elsewhere.py",
}
"""Modules, or rooms that end with a slash, of which some errors are no case of a table."""
BARE = {
    "core/files": "the message names the line and the column of a TOML file",
    "core/host": "said inside of a prediction that goes on without",
    "core/work": "said inside of a prediction that goes on without",
    "core/machine": "said inside of a prediction that goes on without",
    "data/": "the message names the file and the line that are to be mended",
    "model/adapter": "the folder's index is damaged, and the message names it",
    "core/errors": "the remedy is made with the error",
    "build": "the session adds what learns to a step that is not finite (test_diverged_learns)",
}
"""Where an error may have no remedy, and why."""
