"""Write a model as one ExecuTorch program (.pte), whose matmuls XNNPACK computes.

The program keeps keys and values itself, in buffers for the longest text, and takes ids and how
many tokens stand before them; it returns the logits after the last. A prompt goes in in pieces of
at most `PIECE` tokens.

XNNPACK multiplies codes of 4 bits whose scales are bf16, and codes of 8 bits, by activations of 8
bits with a scale and a zero point for each token. That is the preset 8da4w, so the file computes
what training and evaluation compute. Rows of the embedding are codes of 8 bits too, which are
looked up and made whole.

Source: https://docs.pytorch.org/executorch/stable/backends/xnnpack/xnnpack-overview.html
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions

from headrace.compress.codes import Codes
from headrace.compress.quantized_model import Stored, is_tied, runtime_tensor
from headrace.compress.quantized_model import check_installed as torchao_installed
from headrace.compress.spec import QuantizationSpec
from headrace.core.errors import UnsupportedError
from headrace.export.cached import StaticDecoder
from headrace.export.onnx_file import quiet
from headrace.model.decoder import Decoder

INSTALL = "pip install 'headrace[executorch]'"
"""The command that installs the writer of ExecuTorch programs, and their runtime."""
XNNPACK = "executorch.backends.xnnpack.partition"
"""Where what picks XNNPACK's part of a graph is defined."""
GROUP = 32
"""Numbers of a group of 4 bits: XNNPACK multiplies groups of a multiple of so many."""
PLACE = 4
"""Bytes before a program's identifier, whose digits are the version of the format."""
PIECE = 128
"""Most tokens of a prompt that one call takes: buffers are planned for so many."""


def check_installed() -> None:
    """Refuse to go on without ExecuTorch.

    Raises:
        UnsupportedError: it is not installed.
    """
    if find_spec("executorch") is None:
        raise UnsupportedError(
            "ExecuTorch programs are written and run by executorch, which is not installed",
            INSTALL,
        )
    torchao_installed()


def check_identifier(file: Path) -> None:
    """Refuse a file that is no program: ExecuTorch ends the process at some that begin otherwise.

    Raises:
        ValueError: it does not begin as a program does.
    """
    with file.open("rb") as opened:
        begins = opened.read(PLACE + 4)
    if not re.fullmatch(rb"ET\d\d", begins[PLACE:]):
        raise ValueError(f"it begins with {begins!r}, and a program has ET12 in place {PLACE}")


class RowEmbedding(nn.Module):
    """Look rows of codes of 8 bits up, and make them whole."""

    codes: Tensor
    scales: Tensor

    def __init__(self, one: Codes) -> None:
        super().__init__()
        self.register_buffer("codes", one.codes_RC)
        self.register_buffer("scales", one.scales_RG)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, fp32 [..., C]."""
        rows = nn.functional.embedding(ids, self.codes).to(torch.float32)
        return rows * nn.functional.embedding(ids, self.scales)


def in_few_bits(model: Decoder, spec: QuantizationSpec, stored: Stored) -> Any:
    """Put the quantized matrices of a model into its modules, and return what multiplies the head.

    Args:
        model: a decoder that nothing else uses.
        spec: how they are stored; `edge.check_spec` has let it pass.
        stored: the matrices, which are all codes.
    """
    output = None
    for name, one in stored.items():
        assert isinstance(one, Codes), "check_spec lets no other pass"
        end = name.removesuffix(".weight")
        owner: Any = model.get_submodule(end)
        tensor = nn.Parameter(runtime_tensor(one, spec, name), requires_grad=False)
        if end == "head" or (end == "embed" and is_tied(model)):
            rows, columns = one.codes_RC.shape
            output = nn.Linear(columns, rows, bias=False, device="meta")
            output.weight = tensor
        if isinstance(owner, nn.Embedding):
            parent, _, own = end.rpartition(".")
            setattr(model.get_submodule(parent), own, RowEmbedding(one))
        elif isinstance(owner, nn.Linear):
            owner.weight = tensor
    return output


@torch.no_grad()
def write_executorch(step: StaticDecoder, file: Path) -> None:
    """Write the program of a decoder that keeps its cache.

    Args:
        step: the decoder; its matrices are what `in_few_bits` has made of them.
        file: the new file.
    """
    with quiet():
        exir = import_module("executorch.exir")
        xnnpack = import_module(f"{XNNPACK}.xnnpack_partitioner")
        most = min(PIECE, step.places)
        tokens = torch.export.Dim("tokens", min=1, max=most)
        given = torch.zeros(1, min(3, most), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        program = torch.export.export(
            step.eval(), given, dynamic_shapes={"ids_1T": {1: tokens}, "seen_1": None}
        )
        # XNNPACK's own GELU is off by 1e-3.
        plain = get_decompositions([torch.ops.aten.gelu.default])
        if any(node.target == torch.ops.aten.gelu.default for node in program.graph.nodes):
            program = program.run_decompositions(dict(plain))
        lowered = exir.to_edge_transform_and_lower(
            program,
            partitioner=[
                xnnpack.XnnpackDynamicallyQuantizedPartitioner(),
                xnnpack.XnnpackPartitioner(),
            ],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
        )
        with file.open("wb") as opened:
            lowered.to_executorch().write_to_file(opened)
