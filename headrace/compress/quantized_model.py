"""Quantize the matrices of a model, and let it compute with them: by torchao, or by plain torch.

A model's quantized matrices are held by their names, in the form in which a file keeps them. Two
contexts put them in the place of the model's weights:

- `computing` gives each matrix to torchao's tensors, whose matmuls are what ships;
- `faking` gives the model the fp32 numbers that the codes stand for, and rounds what its matmuls
  read. It is the reference: training with fake quantization computes it, and so must every runtime.

Both leave the model as it was.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compress.codes import (
    Codes,
    activation_codes,
    fake_activations,
    quantize_nearest,
)
from headrace.compress.sparsity import SparseMatrix, prune_matrix
from headrace.compress.spec import CODE_RANGE, GROUP, NumberFormat, QuantizationSpec
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.remedy import Remedy
from headrace.core.units import divisors
from headrace.kernels.quantized_weight import NF4Weight
from headrace.model.decoder import Decoder
from headrace.optim.roles import Role, role_of

StoredMatrix = Codes | NF4Weight | SparseMatrix
Stored = Mapping[str, StoredMatrix]
"""Quantized matrices by the full names of their parameters."""


def matrices_of(model: Decoder) -> dict[str, Role]:
    """Return the role of each matrix that a spec quantizes, by its parameter's full name.

    They are the weights of plain linears, the tables of embeddings, and the output matrix. Experts
    and convolutions, whose weights have other shapes, and learned positions are not among them.
    """
    names = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding) or (name == "head" and not is_tied(model))
    }
    return {name: role_of(name, 2) for name in names}


def is_tied(model: Decoder) -> bool:
    """Return whether the embedding is the output matrix too."""
    return model.head.weight is None


def by_option(group: int) -> Remedy:
    """Return the option of `headrace compress` that sets the size of groups."""
    return Remedy(text=f"--group {group}")


def formats_of(
    model: Decoder, spec: QuantizationSpec, regroup: Callable[[int], Remedy] = by_option
) -> dict[str, NumberFormat]:
    """Return the format of each matrix that a spec quantizes in this model, by name.

    Args:
        model: whose matrices they are.
        spec: how they are stored.
        regroup: (size of a group that fits) -> what sets it.

    Raises:
        ConfigError: the groups or 2:4 do not divide a matrix, or an exception names none.
    """
    roles = matrices_of(model)
    if unknown := sorted({*spec.exceptions} - {*roles}):
        raise ConfigError(
            f"{unknown[0]} has a format of its own in {spec.name}, and is no matrix of this model",
            f"a name as {next(iter(roles))}",
        )
    formats = {name: spec.format_of(name, role) for name, role in roles.items()}
    quantized = {name: kind for name, kind in formats.items() if kind.is_quantized}
    for name, kind in quantized.items():
        columns = model.get_parameter(name).size(1)
        if kind.group and kind.dtype in CODE_RANGE and columns % kind.group:
            fit = min(divisors(columns), key=lambda size: (abs(size - kind.group), -size))
            raise ConfigError(
                f"{spec.name} has groups of {kind.group} numbers, which do not divide the "
                f"{columns} columns of {name}",
                regroup(fit),
            )
        if kind.sparsity is not None and kind.sparsity.pattern == "2:4" and columns % GROUP:
            raise ConfigError(
                f"{spec.name} prunes two of every {GROUP} numbers of a row, and {name} has "
                f"{columns} columns",
                Remedy(text="--to 50%"),
            )
    return quantized


def quantize_matrix(name: str, weight_RC: Tensor, kind: NumberFormat) -> StoredMatrix:
    """Return a matrix in a format: each number rounded to its nearest code, or pruned by magnitude.

    Raises:
        ConfigError: it has numbers that are not finite.
    """
    check_finite(name, weight_RC)
    if kind.sparsity is not None:
        return prune_matrix(weight_RC, kind.sparsity)
    if kind.dtype == "nf4":
        return NF4Weight.of(weight_RC.detach().float())
    return quantize_nearest(weight_RC, kind)


def check_finite(name: str, weight: Tensor) -> None:
    """Refuse a weight with NaN or infinite numbers, which would spoil the scales around them.

    Raises:
        ConfigError: names it and says how many there are.
    """
    if wild := int((~weight.isfinite()).sum()):
        raise ConfigError(
            f"{name} has {wild:,} of {weight.numel():,} numbers that are NaN or infinite, and no "
            "scale fits them",
            "the weights of an earlier checkpoint",
        )


def quantize_model(
    model: Decoder, spec: QuantizationSpec, fill: Mapping[str, StoredMatrix] | None = None
) -> dict[str, StoredMatrix]:
    """Return the quantized matrices of a model, which stays as it is.

    Args:
        model: with its fp32 weights.
        spec: what to make of them.
        fill: matrices that something else has made, as GPTQ; the others go to the nearest.

    Raises:
        ConfigError: see `formats_of` and `quantize_matrix`.
    """
    given = fill or {}
    formats = formats_of(model, spec)
    for name, parameter in model.named_parameters():
        check_finite(name, parameter)
    return {
        name: given.get(name) or quantize_matrix(name, model.get_parameter(name), kind)
        for name, kind in formats.items()
    }


def stored_bytes(model: Decoder, spec: QuantizationSpec) -> int:
    """Return the bytes of all weights of a model under a spec, before anything is quantized.

    Raises:
        ConfigError: see `formats_of`.
    """
    formats = formats_of(model, spec)
    return sum(
        formats[name].stored_bytes(*parameter.shape) if name in formats else 4 * parameter.numel()
        for name, parameter in model.named_parameters()
    )


@contextmanager
def faking(model: Decoder, spec: QuantizationSpec, stored: Stored) -> Iterator[None]:
    """Let a model compute what its quantized matrices stand for, in plain torch."""
    fakes = {name: FakeMatrix.of(one, spec.activations) for name, one in stored.items()}
    with _replaced(model, fakes):
        yield


class FakeMatrix(torch.Tensor):
    """The fp32 numbers that a quantized matrix stands for; a matmul rounds what it multiplies.

    Products of codes of 8 bits are exact whole numbers, summed in fp64 here and by integers in
    kernels. A sum in fp32 would be off by its last bit, which the next rounding of activations may
    turn into a whole step.
    """

    codes: Codes | None
    """The codes, where it has some."""
    activations: str

    @classmethod
    def of(cls, one: StoredMatrix, activations: str) -> "FakeMatrix":
        """Return what a quantized matrix stands for, and what its matmuls are to round."""
        made: FakeMatrix = one.dequantize().as_subclass(cls)
        made.codes = one if isinstance(one, Codes) else None
        made.activations = activations
        made._is_param = True  # by which torch knows a parameter
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and isinstance(args[1], cls):
                return args[1]._linear(args[0], *args[2:], **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with activations that are rounded as the spec says."""
        weight_RC = self.as_subclass(torch.Tensor)
        if self.activations == "int8_symmetric" and self.codes is not None:
            codes, scales = activation_codes(x)
            y = (codes.double() @ self.codes.codes_RC.double().t()).float()
            y = y * scales * self.codes.scales_RG.flatten()
            return y if bias is None else y + bias
        if self.activations == "int8_asymmetric":
            x = fake_activations(x)
        return F.linear(x, weight_RC, bias)


@contextmanager
def computing(model: Decoder, spec: QuantizationSpec, stored: Stored) -> Iterator[None]:
    """Let a model compute with its quantized matrices by torchao.

    NF4 is this package's own tensor, with which `qlora` trains: torchao's takes only matrices of a
    multiple of 16,384 numbers. Pruned matrices need no torchao: they are made whole.

    Raises:
        UnsupportedError: torchao is not installed.
    """
    if not all(isinstance(one, SparseMatrix) for one in stored.values()):
        check_installed()
    tensors = {name: runtime_tensor(one, spec, name) for name, one in stored.items()}
    with _replaced(model, tensors):
        yield


def check_installed() -> None:
    """Refuse to go on without torchao, and import it.

    Raises:
        UnsupportedError: it is not installed.
    """
    if find_spec("torchao") is None:
        raise UnsupportedError(
            "quantized models compute by torchao, which is not installed",
            "pip install 'headrace[quant]'",
        )
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of kernels for other GPUs, which no user misses
    try:
        import_module("torchao.quantization")
    finally:
        logging.disable(before)


def runtime_tensor(one: StoredMatrix, spec: QuantizationSpec, name: str) -> Tensor:
    """Return the tensor whose matmuls a quantized matrix takes part in."""
    if isinstance(one, NF4Weight):
        return one
    if isinstance(one, SparseMatrix):
        return one.dequantize()
    columns = one.codes_RC.size(1)
    by_row = one.scales_RG.size(1) == 1 and not bool(one.zeros_RG.any())
    kind = spec.format_of(name, role_of(name, 2))
    if spec.activations != "int8_asymmetric" and by_row and kind.dtype == "int8":
        return _int8_tensor(one, [1, columns], dynamic=spec.activations == "int8_symmetric")
    from torchao.quantization.quantize_.workflows.intx import (
        intx_unpacked_to_int8_tensor as intx,
    )

    reads = intx.IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN
    return intx.IntxUnpackedToInt8Tensor(
        qdata=one.codes_RC,
        scale=one.scales_RG,
        zero_point=one.zeros_RG,
        target_dtype=getattr(torch, kind.dtype),
        block_size=(1, columns // one.scales_RG.size(1)),
        dtype=torch.float32,
        activation_quantization=reads if spec.activations == "int8_asymmetric" else None,
    )


def _int8_tensor(one: Codes, block: list[int], *, dynamic: bool) -> Tensor:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8 import int8_tensor

    reads = int8_tensor.QuantizeTensorToInt8Kwargs(granularity=PerRow()) if dynamic else None
    return int8_tensor.Int8Tensor(
        one.codes_RC,
        one.scales_RG,
        block,
        torch.float32,
        zero_point=one.zeros_RG,
        act_quant_kwargs=reads,
    )


@contextmanager
def _replaced(model: Decoder, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other tensors into the places of parameters, and the parameters back at the end."""
    kept = {name: model.get_parameter(name) for name in tensors}
    try:
        for name, tensor in tensors.items():
            is_ready = isinstance(tensor, FakeMatrix)
            _put(model, name, tensor if is_ready else nn.Parameter(tensor, requires_grad=False))
        yield
    finally:
        for name, parameter in kept.items():
            _put(model, name, parameter)


def _put(model: Decoder, name: str, parameter: Any) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_parameter(own, parameter)
