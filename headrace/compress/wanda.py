"""Prune the linears of a finished model by Wanda: by its weights and by what text lets them read.

Blocks follow each other, as in the paper's program: a block is calibrated on what the pruned blocks
before it give. Source: arXiv 2306.11695, section 3; github.com/locuslab/wanda.

Shapes: B rows of text, T tokens, C columns.
"""

import torch
from torch import Tensor

from headrace.compress.quantized_model import check_finite, faking, formats_of
from headrace.compress.sparsity import SparseMatrix, input_squares, prune_matrix
from headrace.compress.spec import QuantizationSpec
from headrace.core.progress import OnProgress
from headrace.model.decoder import Decoder
from headrace.model.mask import Rows


@torch.no_grad()
def wanda_model(
    model: Decoder,
    spec: QuantizationSpec,
    ids_BT: Tensor,
    progress: OnProgress = lambda description, done, total: None,
) -> dict[str, SparseMatrix]:
    """Return what is left of every linear that a spec prunes by Wanda, by its parameter's name.

    Args:
        model: with its fp32 weights, which stay as they are.
        spec: what to make of them.
        ids_BT: the text to calibrate on.
        progress: takes how far it is.

    Raises:
        ConfigError: see `formats_of` and `check_finite`.
    """
    sparse = {
        name: kind.sparsity
        for name, kind in formats_of(model, spec).items()
        if kind.sparsity is not None and kind.sparsity.metric == "wanda"
    }
    made: dict[str, SparseMatrix] = {}
    for done, block in enumerate(model.blocks):
        progress(f"calibrating {spec.name}", done, len(model.blocks))
        names = [name for name in sparse if name.startswith(f"blocks.{block}.")]
        linears = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
        with faking(model, spec, made), input_squares(linears) as squares:
            for ids_T in ids_BT:
                positions = torch.arange(len(ids_T), device=ids_T.device)[None]
                model.hidden(ids_T[None], Rows(positions, None, None))
        for name in names:
            weight = model.get_parameter(name)
            check_finite(name, weight)
            made[name] = prune_matrix(weight, sparse[name], squares[name].sqrt())
    return made
