"""Find the weights that a new run starts from: a folder of them, or a run's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.assemble.sockets import Build
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.export.run import export_run
from headrace.inference.adapted import open_adapted, resolve_adapter
from headrace.inference.load import checkpoint_of, computed, open_model, read_plan, resolve_run
from headrace.model.companions import CONFIG, Companions, read_companions
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.train.checkpoint import Saved
from headrace.train.identity import trains_adapters

EXPORTED = "exported"
"""The folder inside of a run's folder that holds its weights as safetensors."""


class Opened(NamedTuple):
    """A model that verbs use, and where it comes from."""

    build: Build
    run: Path
    """The run whose text and tokenizer are used."""
    talks: Path
    """The run whose chat template is used: the adapter's, where that is a run."""
    compute: Callable[[Callable[[], Any]], Any]
    """Calls a function that computes with the model, and refuses weights that are too large."""


def open_chosen(
    name: Path,
    catalogue: Catalogue,
    *,
    adapter: str = "",
    checkpoint: str | None = None,
    with_data: bool = False,
) -> Opened:
    """Return the model of a run, or its base with another adapter.

    The base of a run that trained an adapter is what it stands beside; that of another run is its
    own weights.

    Args:
        name: the run.
        catalogue: the techniques and model families.
        adapter: its name or folder; "" for the run as it was trained.
        checkpoint: "step-N", "latest" or "best" of the run, where no adapter is named.
        with_data: whether to open the validation set too.

    Raises:
        ConfigError: there is no such run or adapter, it is of another base, or a checkpoint is
            named beside it.
        RunError: a checkpoint is damaged.
    """
    run = resolve_run(name)
    if not adapter:
        build = open_model(run, catalogue, checkpoint=checkpoint, with_data=with_data)

        def compute(work: Callable[[], Any]) -> Any:
            return computed(work, build, run, catalogue, checkpoint=checkpoint)

        return Opened(build, run, run, compute)
    if checkpoint is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint} is of {run}, and --adapter {adapter} beside its base",
            rerun_without("--checkpoint", verb=f"sample {shell(run)}"),
        )
    folder = resolve_adapter(run, adapter, catalogue)
    plan = read_plan(run, catalogue)
    base = Path(plan.model.pretrained)
    if not trains_adapters(plan):
        base = beginning(run, catalogue, lambda line: None).weights
    build = open_adapted(run, base, folder, catalogue, with_data=with_data)
    talks = folder if (folder / "plan.toml").is_file() else run
    return Opened(build, run, talks, lambda work: work())


class Beginning(NamedTuple):
    """What a new run starts from."""

    weights: Path
    """A folder of safetensors, config.json and tokenizer.json."""
    plan: Plan | None
    """The plan of the run whose weights these are; None where they came as a folder."""


def beginning(model: Path, catalogue: Catalogue, note: Callable[[str], None]) -> Beginning:
    """Return the weights that a new run starts from, and the plan that made them.

    The weights of a run are those of its best checkpoint, or else its latest. They are written into
    its folder once, under the checkpoint's digest, as fp32.

    Args:
        model: such a folder, or a run by its folder or name.
        catalogue: the techniques and model families.
        note: called with a line where a run's weights are written.

    Raises:
        ConfigError: it is neither, or the run has no checkpoint.
        UnsupportedError: no exported family describes what the run computes.
    """
    if (model / CONFIG).is_file():
        return Beginning(model, None)
    try:
        run = resolve_run(model)
    except ConfigError as error:
        problem = f"{model} has no {CONFIG} of weights, and {error.message}"
        raise ConfigError(problem, error.remedy) from None
    plan = read_plan(run, catalogue)
    seal = str(Saved(checkpoint_of(run), verify=False).values["seal"])[:12]
    folder = run / EXPORTED / seal
    if not (folder / CONFIG).is_file():
        note(f"the weights of {shell(run)} go to {folder}")
        companions = read_companions(run, plan.model.pretrained, note)
        export_run(
            open_model(run, catalogue),
            "hf",
            folder,
            run=run,
            sequence_length=plan.data.sequence_length,
            companions=companions or Companions(),
        )
    return Beginning(folder, plan)
