"""Write a model as one ONNX file, which ONNX Runtime runs: weights, and a graph with a cache.

The graph takes ids and keys and values of the tokens before, and returns logits and the longer keys
and values; rows, tokens and tokens before are free. Inputs and outputs have the names that
transformers' exporters give them (`past_key_values.0.key`, `present.0.key`).

Quantized matrices are the codes of the spec, which ONNX Runtime's `MatMulNBits` makes whole block
by block as it multiplies. Both matrices of tied embeddings are one tensor. Activations in codes
are left out: the graph's sums differ from torch's in their last bit, which the next rounding turns
into a whole step now and then (logits of a toy model moved by 0.2), so no such file computes what
was evaluated.

Sources: torch.onnx (the exporter of torch.export's graphs); ONNX Runtime, docs/ContribOperators.md.
Shapes: R rows, C columns, K blocks of a row, N numbers of a block.
"""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.compress.codes import Codes, pack_int4
from headrace.compress.quantized_model import Stored, is_tied
from headrace.compress.spec import BITS, QuantizationSpec
from headrace.core.errors import UnsupportedError
from headrace.export.cached import CachedDecoder
from headrace.model.decoder import Decoder
from headrace.optim.roles import role_of

INSTALL = "pip install 'headrace[onnx]'"
"""The command that installs the writer of ONNX files, and ONNX Runtime."""
LEAST_BLOCK, MOST_BLOCK = 16, 256
"""Numbers under one scale of MatMulNBits: a power of two between these."""
ONE_FILE = 1_900_000_000
"""Most bytes of weights inside of the file; more go into a second one beside it, since a protobuf
has at most 2 GiB."""
OPSET = 20
"""Version of the operators that torch writes."""


def check_installed() -> None:
    """Refuse to go on without the packages that write and run ONNX files.

    Raises:
        UnsupportedError: one of them is not installed.
    """
    missing = [one for one in ("onnx", "onnxscript", "onnxruntime") if find_spec(one) is None]
    if missing:
        raise UnsupportedError(
            f"ONNX files are written and run by {' and '.join(missing)}, which is not installed",
            INSTALL,
        )


def block_of(columns: int, groups: int) -> int:
    """Return the numbers of a block of MatMulNBits, at least 1.

    Several blocks may have the scale of one group. A whole row is padded to blocks: those that take
    least are chosen, codes and scales together.
    """
    if groups > 1:
        size = columns // groups
        return min(size & -size, MOST_BLOCK)
    sizes = [1 << n for n in range(LEAST_BLOCK.bit_length() - 1, MOST_BLOCK.bit_length())]
    return min(sizes, key=lambda size: (-(-columns // size) * (size + 4), size))


class BlockMatrix(nn.Module):
    """Hold a quantized matrix as MatMulNBits reads it, and multiply with it in an ONNX graph.

    Outside of one it computes nothing.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, one: Codes, dtype: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.rows, self.columns = one.codes_RC.shape
        groups = one.scales_RG.size(1)
        self.bits, self.block = BITS[dtype], block_of(self.columns, groups)
        blocks = -(-self.columns // self.block)
        self.zero = 1 << (self.bits - 1)
        padded = nn.functional.pad(one.codes_RC, (0, blocks * self.block - self.columns))
        whole_RC = (padded.to(torch.int16) + self.zero).to(torch.uint8)
        packed = pack_int4(whole_RC.to(torch.int8)) if self.bits == 4 else whole_RC
        self.register_buffer("codes", packed.view(self.rows, blocks, -1).contiguous())
        scales_RK = one.scales_RG.repeat_interleave(blocks // groups, dim=1).contiguous()
        self.register_buffer("scales", scales_RK)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return the matmul [..., R] with `x` [..., C]."""
        sizes: dict[str, Any] = {
            "K": self.columns,
            "N": self.rows,
            "bits": self.bits,
            "block_size": self.block,
        }
        y = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x, self.codes, self.scales.flatten()),
            sizes,
            dtype=x.dtype,
            shape=(*x.shape[:-1], self.rows),
            version=1,
        )
        return y if self.bias is None else y + self.bias


class BlockEmbedding(nn.Module):
    """Look rows of a quantized matrix up and make them whole."""

    def __init__(self, matrix: BlockMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, fp32 [..., C]."""
        one = self.matrix
        codes = nn.functional.embedding(ids, one.codes.flatten(1)).unflatten(-1, (-1, one.block))
        scales = nn.functional.embedding(ids, one.scales)
        rows = (codes.to(torch.float32) - one.zero) * scales.unsqueeze(-1)
        return rows.flatten(-2)[..., : one.columns]


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
        end, dtype = name.removesuffix(".weight"), spec.format_of(name, role_of(name, 2)).dtype
        owner: Any = model.get_submodule(end)
        made = BlockMatrix(one, dtype, getattr(owner, "bias", None))
        if end == "head" or (end == "embed" and is_tied(model)):
            output = made
        if end != "head":
            put = BlockEmbedding(made) if isinstance(owner, nn.Embedding) else made
            _put(model, end, put)
    return output


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


def write_onnx(step: CachedDecoder, file: Path, facts: Mapping[str, str]) -> list[Path]:
    """Write the graph of a cached decoder, and return the files that it is made of.

    Args:
        step: the decoder; its matrices are what `in_few_bits` has made of them.
        file: the new file.
        facts: texts that the file says of itself.
    """
    config = step.model.config
    shape = (2, config.resolved_kv_heads, 4, config.resolved_head_dim)
    past = tuple(torch.zeros(shape) for _ in range(2 * config.layers))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    layers = [f"{n}.{part}" for n in range(config.layers) for part in ("key", "value")]
    batch, new, seen = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    with quiet():
        program = torch.onnx.export(
            step.eval(),
            (ids, *past),
            input_names=["input_ids", *(f"past_key_values.{one}" for one in layers)],
            output_names=["logits", *(f"present.{one}" for one in layers)],
            dynamic_shapes={
                "input_ids": {0: batch, 1: new},
                "past": tuple({0: batch, 2: seen} for _ in past),
            },
            opset_version=OPSET,
            dynamo=True,
        )
        assert program is not None
        program.model.metadata_props.update(facts)
        for node in program.model.graph.all_nodes():  # where the code of each stood, on this disk
            node.metadata_props.clear()
        size = sum(one.nbytes for one in step.state_dict().values())
        program.save(file, external_data=size > ONE_FILE)
    beside = file.with_name(f"{file.name}.data")
    return [file, beside] if beside.is_file() else [file]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's progress and its doubts about other models from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        dropped = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(dropped), redirect_stderr(dropped):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
