"""Say how the numbers of a model are stored and multiplied: one object from training to a device.

What quantizes a model, what fake-quantizes it in training and what writes it for a runtime read the
same `QuantizationSpec`, so that the file which ships computes what was evaluated. Scales and zero
points follow torchao (https://github.com/pytorch/ao): a symmetric scale is the largest magnitude
over (most - least) / 2 of the codes, so that 127.5 and 7.5 are its divisors. In the place of fewer
bits a matrix may have fewer numbers (`SparsitySpec`).

Groups lie along rows. A permutation of rows, as exporters need it for fused projections, therefore
moves codes and scales and changes no number.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from headrace.core.limits import WIDEST
from headrace.core.remedy import mend
from headrace.core.strict import Strict, Wrong

BITS = {"fp32": 32, "int8": 8, "int4": 4, "nf4": 4}
"""Bits of one stored number, without its share of a scale."""
CODE_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}
"""The least and the most code of an integer type."""
NF4_GROUP = 64
"""Numbers under one scale of NF4 (arXiv 2305.14314)."""
GROUP, HALF = 4, 0.5
"""Neighbours of a row among which the pattern 2:4 prunes, and the share that it prunes."""


class SparsitySpec(Strict):
    """Say which numbers of a matrix are pruned, that is zero, and by which measure."""

    pattern: Literal["2:4", "unstructured"] = "2:4"
    """2:4 prunes two of every four neighbours of a row, which sparse matrix units of NVIDIA GPUs
    multiply (arXiv 2104.08378); unstructured prunes any."""
    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the numbers that is pruned; that of 2:4 is 0.5."""
    metric: Literal["magnitude", "wanda"] = "magnitude"
    """What is pruned first: the smallest magnitudes; or, wanda, the smallest products of magnitude
    and the norm of the input feature over text, compared within each row (arXiv 2306.11695)."""

    @model_validator(mode="after")
    def _check_share(self) -> "SparsitySpec":
        if self.pattern == "2:4" and self.share != HALF:
            raise Wrong(
                f"pattern = '2:4' prunes two of four, and share = {self.share:g} is not {HALF:g}",
                mend(f"share={HALF:g}"),
            )
        return self

    @property
    def name(self) -> str:
        """Return the name of a point that is stored so: "2:4", or the share in percent."""
        return self.pattern if self.pattern == "2:4" else f"{100 * self.share:g}%"

    def groups_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many groups of numbers are compared with each other, and numbers of each.

        Args:
            rows: of the matrix.
            columns: of the matrix; 2:4 needs a multiple of `GROUP`.
        """
        if self.pattern == "2:4":
            return rows * columns // GROUP, GROUP
        return (rows, columns) if self.metric == "wanda" else (1, rows * columns)

    def pruned_numbers(self, rows: int, columns: int) -> int:
        """Return how many numbers of a matrix of this shape are pruned."""
        groups, numbers = self.groups_of(rows, columns)
        return groups * round(self.share * numbers)


class NumberFormat(Strict):
    """How one matrix is stored."""

    dtype: Literal["fp32", "int8", "int4", "nf4"] = "fp32"
    """Integers, the 16 quantiles of a normal distribution (nf4), or unchanged numbers (fp32)."""
    group: int = Field(default=0, ge=0, le=WIDEST)
    """Numbers of a row under one scale; 0 is the whole row. It divides the row; nf4 pads it."""
    symmetric: bool = True
    """Whether zero has code 0; otherwise each group has a zero point."""
    scales: Literal["fp32", "bf16"] = "fp32"
    """Type of the scales. XNNPACK, which ExecuTorch runs on, keeps those of int4 in bf16."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """Whether each number goes to its nearest code, or GPTQ corrects what is still to be rounded
    (arXiv 2210.17323), which needs text to calibrate on."""
    sparsity: SparsitySpec | None = None
    """Which numbers are zero and not stored: those that are left are fp32, with a bit a number that
    says where they stand."""

    @model_validator(mode="after")
    def _check(self) -> "NumberFormat":
        if self.dtype == "nf4" and (self.group != NF4_GROUP or not self.symmetric):
            raise Wrong(
                f"nf4 has groups of {NF4_GROUP} and no zero points, and group = {self.group}, "
                f"symmetric = {self.symmetric}",
                mend(f"group={NF4_GROUP}", "symmetric=true"),
            )
        if self.rounding == "gptq" and self.dtype not in CODE_RANGE:
            raise Wrong(
                f"rounding = 'gptq' makes whole numbers, and dtype = {self.dtype!r} has none",
                mend("rounding=nearest"),
            )
        if self.sparsity is not None and self.dtype != "fp32":
            raise Wrong(
                f"sparsity stores the numbers that are left as fp32, and dtype = {self.dtype!r}",
                mend("dtype=fp32"),
            )
        return self

    @property
    def is_quantized(self) -> bool:
        """Return whether it changes the numbers: by fewer bits, or by pruning."""
        return self.dtype != "fp32" or self.sparsity is not None

    def groups_of(self, columns: int) -> int:
        """Return how many scales a row of so many numbers has."""
        return -(-columns // self.group) if self.group else 1

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of codes, scales and zero points of a matrix of this shape."""
        if self.sparsity is not None:  # at a share of half 17/32 of fp32
            left = rows * columns - self.sparsity.pruned_numbers(rows, columns)
            return 4 * left + rows * -(-columns // 8)
        if self.dtype == "fp32":
            return 4 * rows * columns
        groups = self.groups_of(columns)
        if self.dtype == "nf4":  # one byte a scale, and two numbers of fp32 a row for these
            return rows * (groups * NF4_GROUP // 2 + groups + 8)
        codes = rows * -(-columns * BITS[self.dtype] // 8)
        scale_bytes = 4 if self.scales == "fp32" else 2
        return codes + rows * groups * (scale_bytes + (0 if self.symmetric else 1))


ROW_INT8 = NumberFormat(dtype="int8")
GROUP_INT4 = NumberFormat(dtype="int4", group=32)
WHOLE = NumberFormat()


class QuantizationSpec(Strict):
    """How every matrix of a model is stored, and what the matmuls read.

    Vectors, as norms and biases, stay in fp32: they are under a thousandth of a model.
    """

    name: str
    """The preset, or what a search made."""
    matrices: NumberFormat = WHOLE
    """The linears of blocks."""
    embeddings: NumberFormat = WHOLE
    """The embedding, which is the output matrix too where they are tied."""
    head: NumberFormat = WHOLE
    """The output matrix of a model whose embedding is not tied."""
    activations: Literal["none", "int8_symmetric", "int8_asymmetric"] = "none"
    """What the matmuls with quantized weights read: fp32, or codes of 8 bits with a scale for each
    token that is made of that token's own range."""
    exceptions: Mapping[str, NumberFormat] = Field(default_factory=dict)
    """Full names of parameters, as `blocks.0.mlp.down.weight`, that have another format."""

    @model_validator(mode="after")
    def _check_activations(self) -> "QuantizationSpec":
        if self.activations == "none":
            return self
        formats = (self.matrices, self.embeddings, self.head, *self.exceptions.values())
        rows = self.activations == "int8_symmetric"
        for kind in filter(lambda kind: kind.is_quantized, formats):
            by_row = kind.dtype == "int8" and not kind.group and kind.symmetric
            if kind.dtype not in CODE_RANGE or (rows and not by_row):
                fit = "dtype = 'int8' in whole rows" if rows else "dtype = 'int8' or 'int4'"
                raise Wrong(
                    f"activations = {self.activations!r} multiplies weights of {fit}, and these "
                    f"are {kind.dtype} in groups of {kind.group}",
                    mend("activations=none"),
                )
        return self

    def format_of(self, name: str, role: str) -> NumberFormat:
        """Return how a parameter is stored.

        Args:
            name: its full name.
            role: its role by `optim.roles.role_of`; vectors stay as they are.
        """
        if role == "vectors":
            return WHOLE
        own = self.exceptions.get(name)
        if own is not None:
            return own
        return {"matrices": self.matrices, "embeddings": self.embeddings, "head": self.head}[role]

    def with_group(self, group: int) -> "QuantizationSpec":
        """Return the same with other groups wherever it has groups of int4 or int8."""
        formats = {
            role: kept.model_copy(update={"group": group})
            for role in ("matrices", "embeddings", "head")
            if (kept := getattr(self, role)).group and kept.dtype in CODE_RANGE
        }
        return self.model_copy(update=formats)


PRESETS = {
    spec.name: spec
    for spec in (
        QuantizationSpec(name="int8", matrices=ROW_INT8, embeddings=ROW_INT8, head=ROW_INT8),
        QuantizationSpec(
            name="int8-dynamic",
            matrices=ROW_INT8,
            embeddings=ROW_INT8,
            head=ROW_INT8,
            activations="int8_symmetric",
        ),
        QuantizationSpec(
            name="8da4w",
            matrices=GROUP_INT4.model_copy(update={"scales": "bf16"}),
            embeddings=ROW_INT8,
            head=ROW_INT8,
            activations="int8_asymmetric",
        ),
        QuantizationSpec(name="int4", matrices=GROUP_INT4, embeddings=ROW_INT8, head=ROW_INT8),
        QuantizationSpec(
            name="int4-gptq",
            matrices=GROUP_INT4.model_copy(update={"rounding": "gptq"}),
            embeddings=ROW_INT8,
            head=ROW_INT8,
        ),
        QuantizationSpec(
            name="nf4",
            matrices=NumberFormat(dtype="nf4", group=NF4_GROUP),
            embeddings=ROW_INT8,
            head=ROW_INT8,
        ),
    )
}
"""The specs that have names: int8 weight-only, int8 with dynamic activations, 4-bit weights with
8-bit dynamic activations (8da4w), 4-bit weights in groups, and NF4."""


def sparse_spec(sparsity: SparsitySpec) -> QuantizationSpec:
    """Return the spec that stores the linears of blocks without their pruned numbers."""
    return QuantizationSpec(name=sparsity.name, matrices=NumberFormat(sparsity=sparsity))
