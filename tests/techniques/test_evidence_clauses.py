"""Evidence that is true for several reasons at once: each of them must be able to deny it.

What a run would have left is given by hand, one of it missing or wrong at a time.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pieces import bare, left

import headrace.techniques.memory.expandable_segments as segments
from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.kernels import fla
from headrace.techniques.attention import (
    flex_attention,
    linear_attention,
    sparse_attention,
    varlen_attention,
    yarn,
)
from headrace.techniques.attention.linear_attention import DeltaMixer, LinearMixer
from headrace.techniques.attention.short_convolution import GatedConvolution, ShortConvolution
from headrace.techniques.design.gqa import Gqa
from headrace.techniques.design.mixture_of_experts import MixtureOfExperts
from headrace.techniques.design.tied_embeddings import TiedEmbeddings
from headrace.techniques.memory.activation_offload import ActivationOffload, Counts
from headrace.techniques.memory.chunked_mlp import ChunkedMLP
from headrace.techniques.memory.expandable_segments import ExpandableSegments
from headrace.techniques.memory.optimizer_offload import OptimizerOffload
from headrace.techniques.optim.sophia import Sophia
from headrace.train.train import step


@pytest.mark.parametrize(
    ("updates", "curved", "labels", "active"),
    [
        (1, 4.0, None, True),
        (1, 4.0, 7, True),
        (0, 4.0, None, False),  # a resume has the states of another run's steps
        (1, 0.0, None, False),
        (1, 0.0, 7, False),
        (1, 0.0, 0, True),  # no sweep had a target
    ],
)
def test_sophia_asks_for_updates_and_for_a_curvature(
    updates: int, curved: float, labels: int | None, active: bool
) -> None:
    state = {"exp_avg": torch.ones(3), "hessian": torch.tensor([curved, curved, 0.0])}
    drawn = None if labels is None else torch.tensor(float(labels))
    optimizer = left(state={"w": state}, updates=updates, labels=drawn)
    evidence = Sophia(rho=0.5).active(left(optimizers={"sophia": optimizer}))
    assert evidence.active is active
    if curved:
        fractions = (evidence.numbers["curved_fraction"], evidence.numbers["clipped_fraction"])
        assert fractions == pytest.approx((2 / 3, 1 / 3))


@pytest.mark.parametrize(
    ("where", "moved", "device", "active"),
    [
        (["cpu"], 8, "cuda", True),
        (["cpu"], 0, "cuda", False),
        ([], 8, "cuda", False),
        (["cpu", "meta"], 8, "cuda", False),
        (["cpu"], 8, "cpu", False),
    ],
)
def test_offloaded_states_are_all_on_a_host_that_is_not_the_device(
    where: list[str], moved: int, device: str, active: bool
) -> None:
    state = {str(place): torch.empty(2, device=place) for place in where}
    optimizer = left(state={"w": state}, moved_bytes=moved)
    run = left(optimizers={"optimizer_offload": optimizer}, device=torch.device(device))
    assert OptimizerOffload().active(run).active is active


@pytest.mark.parametrize(
    ("sent", "fetched", "stayed", "active"),
    [(9, 9, 0, True), (9, 5, 4, True), (9, 5, 0, False), (0, 0, 0, False), (9, 0, 9, False)],
)
def test_offloaded_activations_went_and_came_back(
    sent: int, fetched: int, stayed: int, active: bool
) -> None:
    counts = Counts(sent_bytes=sent, fetched_bytes=fetched, never_left_bytes=stayed)
    run = left(notes={"activation_offload": left(counts=counts)})
    assert ActivationOffload().active(run).active is active


@pytest.mark.parametrize(
    ("most", "cut", "active"), [(64, 1, True), (65, 1, False), (0, 1, False), (64, 0, False)]
)
def test_pieces_are_no_longer_than_they_were_asked_to_be(most: int, cut: int, active: bool) -> None:
    pieces = left(most=most, cut=cut, runs=4, forwards=2, traced=0, tokens=128)
    run = left(model=left(blocks={"0": None}), notes={"chunked_mlp": pieces}, compiled=[])
    assert ChunkedMLP(chunk_tokens=64).active(run).active is active


def test_an_expandable_segment_of_others_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before proves nothing of new memory; nor does a segment that ends there."""
    probe = torch.empty(4, dtype=torch.uint8)

    def segment(total_size: int) -> dict[str, Any]:
        return {"is_expandable": True, "address": 0, "total_size": total_size, "blocks": []}

    assert segments._bytes_inside([segment(probe.data_ptr())], [probe]) == 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for total_size, grows in ((1, False), (1 << 63, True)):
        seen = segment(total_size)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda seen=seen: [seen])
        assert segments._new_memory_grows(torch.device("cpu")) is grows
    run = left(
        device=torch.device("cuda"),
        notes={"expandable_segments": {"grows": False}},
        optimizers={},
        model=torch.nn.Linear(1, 1),
    )
    assert ExpandableSegments().active(run).active is False
    run.notes["expandable_segments"]["grows"] = True
    assert ExpandableSegments().active(run).active is True


def test_experts_that_lose_a_token_or_choose_fewer_are_missed(
    make_tiny: Callable[..., Build], batch: Callable[[Build], Any]
) -> None:
    build = make_tiny("techniques.mixture_of_experts.experts=4")
    technique = build.plan.techniques["mixture_of_experts"]
    assert technique.active(build).active is False, "no step, and blocks that could have routed"
    step(build, batch(build), 0)
    assert technique.active(build).active is True
    layers: list[Any] = [block.mlp for block in build.model.blocks.values()]
    layers[1].routed_E[0] += 2
    assert technique.active(build).active is False
    layers[1].routed_E[0] -= 2
    layers[1].top_k = 1
    assert technique.active(build).active is False
    build.model.blocks.clear()
    assert MixtureOfExperts().active(build).active is None


def test_a_tied_head_multiplies_with_the_embeddings_own_memory() -> None:
    embed = left(weight=torch.ones(2))
    model = left(head=left(weight=None), embed=embed, unembedding=embed.weight)
    assert TiedEmbeddings().active(left(model=model)).active is True
    model.unembedding = embed.weight.clone()
    assert TiedEmbeddings().active(left(model=model)).active is False


@pytest.mark.parametrize(
    ("rows", "ranks", "active"),
    [((64, 64), 1, True), ((64, 96), 1, False), ((32, 32), 2, True), ((48, 48), 2, False)],
)
def test_every_block_has_the_groups_of_keys_of_all_ranks(
    rows: tuple[int, ...], ranks: int, active: bool
) -> None:
    """4 heads of 8 features: 64 rows are two groups of keys and of values beside the queries."""
    blocks = {
        str(i): left(mixer=left(qkv=left(weight=torch.empty(n, 1)))) for i, n in enumerate(rows)
    }
    run = left(
        config=left(heads=4, resolved_head_dim=8),
        model=left(blocks=blocks),
        world=left(size=lambda axis: ranks),
    )
    assert Gqa().active(run).active is active


SUM, DELTA = {fla.SUM: 2}, {fla.GATED_DELTA: 2}


@pytest.mark.parametrize(
    ("rule", "kernels", "kinds", "more", "launched", "active"),
    [
        ("sum", "torch", (LinearMixer, LinearMixer), 0, {}, True),
        ("sum", "torch", (LinearMixer, LinearMixer), 1, {}, False),
        ("sum", "torch", (LinearMixer, DeltaMixer), 0, {}, False),
        ("sum", "torch", (LinearMixer, LinearMixer), 0, SUM, False),
        ("sum", "fla", (LinearMixer, LinearMixer), 0, SUM, True),
        ("sum", "fla", (LinearMixer, LinearMixer), 0, {}, False),
        ("sum", "fla", (LinearMixer, LinearMixer), 0, DELTA, False),
        ("sum", "fla", (LinearMixer, LinearMixer), 0, SUM | DELTA, False),
        ("gated_delta", "torch", (DeltaMixer, DeltaMixer), 0, {}, True),
        ("gated_delta", "torch", (DeltaMixer, LinearMixer), 0, {}, False),
        ("gated_delta", "fla", (DeltaMixer, DeltaMixer), 0, DELTA, True),
        ("gated_delta", "fla", (DeltaMixer, DeltaMixer), 0, SUM, False),
    ],
)
def test_linear_attention_is_of_its_rule_its_kernels_and_its_chunks(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    kernels: str,
    kinds: tuple[type[Any], ...],
    more: int,
    launched: dict[str, int],
    active: bool,
) -> None:
    monkeypatch.setattr(linear_attention, "since", lambda before, prefix: launched)
    technique: Any = linear_attention.LinearAttention.model_validate(
        {"rule": rule, "kernels": kernels}
    )
    longest = technique._tokens() + more
    blocks = {str(i): left(mixer=bare(k, longest_chunk=longest)) for i, k in enumerate(kinds)}
    run = left(model=left(blocks=blocks), notes={"linear_attention": {}})
    assert technique.active(run).active is active


def test_linear_attention_beside_another_mixer_is_not_unknown() -> None:
    blocks = {"0": left(mixer=bare(LinearMixer, longest_chunk=0))}
    run = left(model=left(blocks=blocks), notes={"linear_attention": {}})
    assert linear_attention.LinearAttention().active(run).active is None
    blocks["1"] = left(mixer=torch.nn.Identity())
    assert linear_attention.LinearAttention().active(run).active is False


@pytest.mark.parametrize(
    ("mixed", "taps", "active"),
    [((8, 8), (3, 3), True), ((8, 0), (3, 3), False), ((8, 8), (3, 4), False)],
)
def test_all_convolutions_mixed_tokens_by_their_taps(
    mixed: tuple[int, ...], taps: tuple[int, ...], active: bool
) -> None:
    built = zip(mixed, taps, strict=True)
    blocks = {
        str(i): left(mixer=bare(GatedConvolution, mixed=n, conv=left(taps=k)))
        for i, (n, k) in enumerate(built)
    }
    run = left(model=left(blocks=blocks), notes={"short_convolution": {}})
    assert ShortConvolution().active(run).active is active


def test_a_backend_that_visits_no_block_is_no_evidence(
    make_tiny: Callable[..., Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = make_tiny("techniques.sparse_attention.block=2", "techniques.sparse_attention.local=1")
    technique = build.plan.techniques["sparse_attention"]
    assert technique.active(build).active
    whole = sparse_attention.weights
    monkeypatch.setattr(sparse_attention, "weights", lambda *given: 0 * whole(*given))
    assert not technique.active(build).active

    def but_the_first(*given: Any) -> torch.Tensor:
        """Put no weight of the last block of queries on the first block, which all see."""
        weight = whole(*given)
        weight[:, -2:, :, 0] = 0
        return weight

    monkeypatch.setattr(sparse_attention, "weights", but_the_first)
    evidence = technique.active(build)
    assert evidence.active is False and evidence.numbers["left_out"] == 1


@pytest.mark.parametrize(
    ("slower", "active"), [((1.0, 2.0), True), ((1.0, 1.0), False), ((0.5, 2.0), False)]
)
def test_yarn_slows_some_pairs_and_hastens_none(
    monkeypatch: pytest.MonkeyPatch, slower: tuple[float, ...], active: bool
) -> None:
    monkeypatch.setattr(yarn, "_slowing", lambda position, length: torch.tensor(slower))
    monkeypatch.setattr(yarn, "_size", lambda position: 1.0)
    plan = left(data=left(sequence_length=4))
    assert yarn.Yarn().active(left(model=left(position=None), plan=plan)).active is active


HEADS = ModelConfig(dim=32, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("names", "active"),
    [
        ([varlen_attention.OPERATION, f"void {varlen_attention.KERNEL}<1>"], True),
        ([varlen_attention.OPERATION], False),
        ([f"void {varlen_attention.KERNEL}<1>"], False),  # by another operation
    ],
)
def test_documents_are_attended_by_the_operation_and_its_kernel(
    monkeypatch: pytest.MonkeyPatch, names: list[str], active: bool
) -> None:
    monkeypatch.setattr(varlen_attention, "kernels_of", lambda *given: names)
    backend = left(forwards=1, starts_S1=None, prepare=lambda *given: None)
    run = left(
        model=left(attend=backend),
        config=HEADS,
        device=torch.device("cpu"),
        context=left(precision="bf16"),
    )
    assert varlen_attention.VarlenAttention().active(run).active is active


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("triton_tem_fused_flex_attention_0", True),
        ("triton_poi_fused_add_0", False),
        ("aten::flex_attention", False),  # by its parts, without a kernel of its own
    ],
)
def test_flex_attention_launches_the_kernel_that_was_made_for_it(
    monkeypatch: pytest.MonkeyPatch, name: str, active: bool
) -> None:
    monkeypatch.setattr(flex_attention, "kernels_of", lambda *given: [name])
    blocks = left(shape=(1, 1, 16, 16), sparsity=lambda: 40.0)
    run = left(model=left(attend=left(blocks=blocks)), config=HEADS, device=torch.device("cpu"))
    assert flex_attention.FlexAttention().active(run).active is active
