"""Open the model that a verb names: a run, a run's base with another adapter, or a point.

A point is a quantized or pruned model that `headrace compress` wrote. Evaluation and sampling take
all three, and an export takes a pruned point; what needs a run refuses a point by its name
(`inference.load.resolve_run`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.assemble.sockets import Build
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.folders import point_of
from headrace.export.gguf import Origin
from headrace.export.point import is_pruned_point, open_point
from headrace.export.start import beginning
from headrace.inference.adapted import open_adapted, resolve_adapter
from headrace.inference.load import (
    checkpoint_of,
    computed,
    open_model,
    read_plan,
    resolve_run,
)
from headrace.plan.technique import Catalogue
from headrace.train.checkpoint import Saved
from headrace.train.identity import trains_adapters


class Opened(NamedTuple):
    """A model that verbs use, and where it comes from."""

    build: Build
    run: Path
    """The run whose text and tokenizer are used, or the point."""
    talks: Path
    """The run whose chat template is used: the adapter's, where that is a run."""
    made_of: Path | None
    """The run whose checkpoint has the weights that were trained; None of an adapter that is a
    folder, and of a point."""
    compute: Callable[[Callable[[], Any]], Any]
    """Calls a function that computes with the model, and refuses weights that are too large."""


def open_any(
    name: Path,
    catalogue: Catalogue,
    *,
    adapter: str = "",
    checkpoint: str | None = None,
    with_data: bool = False,
    images: bool = False,
) -> Opened:
    """Return the model of a run, its base with another adapter, or a quantized model.

    Args:
        name: the run, or the folder of a quantized model.
        catalogue: the techniques and model families.
        adapter: its name or folder; "" for the run as it was trained.
        checkpoint: "step-N", "latest" or "best" of the run, where no adapter is named.
        with_data: whether to open the validation set too.
        images: whether a network that tells images apart will do too.

    Raises:
        ConfigError: it is neither, or a quantized model is asked for a checkpoint or an adapter;
            or see `open_chosen`.
        RunError: a checkpoint is damaged.
        UnsupportedError: a quantized model is named, and torchao is not installed.
    """
    folder = point_of(name)
    if folder is None:
        return open_chosen(
            name,
            catalogue,
            adapter=adapter,
            checkpoint=checkpoint,
            with_data=with_data,
            images=images,
        )
    if checkpoint is not None or adapter:
        raise ConfigError(
            f"{name} is a quantized model, which has no checkpoints and takes no adapter",
            rerun_without("--adapter" if adapter else "--checkpoint", verb="eval"),
        )
    build = open_point(folder, catalogue, with_data=with_data)
    return Opened(build, folder, folder, None, lambda work: work())


def open_exported(
    name: Path, catalogue: Catalogue, *, adapter: str = "", checkpoint: str | None = None
) -> Opened:
    """Return the model that an export writes: as `open_chosen`, or a pruned point with its zeros.

    Raises:
        ConfigError, RunError: see `open_any` and `open_chosen`; or it is a quantized point.
    """
    folder = point_of(name)
    opens = open_chosen if folder is None or not is_pruned_point(folder) else open_any
    return opens(name, catalogue, adapter=adapter, checkpoint=checkpoint)


def open_chosen(
    name: Path,
    catalogue: Catalogue,
    *,
    adapter: str = "",
    checkpoint: str | None = None,
    with_data: bool = False,
    images: bool = False,
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
        images: whether a network that tells images apart will do too.

    Raises:
        ConfigError: there is no such run or adapter, it is of another base, or a checkpoint is
            named beside it.
        RunError: a checkpoint is damaged.
    """
    run = resolve_run(name)
    if not adapter:
        build = open_model(
            run, catalogue, checkpoint=checkpoint, with_data=with_data, images=images
        )

        def compute(work: Callable[[], Any]) -> Any:
            return computed(work, build, run, catalogue, checkpoint=checkpoint)

        return Opened(build, run, run, run, compute)
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
    source = folder if (folder / "plan.toml").is_file() else None
    return Opened(build, run, source or run, source, lambda work: work())


def origin_of(opened: Opened, checkpoint: str | None, catalogue: Catalogue) -> Origin | None:
    """Return the run whose checkpoint an opened model has; None where it has none.

    Args:
        opened: the model.
        checkpoint: the one that it was opened from, as a command names it.
        catalogue: the techniques and model families.
    """
    if (source := opened.made_of) is None:
        return None
    saved = Saved(checkpoint_of(source, checkpoint), verify=False)
    return Origin.of(read_plan(source, catalogue).name, saved.values)
