"""This module holds the command line `app`, and names the module of each verb.

The module of a verb is imported when the verb is called. What the verb works with is imported when
it runs. So `headrace --help` and the help of a verb wait neither for torch nor for a technique.
"""

import typer
from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

from headrace.cli.arguments import Completion, Version
from headrace.cli.verbs import Verb, Verbs


class Headrace(Verbs):
    """Hold the verbs of `headrace`, in the order in which its help lists them."""

    verbs = (
        Verb("train", "train.train", "Train a plan to its goal, and report its bottleneck."),
        Verb(
            "eval",
            "runs.evaluate_run",
            "Validation loss of a run's checkpoint over all its text, in nats and bits per byte.",
        ),
        Verb("finetune", "finetune.finetune", "Fine-tune a model on your examples."),
        Verb(
            "extend",
            "extend.extend",
            "Let a model read longer rows, and say what short ones lost.",
        ),
        Verb(
            "compress",
            "compress.compress",
            "Quantize a model in several ways, and say what each costs and saves.",
        ),
        Verb(
            "prune",
            "prune.prune",
            "Leave out what a model's text needs least: a smaller config, and smaller weights.",
        ),
        Verb(
            "distill",
            "distill.distill",
            "Let a small model learn from a larger one, in the loop or from what it said once.",
        ),
        Verb("chat", "chat.chat", "Talk with a run that was trained on conversations."),
        Verb("sample", "runs.sample", "Continue a prompt with a trained run."),
        Verb(
            "list",
            "techniques.list_techniques",
            "Every technique in a line; or model families, or recipes.",
        ),
        Verb(
            "explain",
            "techniques.explain",
            "A technique's card; or a plan's sockets in order, who fills each, and what it will "
            "cost.",
        ),
        Verb(
            "report",
            "runs.report",
            "Write a run's page again, or lay runs side by side on one page.",
        ),
        Verb(
            "ui", "ui.ui", "Show a folder of runs in a browser on this machine, as they go on too."
        ),
        Verb("export", "export.export", "Write a run's model in another tool's format."),
        Verb(
            "import",
            "migrate.import_config",
            "Make a plan of a config of torchtitan, nanochat, axolotl or litgpt, key by key.",
        ),
        Verb("run", "run_file.run_file", "Run an exported file by its own runtime."),
        Verb(
            "plan",
            "predict.plan",
            "Predict a run: whether it fits, where its step goes, how long and how much.",
        ),
        Verb(
            "probe",
            "predict.probe",
            "Measure what this machine reaches, and keep it for predictions.",
        ),
        Verb(
            "doctor",
            "doctor.doctor",
            "What holds a run up, the gravest first, and what each remedy would gain.",
        ),
        Verb(
            "tune",
            "tune.tune",
            "Try what is predicted to help, measure it beside the best so far, keep what won.",
        ),
        Verb(
            "lr-find",
            "tune.lr_find",
            "Let the learning rate grow in a short scratch run, and suggest one.",
        ),
        Verb(
            "ablate",
            "tune.ablate",
            "Measure what each technique of a plan is worth: left out, alone, and in pairs.",
        ),
        Verb("launch", "launch.launch", "Start a plan on this machine, or on a cluster's engine."),
        Verb("status", "launch.status", "The state of what was launched, and how far it is."),
        Verb("logs", "launch.logs", "What was printed by what was launched."),
        Verb("stop", "launch.stop", "End what was launched, with a checkpoint saved."),
        Verb("check", "check.check", "Check whether what a plan relies on holds."),
        Verb("data", "data.data", "Prepare data."),
    )


app = typer.Typer(
    cls=Headrace, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


completion_init()  # what `--completion` prints asks `headrace` itself, by typer's classes


@app.callback()
def _before_verbs(*, version: Version = False, completion: Completion = None) -> None:
    """Train language models, name the bottleneck of a run, and remove it with a receipt."""
