"""This module holds the verb `prune`: a model with fewer heads, hidden features and layers."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Checkpoint, Json, Overrides, TextTokens, share_of
from headrace.cli.catalogue import catalogue
from headrace.cli.compress import open_with_text
from headrace.cli.terminal import (
    exit_codes,
    make_progress,
    note,
    show_json,
    show_table,
    started_as,
)
from headrace.core.errors import ConfigError, nearest
from headrace.core.files import shell
from headrace.core.limits import WIDEST
from headrace.core.loading import loading
from headrace.core.units import format_count

FOLDER = "pruned"
"""The folder that is made of a run."""
SHOWN = 5
"""Shapes that the table has at most."""


def prune(
    model: Annotated[Path, typer.Argument(help="A run, or a folder of safetensors and config.")],
    overrides: Overrides = None,
    *,
    by: Annotated[str, typer.Option(help="Share of all weights that is left out, as 30%.")] = "30%",
    only: Annotated[
        str,
        typer.Option(help="What may be left out, by commas: channels, heads, layers."),
    ] = "channels,heads,layers",
    multiple: Annotated[
        int,
        typer.Option(
            min=1, max=WIDEST, help="Hidden features stay in multiples of this, as of a group."
        ),
    ] = 1,
    tokens: TextTokens = None,
    output: Annotated[
        Path | None, typer.Option(help="A new folder; RUN/pruned without it.")
    ] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Leave out what a model's text needs least: its config and its weights get smaller.

    Training on recovers what it lost: `headrace distill MODEL FOLDER DATA`, or `finetune`.
    """
    with exit_codes(json):
        share, axes = share_of("--by", by, "the weights", 1, 90), _axes(only)
        progress = make_progress(json)
        try:
            with loading():
                from headrace.cli.vision import prune_images
                from headrace.export.compression import plain_build
                from headrace.export.pruned import prune_model
                from headrace.inference.images import images_run
            if (run_of_images := images_run(model, catalogue())) is not None:
                prune_images(
                    run_of_images, share, output, checkpoint, tokens, progress, as_json=json
                )
                return
            opened, folder, _, _ = open_with_text(model, overrides, checkpoint, progress, FOLDER)
            out = output or folder
            pruning = prune_model(
                plain_build(opened),
                share,
                axes,
                out,
                model=model.name,
                run=model,
                multiple=multiple,
                tokens=tokens or opened.plan.eval.tokens,
                progress=progress.task,
            )
        finally:
            progress.close()
        if json:
            show_json({"folder": str(out), **pruning.to_dict(), "told": progress.notes})
            return
        show_table(
            ["layers", "key-value heads", "hidden features", "weights", "loss, nats"],
            [
                [*map(str, one.shape), format_count(one.parameters), f"{one.loss_nats:.4f}"]
                for one in pruning.tried[:SHOWN]
            ],
        )
        note(
            f"\n{format_count(pruning.left)} of {format_count(pruning.parameters)} weights are "
            f"left, and bits per byte go from {pruning.bits_per_byte:.3f} to "
            f"{pruning.left_bits_per_byte:.3f} before it is trained on"
        )
        note(f"weights: {out}")
        note(f"next:    {started_as()} distill {shell(model)} {shell(out)} DATA")


def _axes(only: str) -> list[str]:
    """Return what may be left out.

    Raises:
        ConfigError: a word is none of a model's parts.
    """
    from headrace.export.pruned import AXES

    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in AXES:
            raise ConfigError(
                f"--only {name} is no part of a model that can be left out; they are "
                f"{', '.join(AXES)}",
                f"--only {nearest(name, AXES)}",
            )
    return list(dict.fromkeys(names))
