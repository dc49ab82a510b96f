"""Export the model of a run to the format of another tool."""

from dataclasses import fields, replace
from pathlib import Path

from headrace.assemble.sockets import Build
from headrace.core.command import train_command
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import shell
from headrace.export.hf import export_hf
from headrace.model.attention import SelfAttention
from headrace.model.companions import Companions
from headrace.model.hf_config import architecture
from headrace.model.lora import merged_state
from headrace.model.mask import MaskSpec
from headrace.model.mlp import PlainMLP, SwiGLU

FORMATS = ("hf",)
"""The formats that `headrace export --to` knows; "hf" is Hugging Face's."""


def export_run(
    build: Build,
    to: str,
    output: Path,
    *,
    run: Path,
    sequence_length: int,
    companions: Companions = Companions(),  # noqa: B008  (it is frozen)
) -> Path:
    """Write the model of a run in another format, and return the new folder.

    Args:
        build: the run, opened with its trained weights.
        to: the format, one of `FORMATS`.
        output: the folder to write, which must be absent or empty.
        run: the run's folder, which error messages name.
        sequence_length: tokens of a sequence in training; the exported config states it.
        companions: files such as a chat template that lay beside the weights with which the run
            began; they are copied.

    Raises:
        ConfigError: the format is unknown, or the new folder has files already.
        UnsupportedError: the format cannot describe what this model computes.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to} is not a format", f"--to {nearest(to, FORMATS)}")
    for name, block in build.model.blocks.items():
        for does, part in (("mixes tokens by", block.mixer), ("has for its MLP", block.mlp)):
            if type(part) in (SelfAttention, SwiGLU, PlainMLP):
                continue
            kind = type(part)
            owner = kind.__module__.rpartition(".")[2]
            raise UnsupportedError(
                f"layer {name} of this model {does} {owner} ({kind.__name__}), and no "
                "exported family does: its config.json would describe another model",
                f"headrace sample {shell(run)}, which computes it as it was trained",
            )
    mask, causal = replace(build.model.mask, document=False), MaskSpec()
    if not mask.is_plain_causal:
        other = {f.name: getattr(mask, f.name) for f in fields(mask)}
        own = [f"{name} = {v}" for name, v in other.items() if v != getattr(causal, name)]
        raise UnsupportedError(
            f"the mask of this model has {', '.join(own)}, and no exported family says so: its "
            "config.json would describe another model",
            f"headrace sample {shell(run)}, which computes it as it was trained",
        )
    try:
        architecture(build.config)
    except UnsupportedError as error:
        command = train_command(run, f"name={build.plan.name}-{to}", error.remedy.text)
        raise UnsupportedError(error.message, command) from None
    state = merged_state(build.model)
    tokenizer = build.prepared.directory / "tokenizer.json"
    export_hf(
        state,
        build.config,
        tokenizer,
        output,
        sequence_length=sequence_length,
        position=build.model.position.config_fields(),
        companions=companions,
    )
    return output
