"""Write a smaller model: what text needs least is left out, and the loss is told before and after.

The folder holds weights, config.json and tokenizer.json as `headrace export --to hf` writes them,
so that whatever trains a folder trains it on, and `pruning.json`, which says what is left.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.compress.pruning import (
    Kept,
    Tried,
    config_of,
    cut,
    importance_of,
    kept_of,
    shapes_within,
    try_shapes,
)
from headrace.core.errors import UnsupportedError
from headrace.core.progress import OnProgress
from headrace.costs.count import total_parameters
from headrace.export.compression import rows_of
from headrace.export.folder import write_json
from headrace.export.point import fill_
from headrace.export.run import export_run, refuse_parts
from headrace.model.hf_config import architecture
from headrace.parallel.world import World
from headrace.train.evaluate import evaluate, finite

RECORD = "pruning.json"
READ = 8192
"""Tokens of training text by which parts and shapes are compared, at least one row."""
AXES = ("channels", "heads", "layers")
"""What may be left out: hidden features of MLPs, key-value heads with their queries, layers."""


@dataclass(frozen=True)
class Pruning:
    """Hold what was left out of a model, and what it cost before any training."""

    model: str
    by: float
    """Share of the weights that was asked for."""
    parameters: int
    """Weights of the whole model."""
    left: int
    """Weights of the smaller one."""
    bits_per_byte: float
    """Loss of the whole model on the validation text."""
    left_bits_per_byte: float
    tokens: int
    """Validation targets that both were evaluated on."""
    tried: tuple[Tried, ...]
    """Shapes of the size, with their loss on training text; the first was taken."""
    kept: Kept

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        tried = [{**one._asdict(), "shape": one.shape._asdict()} for one in self.tried]
        return {**asdict(self), "tried": tried}


def allowed_axes(build: Build, axes: Sequence[str]) -> list[str]:
    """Return which parts of a model can be left out so that its config can say so.

    Raises:
        UnsupportedError: none of those that are asked for.
    """
    config = build.config
    refused: dict[str, str] = {}
    if config.window_between or config.value_embeddings:
        refused["layers"] = "its layers differ by their numbers"
    try:
        queries = config.heads // config.resolved_kv_heads
        groups = max(1, config.resolved_kv_heads - 1)
        architecture(
            config.model_copy(
                update={
                    "heads": groups * queries,
                    "kv_heads": groups,
                    "head_dim": config.resolved_head_dim,
                }
            )
        )
    except UnsupportedError:
        refused["heads"] = "its config.json has no width of a head"
    if config.value_embeddings:
        refused["heads"] = "tables of value embeddings have a width of all heads"
    left = [axis for axis in axes if axis not in refused]
    if not left:
        other = next(axis for axis in AXES if axis not in refused)
        reasons = "; ".join(f"{axis}: {refused[axis]}" for axis in axes)
        raise UnsupportedError(
            f"nothing that --only names can be left out of this model: {reasons}", f"--only {other}"
        )
    return left


def prune_model(
    build: Build,
    by: float,
    axes: Sequence[str],
    out: Path,
    *,
    model: str,
    run: Path,
    multiple: int = 1,
    tokens: int | None = None,
    progress: OnProgress = lambda description, done, total: None,
) -> Pruning:
    """Write a model without the share of its weights that text needs least.

    Args:
        build: the model with its text, by `plain_build`.
        by: the share of all weights that is left out.
        axes: what may be left out, of `AXES`.
        out: the new folder.
        model: its name, for the record.
        run: where it came from, which error messages name.
        multiple: what the count of hidden features that are left is a multiple of.
        tokens: the most validation tokens; all without it.
        progress: takes how far it is.

    Raises:
        UnsupportedError: no shape is so small, or no exported family describes the model.
        Diverged: a loss is not finite.
    """
    refuse_parts(build, "hf", run)
    config = build.config
    shapes = shapes_within(config, by, allowed_axes(build, axes), multiple)
    length = build.plan.data.sequence_length
    ids_BT = rows_of(build.prepared.train[0], max(1, READ // length), length, build.device)
    importance = importance_of(build.model, ids_BT, progress)
    tried = try_shapes(build.model, shapes, importance, ids_BT, progress)
    kept, small = kept_of(importance, tried[0].shape), config_of(config, tried[0].shape)
    progress("evaluating both", 0, 2)
    whole = finite(evaluate(build, tokens))
    made = make_build(build.plan.replaced(model=small), build.prepared, World(), build.device)
    with torch.no_grad():
        state = cut(build.model.state_dict(), config, kept)
        fill_(made, state, source=model, remedy="another checkpoint of it")
        progress("evaluating both", 1, 2)
        left = finite(evaluate(made, tokens))
    pruning = Pruning(
        model,
        by,
        total_parameters(config),
        total_parameters(small),
        whole.bits_per_byte,
        left.bits_per_byte,
        left.tokens,
        tuple(tried),
        kept,
    )
    export_run(made, "hf", out, run=run, sequence_length=length)
    write_json(out / RECORD, pruning.to_dict())
    return pruning
