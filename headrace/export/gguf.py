"""Write a model as one GGUF file, which llama.cpp runs: weights, tokenizer, and where it is from.

Blocks are quantized by the reference of the format, the `gguf` package of llama.cpp, tensor by
tensor, so the host holds the model once and one tensor of the file. Rows of padding in the
embedding are left out: the file has a row for each token.

Under Q4_0 the embedding and the output matrix are Q8_0, as llama.cpp's own quantizer keeps them in
more bits than the rest. A matrix whose rows are no whole blocks of 32 numbers stays F16.

The file holds a sha256 of itself, where the 64 digits of it count as zeros. So a file that was
damaged is told from a sound one before its tensors are read.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from headrace import __version__
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.model_config import ModelConfig
from headrace.export.folder import new_file
from headrace.export.gguf_graph import Graph, as_neighbours, frequency_divisors, numbers
from headrace.export.gguf_tokenizer import GgufTokenizer
from headrace.model.adapter import check_ours
from headrace.model.hf_config import architecture

Quantized = Literal["f32", "f16", "q8_0", "q4_0"]
QUANTIZED: tuple[Quantized, ...] = get_args(Quantized)
"""What `--quantize` takes: 32, 16, 8.5 and 4.5 bits a weight."""
_FILE_TYPES: dict[Quantized, str] = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}
INSTALL = "pip install 'headrace[gguf]'"
"""The command that installs the reference of the format, and llama.cpp."""
SHA256 = "headrace.sha256"
"""The key of the file's own digest."""
BLOCK, READ_BYTES = 32, 1 << 24
"""Numbers of a row that make a block; and bytes that are read at once for the digest."""
LARGEST = 65504.0
"""The largest number of 16 bits, in which weights or the scales of their blocks are stored."""


class Origin(NamedTuple):
    """Say which run a file was made of."""

    run: str
    step: int
    seal: str
    """the sha256 of the checkpoint that its weights are from"""
    fingerprint: Mapping[str, str]
    """digests of what the run depends on, by name"""

    @classmethod
    def of(cls, run: str, values: Mapping[str, Any]) -> "Origin":
        """Return the origin of a run's checkpoint, by what its index says."""
        return cls(run, values["step"], values["seal"], values["fingerprint"])


class Written(NamedTuple):
    """Say what became of the tensors."""

    tensors: dict[str, int]
    """how many of them have each type"""
    kept: list[str]
    """those that were to be quantized and whose rows are no whole blocks"""


def stored_as(to: str, quantize: str | None) -> Quantized:
    """Return how matrices are stored, F16 unless it is said.

    Args:
        to: the format.
        quantize: what was typed.

    Raises:
        ConfigError: it is none of them, or the format stores 32 bits alone.
    """
    if quantize is not None and to != "gguf":
        raise ConfigError(
            f"--quantize {quantize} is of files for a runtime, and {to} stores 32 bits",
            rerun_without("--quantize", verb="export"),
        )
    if quantize is not None and quantize not in QUANTIZED:
        raise ConfigError(
            f"--quantize {quantize} is none of {', '.join(QUANTIZED)}",
            f"--quantize {nearest(quantize, QUANTIZED)}",
        )
    stored: dict[str | None, Quantized] = {one: one for one in QUANTIZED}
    return stored.get(quantize, "f16")


def file_name(run: str, quantize: Quantized) -> str:
    """Return the name of a run's file, as llama.cpp's own converter names files."""
    return f"{run}-{quantize.upper()}.gguf"


def gguf_package() -> ModuleType:
    """Return the package `gguf`.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(
            "GGUF files are written and read by the package gguf, which is not installed",
            INSTALL,
        ) from None
    return gguf


def write_gguf(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    position: nn.Module,
    graph: Graph,
    words: GgufTokenizer,
    out: Path,
    *,
    document_token: int,
    context: int,
    quantize: Quantized,
    name: str,
    origin: Origin | None,
    template: str = "",
) -> Written:
    """Write a new file, and return what its tensors are.

    Args:
        state: every parameter by its name in Headrace, whole, on any device.
        config: the model, resolved.
        position: its filled `parts.position`.
        graph: computes it, without a difference.
        words: the tokenizer.
        out: the new file.
        document_token: begins and ends a text.
        context: the longest row, in tokens.
        quantize: how matrices are stored.
        name: of the model.
        origin: the run whose model it is; None where no run's checkpoint is.
        template: the chat template; "" for none.

    Raises:
        ConfigError: `out` exists already or cannot be written, or the state does not fit.
        UnsupportedError: a weight is too large for 16 bits, or the package is missing.
        RunError: the disk is full; nothing is left behind.
    """
    gguf = gguf_package()
    plan = list(_layout(gguf, state, config, position, graph, words, quantize))
    counts: dict[str, int] = {}
    kept = [name for name, *_, is_kept in plan if is_kept]
    with new_file(out) as file:
        writer = gguf.GGUFWriter(file, graph.name)
        writer.add_string(SHA256, "0" * 64)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[quantize]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in numbers(graph, config, position, context=context).items():
            _add(writer, f"{graph.name}.{key}", value)
        _add_tokenizer(writer, words, document_token, template)
        _add_origin(writer, name, origin)
        for name, shape, stored, _, _ in plan:
            byte_shape = _byte_shape(gguf, shape, stored)
            dtype = {"F32": np.float32, "F16": np.float16}.get(stored.name, np.uint8)
            count = int(np.prod(byte_shape)) * np.dtype(dtype).itemsize
            writer.add_tensor_info(name, byte_shape, np.dtype(dtype), count, raw_dtype=stored)
            counts[stored.name] = counts.get(stored.name, 0) + 1
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, _, stored, tensor, _ in plan:
            writer.write_tensor_data(_stored(gguf, name, tensor(), stored))
        writer.close()
        _seal(file)
    return Written(counts, kept)


def _layout(
    gguf: Any,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    position: nn.Module,
    graph: Graph,
    words: GgufTokenizer,
    quantize: Quantized,
) -> Iterator[tuple[str, tuple[int, ...], Any, Any, bool]]:
    """Yield name, shape, type, maker of each tensor, and whether its rows are no whole blocks."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == graph.name)
    names = gguf.get_tensor_name_map(arch, config.layers)
    types = gguf.GGMLQuantizationType
    heads = {"attn_q.": config.heads, "attn_k.": config.resolved_kv_heads}
    heads = heads if graph.rotates_neighbours else {}
    for link in check_ours(config, state, architecture(config)):
        rows = replace(link, transposed=False)
        for theirs, like in rows.to_theirs(torch.empty(link.shape, device="meta")).items():
            name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert name is not None, f"{graph.name} has no name for {theirs}"
            shape = tuple(like.shape)
            if link.ours in ("embed.weight", "head.weight"):
                shape = (len(words.tokens), shape[1])
            rotated_heads = [
                n for part, n in heads.items() if part in name and graph.rotates_neighbours
            ]
            maker = _maker(state[link.ours], rows, theirs, shape[0], rotated_heads)
            is_table = link.ours in ("embed.weight", "head.weight")
            whole = len(shape) == 2 and shape[1] % BLOCK == 0
            if len(shape) == 1 or "position" in name or quantize == "f32":
                stored = types.F32
            elif quantize == "f16" or not whole:
                stored = types.F16
            else:
                stored = types.Q8_0 if quantize == "q8_0" or is_table else types.Q4_0
            is_kept = quantize != "f16" and stored == types.F16
            yield name, shape, stored, maker, is_kept
    if (divisors := frequency_divisors(position)) is not None:
        shape = tuple(divisors.shape)
        yield "rope_freqs.weight", shape, types.F32, lambda: divisors, False


def _maker(value: Tensor, link: Any, theirs: str, count: int, rotated_heads: list[int]) -> Any:
    """Return a function that makes one tensor of the file, fp32 on the host."""

    def make() -> Tensor:
        tensor = link.to_theirs(value.detach().float().cpu())[theirs][:count]
        return (
            as_neighbours(tensor, rotated_heads[0]).contiguous()
            if rotated_heads
            else tensor.contiguous()
        )

    return make


def _byte_shape(gguf: Any, shape: tuple[int, ...], stored: Any) -> tuple[int, ...]:
    """Return the shape of the array in which a tensor is stored."""
    if stored.name in ("F32", "F16"):
        return shape
    return gguf.quants.quant_shape_to_byte_shape(shape, stored)


def _stored(gguf: Any, name: str, tensor: Tensor, stored: Any) -> np.ndarray:
    """Return a tensor as it lies in the file.

    Raises:
        UnsupportedError: a number of it is too large.
    """
    if stored.name != "F32" and (largest := float(tensor.abs().max())) > LARGEST:
        raise UnsupportedError(
            f"the largest weight of {name} is {largest:.3g}, and GGUF stores at most {LARGEST:g}",
            "--to hf, which stores 32 bits",
        )
    array = tensor.numpy()
    if stored.name in ("F32", "F16"):
        return array.astype(np.dtype(stored.name.replace("F", "float").lower()))
    return gguf.quants.quantize(array, stored)


def _add(writer: Any, key: str, value: int | float | str) -> None:
    """Add a number or a text."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_tokenizer(writer: Any, words: GgufTokenizer, document_token: int, template: str) -> None:
    """Add the tokenizer; every text begins with the token that begins a document."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.token_types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(document_token)
    writer.add_eos_token_id(document_token)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if template:
        writer.add_chat_template(template)


def _add_origin(writer: Any, name: str, origin: Origin | None) -> None:
    """Add the model's name, which run it is, and what that run depends on."""
    writer.add_name(name)
    writer.add_string("headrace.version", __version__)
    if origin is None:
        return
    writer.add_string("headrace.run", origin.run)
    writer.add_uint32("headrace.step", origin.step)
    writer.add_string("headrace.checkpoint", origin.seal)
    for thing, digest in origin.fingerprint.items():
        writer.add_string(f"headrace.fingerprint.{thing}", digest)


def _seal(file: Path) -> None:
    """Write a file's digest in the place of the zeros."""
    at, digest = _place(file), digest_of(file)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(digest.encode())


def digest_of(file: Path) -> str:
    """Return the sha256 of a file, in which its own digest counts as zeros."""
    at, digest = _place(file), hashlib.sha256()
    with file.open("rb") as opened:
        digest.update(opened.read(at) + b"0" * 64)
        opened.seek(at + 64)
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _place(file: Path) -> int:
    """Return where a file that was written here holds its digest, in bytes; -1 in another file."""
    with file.open("rb") as opened:
        begins = opened.read(1 << 10)
    at = begins.find(key := SHA256.encode())
    return -1 if at < 0 else at + len(key) + 12  # type of the value, then its length
