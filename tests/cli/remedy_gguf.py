"""Errors of GGUF files: what is not written as one, and files that are none or are damaged."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_gguf
import torch
from remedy_python import Call, settings
from shell import Case, run

from headrace.data.tokenizer import train_tokenizer
from headrace.export.executorch_file import INSTALL as EXECUTORCH
from headrace.export.gguf import INSTALL
from headrace.export.gguf_graph import graph_of
from headrace.export.onnx_file import INSTALL as ONNX

DEVICES = "headrace.export."
INSTALLED = {INSTALL: "it is installed here"}
COPY = {"another copy of bad.gguf": "no other is here"}


def file(name: str, change: Callable[[bytes], bytes] = lambda content: content) -> Path:
    """Write a whole file, or a changed one."""
    own = train_tokenizer(["the mill " * 50], vocab=270, pattern="gpt4")
    tiny_gguf.write(tiny_gguf.model({}), own, path := Path(name))
    path.write_bytes(change(path.read_bytes()))
    return path


def bad(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return what writes a changed file."""
    return lambda _: file("bad.gguf", change)


def of_nobody(content: bytes) -> bytes:
    """Name an architecture that there is none of, and leave out the digest, as others do."""
    return content.replace(b"headrace.sha256", b"headrace.sha000").replace(b"llama", b"llamx")


def absent(name: str) -> Callable[[pytest.MonkeyPatch], object]:
    """Let a package be missing."""
    return lambda patch: patch.setitem(sys.modules, name, None)


def written_here(patch: pytest.MonkeyPatch) -> None:
    """Let ExecuTorch be installed, which is asked for before anything is compared."""
    patch.setattr(f"{DEVICES}executorch_file.find_spec", lambda name: name)


def quantized(_: Path) -> None:
    """Write a quantized model."""
    assert run(["compress", "demo", "--to", "int8", "--output", "small"]).code == 0


def windowed(patch: pytest.MonkeyPatch) -> None:
    """Ask for the graph of a model with a window."""
    ours = tiny_gguf.model({"window": 8})
    graph_of(ours.config, ours.position)


def without_window(remedy: str) -> None:
    """Make the model as the remedy says."""
    said = {key.removeprefix("model."): int(text) for key, text in settings(remedy).items()}
    ours = tiny_gguf.model({"window": 8} | said)
    assert graph_of(ours.config, ours.position).name == "llama"


def written(largest: float) -> None:
    """Write weights of that size."""
    ours = tiny_gguf.model({})
    with torch.no_grad():
        ours.embed.weight[0, 0] = largest
    own = train_tokenizer(["the mill " * 50], vocab=270, pattern="gpt4")
    Path("large.gguf").unlink(missing_ok=True)
    try:
        tiny_gguf.write(ours, own, Path("large.gguf"), "f16")
    finally:
        Path("large.gguf").unlink(missing_ok=True)


def other_format(remedy: str) -> None:
    """Write what fits; the other format is that of its own tests."""
    assert remedy.startswith("--to hf")
    written(1.0)


GGUF = {
    "export/gguf:stored_as#1": Case("export demo --to peft --quantize q8_0 --output out"),
    "export/gguf:stored_as#2": Case("export demo --to gguf --quantize q8"),
    "export/gguf:gguf_package#1": Case(
        "export demo --to gguf", fake=absent("gguf"), prose=INSTALLED
    ),
    "export/onnx_file:check_installed#1": Case(
        "export demo --to onnx",
        fake=lambda patch: patch.setattr(f"{DEVICES}onnx_file.find_spec", lambda name: None),
        prose={ONNX: "it is installed where this runs"},
    ),
    "export/executorch_file:check_installed#1": Case(
        "export demo --to executorch",
        fake=lambda patch: patch.setattr(f"{DEVICES}executorch_file.find_spec", lambda name: None),
        prose={EXECUTORCH: "it is installed where this runs"},
    ),
    "export/edge:spec_of#1": Case("export demo --to onnx --quantize int9"),
    "export/edge:check_spec#1": Case(
        "export small/int8 --to executorch", quantized, fake=written_here, fills={"RUN": "demo"}
    ),
    "export/edge_runtime:read_record#1": Case(
        "run x.onnx", lambda _: Path("x.onnx").write_text(""), fills={"RUN": "demo"}
    ),
    "cli/export:_codes_of#1": Case("export small/int8 --to onnx --quantize int4", quantized),
    "export/run:_export_gguf#1": Case(
        "export demo --to gguf", through=("export/gguf_tokenizer:vocabulary#1",)
    ),
    "export/runtime:open_runtime#1": Case("run x.gguf", fills={"RUN": "demo"}),
    "export/runtime:open_runtime#2": Case(
        "run x.bin", lambda _: Path("x.bin").write_text(""), fills={"RUN": "demo"}
    ),
    "export/llama_cpp:LlamaCpp.__init__#1": Case(
        "run a.gguf", lambda _: file("a.gguf"), fake=absent("xllamacpp"), prose=INSTALLED
    ),
    "export/llama_cpp:LlamaCpp._open#1": Case(
        "run bad.gguf",
        bad(of_nobody),
        prose={"pip install --upgrade xllamacpp": "it is the newest"},
    ),
    "export/llama_cpp:refuse_long#1": Case("run a.gguf --max-tokens 60", lambda _: file("a.gguf")),
    "export/llama_cpp:_fields#1": Case("run bad.gguf", bad(lambda _: b"PK"), prose=COPY),
    "export/llama_cpp:_fields#2": Case("run bad.gguf", bad(lambda all: all[:4000]), prose=COPY),
    "export/llama_cpp:_fields#3": Case(
        "run bad.gguf", bad(lambda all: all[:-40] + b"\1" + all[-39:]), prose=COPY
    ),
}
"""Commands on a run, and on files."""
GGUF_IN_PYTHON = {
    "export/gguf_graph:graph_of#1": Call(windowed, without_window),
    "export/gguf:_stored#1": Call(lambda patch: written(1e6), other_format),
}
