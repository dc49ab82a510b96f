"""Which weights are pruned, by hand and by a plain loop, and what a stored matrix keeps of them."""

import math
from typing import Any

import pytest
import torch
from test_quantized_model import decoder, text
from torch import Tensor, nn

from headrace.compress.quantized_model import faking, formats_of, quantize_model, stored_bytes
from headrace.compress.sensitivity import logits_on
from headrace.compress.sparsity import (
    SparseMatrix,
    input_squares,
    pack_bits,
    prune_matrix,
    pruned_of,
    scores_of,
    share_after,
    unpack_bits,
)
from headrace.compress.spec import SparsitySpec, sparse_spec
from headrace.compress.wanda import wanda_model

TWO_OF_FOUR = SparsitySpec()
HALF_OF_ALL = SparsitySpec(pattern="unstructured")
HALF_OF_ROWS = SparsitySpec(pattern="unstructured", metric="wanda")
WEIGHT = torch.tensor([[4.0, -1.0, 3.0, 2.0], [-0.5, 8.0, -7.0, 0.25]])


def drawn(*shape: int, seed: int = 3) -> Tensor:
    """Return numbers of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_loop(scores: Tensor, spec: SparsitySpec) -> Tensor:
    """Return what is pruned, group by group in plain Python."""
    flat = scores.flatten().tolist()
    columns = scores.size(1)
    size = 4 if spec.pattern == "2:4" else columns if spec.metric == "wanda" else len(flat)
    pruned = [False] * len(flat)
    for first in range(0, len(flat), size):
        order = sorted(range(first, first + size), key=lambda at: flat[at])
        for at in order[: round(spec.share * size)]:
            pruned[at] = True
    return torch.tensor(pruned).view_as(scores)


def test_by_hand() -> None:
    """Prune two of four neighbours, or a share of a row or a matrix; norms weigh columns."""
    assert pruned_of(scores_of(WEIGHT), TWO_OF_FOUR).tolist() == [
        [False, True, False, True],
        [True, False, False, True],
    ]
    thirds = SparsitySpec(pattern="unstructured", share=3 / 8)
    assert pruned_of(scores_of(WEIGHT), thirds).tolist() == [
        [False, True, False, False],
        [True, False, False, True],
    ]
    norms = torch.tensor([0.1, 1.0, 1.0, 10.0])
    assert scores_of(WEIGHT, norms).tolist()[0] == pytest.approx([0.4, 1.0, 3.0, 20.0])
    assert pruned_of(scores_of(WEIGHT, norms), HALF_OF_ROWS).tolist() == [
        [True, True, False, False],
        [True, False, False, True],
    ]
    ties = torch.ones(1, 4)
    assert pruned_of(ties, TWO_OF_FOUR).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("spec", [TWO_OF_FOUR, HALF_OF_ALL, HALF_OF_ROWS], ids=str)
def test_as_a_plain_loop(spec: SparsitySpec) -> None:
    weight, norms = drawn(6, 12), drawn(12, seed=4).abs()
    scores = scores_of(weight, norms if spec.metric == "wanda" else None)
    pruned = pruned_of(scores, spec)
    assert torch.equal(pruned, by_loop(scores, spec))
    assert int(pruned.sum()) == spec.pruned_numbers(6, 12) == 36


def test_what_is_pruned_stays_so_while_the_share_rises() -> None:
    weight = drawn(5, 8)
    first = pruned_of(scores_of(weight), HALF_OF_ALL, 0.2)
    grown = weight.masked_fill(first, 9.0)  # whatever it would be by now
    second = pruned_of(scores_of(grown), HALF_OF_ALL, 0.5, first)
    assert int(first.sum()) == 8 and int(second.sum()) == 20
    assert bool((second | ~first).all())


def test_the_share_rises_by_a_cubic_ramp() -> None:
    """At the middle 7/8 of the share is pruned, and in steps of `every` until the last."""
    shares = [share_after(n, 10, 30, 5, 0.8) for n in (0, 9, 10, 15, 19, 20, 29, 30, 99)]
    quarter, half, most = (0.8 * (1 - (1 - t) ** 3) for t in (0.25, 0.5, 0.75))
    assert shares == pytest.approx([0, 0, 0, quarter, quarter, half, most, 0.8, 0.8])
    assert half == pytest.approx(0.7)
    assert [share_after(n, 3, 0, 5, 0.5) for n in (2, 3)] == [0.0, 0.5]


@pytest.mark.parametrize("columns", [8, 13])
def test_bits_come_back_as_they_were(columns: int) -> None:
    bits = drawn(3, columns) > 0
    packed = pack_bits(bits)
    assert packed.shape == (3, math.ceil(columns / 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, columns), bits)
    assert pack_bits(torch.tensor([[True, False, True]])).item() == 5


def test_a_stored_matrix_is_the_dense_one_with_zeros() -> None:
    """Its bytes are 17/32 of those of fp32: half of the numbers, and a bit for each."""
    weight = drawn(6, 16)
    for spec in (TWO_OF_FOUR, HALF_OF_ALL):
        one = prune_matrix(weight, spec)
        pruned = pruned_of(scores_of(weight), spec)
        assert torch.equal(one.dequantize(), weight.masked_fill(pruned, 0.0))
        assert one.shape == weight.shape
        size = one.values_N.nbytes + one.bits.nbytes
        kind = sparse_spec(spec).matrices
        assert size == kind.stored_bytes(6, 16) == weight.nbytes * 17 // 32
        again = prune_matrix(one.dequantize(), spec, drawn(16, seed=5).abs())
        assert torch.equal(again.dequantize(), one.dequantize()), "it loses nothing more"


def test_torch_takes_the_pattern_for_its_sparse_matrix_units() -> None:
    """Its own conversion to the form of these units gives the matrix back, which no other would."""
    from torch.sparse import _semi_structured_conversions as theirs

    dense = prune_matrix(drawn(32, 64), TWO_OF_FOUR).dequantize().bfloat16()
    made = theirs.sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(theirs.sparse_semi_structured_to_dense_cutlass(*made), dense)
    loose = prune_matrix(drawn(32, 64), HALF_OF_ALL).dequantize().bfloat16()
    kept = theirs.sparse_semi_structured_from_dense_cutlass(loose)
    assert not torch.equal(theirs.sparse_semi_structured_to_dense_cutlass(*kept), loose)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*prototype")
def test_sparse_matrix_units_multiply_it() -> None:
    """Compare torch's product of 2:4 in bf16 with that of the dense matrix with zeros."""
    dense = prune_matrix(drawn(64, 128), TWO_OF_FOUR).dequantize().to("cuda", torch.bfloat16)
    x = drawn(16, 128, seed=4).to("cuda", torch.bfloat16)
    sparse: Any = torch.sparse.to_sparse_semi_structured(dense)
    found, wanted = nn.functional.linear(x, sparse).float(), nn.functional.linear(x, dense).float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


def test_squares_of_what_linears_read_are_summed() -> None:
    linear, x = nn.Linear(3, 2), drawn(2, 5, 3)
    with input_squares({"one": linear}) as squares:
        linear(x)
        linear(x[:1])
    wanted = x.square().sum((0, 1)) + x[0].square().sum(0)
    assert torch.allclose(squares["one"], wanted)
    linear(x)
    assert torch.allclose(squares["one"], wanted), "outside nothing is added"


def test_wanda_prunes_each_block_by_what_the_pruned_ones_give() -> None:
    model, ids_BT = decoder(), text()
    spec = sparse_spec(SparsitySpec(metric="wanda"))
    whole = logits_on(model, ids_BT)
    made = wanda_model(model, spec, ids_BT)
    assert {*made} == {*formats_of(model, spec)} and all("blocks." in name for name in made)
    assert torch.equal(logits_on(model, ids_BT), whole), "the model stays as it is"
    last = [name for name in made if name.startswith("blocks.1.")]
    before = {name: one for name, one in made.items() if name not in last}
    linears: dict[str, Any] = {n: model.get_submodule(n.removesuffix(".weight")) for n in last}
    with faking(model, spec, before), input_squares(linears) as squares:
        logits_on(model, ids_BT)
    for name in last:
        scores = scores_of(model.get_parameter(name), squares[name].sqrt())
        assert torch.equal(made[name].dequantize() == 0, by_loop(scores, TWO_OF_FOUR)), name
    stored = quantize_model(model, spec, made)
    size = sum(4 * p.numel() for n, p in model.named_parameters() if n not in made)
    size += sum(
        one.values_N.nbytes + one.bits.nbytes
        for one in stored.values()
        if isinstance(one, SparseMatrix)
    )
    assert size == stored_bytes(model, spec)
