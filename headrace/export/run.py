"""Export the model of a run to the format of another tool."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from headrace.assemble.sockets import Build
from headrace.core.command import rerun_with, train_command
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import shell
from headrace.core.remedy import typed
from headrace.data.chat.record import TEMPLATE_FILE
from headrace.export.gguf import BLOCK, Origin, Quantized, gguf_package, write_gguf
from headrace.export.gguf_graph import graph_of
from headrace.export.gguf_tokenizer import vocabulary
from headrace.export.hf import export_hf
from headrace.export.peft import export_peft
from headrace.model.attention import SelfAttention
from headrace.model.companions import Companions
from headrace.model.hf_config import architecture
from headrace.model.lora import merged_state
from headrace.model.mask import mask_of
from headrace.model.mlp import GeGLU, PlainMLP, SwiGLU

FORMATS = ("hf", "peft", "gguf")
"""Formats of `headrace export --to`: Hugging Face's, its adapters' (PEFT), and llama.cpp's file."""
FOR_DEVICES = ("onnx", "executorch")
"""Its other formats, which `edge` writes."""
VLLM = "vllm"
"""The format of vLLM's folders, which `compressed_tensors` writes."""


def export_run(
    build: Build,
    to: str,
    output: Path,
    *,
    run: Path,
    sequence_length: int,
    companions: Companions = Companions(),  # noqa: B008  (it is frozen)
    quantize: Quantized = "f16",
    name: str = "",
    origin: Origin | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the model of a run in another format, and return the new folder or file.

    Args:
        build: the run, opened with its trained weights.
        to: the format, one of `FORMATS`.
        output: the folder to write, which must be absent or empty.
        run: the run's folder, which error messages name.
        sequence_length: tokens of a sequence in training; the exported config states it.
        companions: files such as a chat template that lay beside the weights with which the run
            began; they are copied.
        quantize: how a GGUF file stores matrices.
        name: of the model in a GGUF file; the plan's without it.
        origin: the run whose model it is, which a GGUF file says; None where no run's checkpoint
            is, as of a base with a folder of adapters.
        note: called with a line where the format says less than the run.

    Raises:
        ConfigError: the format is unknown, or the new folder has files already.
        UnsupportedError: the format cannot describe what this model computes.
    """
    if to not in FORMATS:
        raise ConfigError(
            f"--to {to} is not a format", f"--to {nearest(to, (*FORMATS, *FOR_DEVICES, VLLM))}"
        )
    if to == "gguf":
        gguf_package()
    refuse_parts(build, to, run)
    if to == "peft":
        export_peft(build, output, run=run, template=companions.texts.get(TEMPLATE_FILE, ""))
        return output
    if to == "gguf":
        named = name or build.plan.name, origin
        _export_gguf(build, output, run, sequence_length, companions, quantize, named, note)
        return output
    state = merged_state(build.model)
    tokenizer = build.prepared.directory / "tokenizer.json"
    if (template := run / TEMPLATE_FILE).is_file():  # by which it was trained here
        texts = {**companions.texts, TEMPLATE_FILE: template.read_text(encoding="utf-8")}
        companions = replace(companions, texts=texts)
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


def refuse_parts(build: Build, to: str, run: Path) -> None:
    """Refuse a model with a part that no exported family has.

    Raises:
        UnsupportedError: names the first of them.
    """
    for name, block in build.model.blocks.items():
        for does, part in (("mixes tokens by", block.mixer), ("has for its MLP", block.mlp)):
            if type(part) in (SelfAttention, SwiGLU, GeGLU, PlainMLP):
                continue
            kind = type(part)
            owner = kind.__module__.rpartition(".")[2]
            raise UnsupportedError(
                f"layer {name} of this model {does} {owner} ({kind.__name__}), and no "
                "exported family does: its config.json would describe another model",
                f"headrace sample {shell(run)}, which computes it as it was trained",
            )
    mask, causal = replace(build.model.mask, document=False), mask_of(build.config)
    if mask != causal:
        other = {f.name: getattr(mask, f.name) for f in fields(mask)}
        own = [f"{name} = {v}" for name, v in other.items() if v != getattr(causal, name)]
        raise UnsupportedError(
            f"the mask of this model has {', '.join(own)}, and no exported family says so: its "
            "config.json would describe another model",
            f"headrace sample {shell(run)}, which computes it as it was trained",
        )
    config = build.config
    if to in FOR_DEVICES and config.norm == "rms_norm" and config.position == "learned":
        config = config.model_copy(update={"norm": "layer_norm"})  # a graph has either norm
    try:
        architecture(config)
    except UnsupportedError as error:
        (wanted,) = error.remedy.changes
        words = typed(*build.plan.undoing(*wanted))
        command = train_command(run, f"name={build.plan.name}-{to}", words)
        raise UnsupportedError(error.message, command) from None


def _export_gguf(
    build: Build,
    output: Path,
    run: Path,
    sequence_length: int,
    companions: Companions,
    quantize: Quantized,
    named: tuple[str, Origin | None],
    note: Callable[[str], None],
) -> None:
    """Write the model of a run as a GGUF file; see `export_run`."""
    tokenizer, position = build.prepared.tokenizer, build.model.position
    try:
        graph, words = graph_of(build.config, position), vocabulary(tokenizer)
    except UnsupportedError as error:
        # Given weights keep their shape and tokenizer, so no change of the plan helps them.
        changes = error.remedy.text if not build.config.pretrained else ""
        name = f"name={build.plan.name}-gguf"
        anew = train_command(run, name, changes) if changes else rerun_with("--to", "hf", verb="")
        raise UnsupportedError(error.message, anew) from None
    written = write_gguf(
        merged_state(build.model),
        build.config,
        position,
        graph,
        words,
        output,
        document_token=tokenizer.document_token,
        context=sequence_length,
        quantize=quantize,
        name=named[0],
        origin=named[1],
        template=companions.texts.get(TEMPLATE_FILE, ""),
    )
    if written.kept:
        note(
            f"{len(written.kept)} of {sum(written.tensors.values())} tensors stay F16, since their "
            f"rows are no whole blocks of {BLOCK} numbers: {', '.join(written.kept[:3])}"
        )
    for line in words.notes:
        note(line)
