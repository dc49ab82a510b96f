"""Measure which matrices a model can least do without, and keep these in more bits.

The sensitivity of a matrix is what its quantization alone does to the model's predictions: the
mean over tokens of the Kullback-Leibler divergence KL(fp32 || quantized), in nats. It is less noisy
than the change of the loss. The bits of a budget go where they take away most of it for each byte.
Mixed precision by measured sensitivity is HAWQ's idea (arXiv 1905.03696).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.compress.quantized_model import Stored, faking, formats_of, stored_bytes
from headrace.compress.spec import ROW_INT8, QuantizationSpec
from headrace.core.progress import OnProgress
from headrace.model.decoder import Decoder
from headrace.model.mask import Rows


@torch.no_grad()
def logits_on(model: Decoder, ids_BT: Tensor) -> Tensor:
    """Return the fp32 logits [B, T, V] of rows of text, each a document of its own."""
    rows = []
    for ids_T in ids_BT:
        positions = torch.arange(len(ids_T), device=ids_T.device)[None]
        rows.append(model.logits(ids_T[None], Rows(positions, None, None)))
    return torch.cat(rows)


def sensitivities(
    model: Decoder,
    spec: QuantizationSpec,
    stored: Stored,
    ids_BT: Tensor,
    progress: OnProgress = lambda description, done, total: None,
) -> dict[str, float]:
    """Return the sensitivity of each quantized matrix, in nats a token, the largest first.

    Args:
        model: with its fp32 weights.
        spec: how the matrices are quantized.
        stored: the quantized matrices.
        ids_BT: the text on which it is measured.
        progress: takes how far it is.
    """
    whole = logits_on(model, ids_BT).log_softmax(-1)
    nats: dict[str, float] = {}
    for done, (name, one) in enumerate(stored.items()):
        progress("measuring sensitivity", done, len(stored))
        with faking(model, spec, {name: one}):
            other = logits_on(model, ids_BT).log_softmax(-1)
        nats[name] = float((whole.exp() * (whole - other)).sum(-1).mean())
    return dict(sorted(nats.items(), key=lambda pair: (-pair[1], pair[0])))


def ranked(model: Decoder, spec: QuantizationSpec, measured: Mapping[str, float]) -> list[str]:
    """Return the matrices of 4 bits in the order in which 8 bits pay, by sensitivity a byte.

    Args:
        model: of which they are.
        spec: how they are quantized.
        measured: their sensitivities.
    """
    formats = formats_of(model, spec)

    def worth(name: str) -> float:
        shape = model.get_parameter(name).shape
        more = ROW_INT8.stored_bytes(*shape) - formats[name].stored_bytes(*shape)
        return measured[name] / more

    small = [name for name in measured if formats[name].dtype in ("int4", "nf4")]
    return sorted(small, key=lambda name: (-worth(name), name))


def with_higher(spec: QuantizationSpec, names: Sequence[str]) -> QuantizationSpec:
    """Return a spec that keeps these matrices in 8 bits."""
    exceptions = {**spec.exceptions, **dict.fromkeys(names, ROW_INT8)}
    return spec.model_copy(update={"name": f"{spec.name}-hybrid", "exceptions": exceptions})


def within_budget(
    model: Decoder, spec: QuantizationSpec, order: Sequence[str], budget_bytes: int
) -> QuantizationSpec:
    """Return a spec that keeps as many matrices in 8 bits as a budget has room for.

    Args:
        model: that is to be quantized.
        spec: how it is without the budget's room.
        order: the matrices, those that pay most first; one that does not fit is passed over.
        budget_bytes: the most bytes of all weights.
    """
    kept: list[str] = []
    for name in order:
        if stored_bytes(model, with_higher(spec, [*kept, name])) <= budget_bytes:
            kept.append(name)
    return with_higher(spec, kept)
