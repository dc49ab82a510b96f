"""A run's model to another tool's format."""

from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.export.hf import export_hf
from headrace.model.attention import Attention
from headrace.model.companions import Companions
from headrace.model.lora import merged_state
from headrace.model.mlp import PlainMLP, SwiGLU
from headrace.sockets import Build

FORMATS = ("hf",)


def export_run(
    build: Build, to: str, output: Path, *, sequence_length: int,
    companions: Companions = Companions(),  # noqa: B008  (it is frozen)
) -> Path:  # fmt: skip
    """Write the model of an opened run; returns the folder.

    Args:
        build: the run.
        to: the format.
        output: the new folder.
        sequence_length: tokens of a row in training.
        companions: the small files that came with the weights that the run began with.

    Raises:
        ConfigError: an unknown format, or the folder has files.
        UnsupportedError: the format cannot say what this model computes.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to} is not a format", f"--to {nearest(to, FORMATS)}")
    for name, block in build.model.blocks.items():
        for does, part in (("mixes tokens by", block.mixer), ("has for its MLP", block.mlp)):
            if type(part) in (Attention, SwiGLU, PlainMLP):
                continue
            kind = type(part)
            owner = kind.__module__.rpartition(".")[2]
            raise UnsupportedError(
                f"layer {name} of this model {does} {owner} ({kind.__name__}), and no "
                "exported family does: its config.json would describe another model",
                f"headrace sample {build.plan.name}, which computes it as it was trained",
            )
    if not replace(build.model.mask, document=False).is_plain_causal:
        raise UnsupportedError(
            f"this model's attention is {build.model.mask}, and no exported family says so: its "
            "config.json would describe another model",
            f"headrace sample {build.plan.name}, which computes it as it was trained",
        )
    state = merged_state(build.model)
    tokenizer = build.prepared.directory / "tokenizer.json"
    export_hf(
        state, build.config, tokenizer, output,
        sequence_length=sequence_length, position=build.model.position.config_fields(),
        companions=companions,
    )  # fmt: skip
    return output
