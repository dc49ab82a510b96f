"""Find the weights that a new run starts from: a folder of them, or a run's."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.folders import is_point
from headrace.data.chat.encode import template_line
from headrace.data.chat.record import ChatRecord
from headrace.export.run import export_run
from headrace.inference.load import checkpoint_of, open_model, read_plan, resolve_run
from headrace.model.companions import CONFIG, Companions, read_companions
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.train.checkpoint import Saved

EXPORTED = "exported"
"""The folder inside of a run's folder that holds its weights as safetensors."""


class Beginning(NamedTuple):
    """What a new run starts from."""

    weights: Path
    """A folder of safetensors, config.json and tokenizer.json."""
    plan: Plan | None
    """The plan of the run whose weights these are; None where they came as a folder."""


def beginning(
    model: Path,
    catalogue: Catalogue,
    note: Callable[[str], None],
    *,
    checkpoint: str | None = None,
) -> Beginning:
    """Return the weights that a new run starts from, and the plan that made them.

    The weights of a run are those of its best checkpoint, or else its latest, unless another one is
    named. They are written into its folder once, under the checkpoint's digest, as fp32.

    Args:
        model: such a folder, or a run by its folder or name.
        catalogue: the techniques and model families.
        note: called with a line where a run's weights are written.
        checkpoint: "step-N", "latest" or "best" of a run.

    Raises:
        ConfigError: it is neither, the run has no such checkpoint, or one is named beside a folder.
        UnsupportedError: no exported family describes what the run computes.
    """
    if (model / CONFIG).is_file():
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint} is of a run, and {model} is a folder of weights",
                rerun_without("--checkpoint", verb=f"compress {shell(model)}"),
            )
        return Beginning(model, None)
    try:
        run = resolve_run(model)
    except ConfigError as error:
        problem = error.message
        if not is_point(model):
            problem = f"{model} has no {CONFIG} of weights, and {problem}"
        raise ConfigError(problem, error.remedy) from None
    plan, record = read_plan(run, catalogue), ChatRecord.load(run)
    if record is not None and (line := template_line(record, plan.data.tokenizer)):
        note(line)
    seal = str(Saved(checkpoint_of(run, checkpoint), verify=False).values["seal"])[:12]
    folder = run / EXPORTED / seal
    if not (folder / CONFIG).is_file():
        note(f"the weights of {shell(run)} go to {folder}")
        companions = read_companions(run, plan.model.pretrained, note)
        export_run(
            open_model(run, catalogue, checkpoint=checkpoint),
            "hf",
            folder,
            run=run,
            sequence_length=plan.data.sequence_length,
            companions=companions or Companions(),
        )
    return Beginning(folder, plan)
