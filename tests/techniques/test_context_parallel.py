"""Context parallelism in one process: what it cuts, what it refuses, what it predicts.

That a ring of real processes equals whole rows is tests/parallel/test_ring.py's.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import ring_of

from headrace.assemble.context import check_supported, make_context
from headrace.assemble.sockets import MicroBatch
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.costs.count import baseline_ledger
from headrace.costs.ledger import Ledger
from headrace.kernels.block_attention import block_attention
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Stage, Supported, Unsupported
from headrace.techniques.attention import flash_attention_3
from headrace.techniques.attention.cudnn_attention import CudnnAttention, CudnnSdpa
from headrace.techniques.attention.flash_attention import FlashAttention
from headrace.techniques.attention.flash_attention_3 import FlashAttention3
from headrace.techniques.attention.flex_attention import FlexAttention
from headrace.techniques.data.document_packing import DocumentPacking
from headrace.techniques.loss.chunked_cross_entropy import ChunkedCrossEntropy
from headrace.techniques.parallel.context_parallel import ContextParallel, RingAttend

Make = Callable[..., Plan]
TECHNIQUE = ContextParallel()


def context_of(plan: Plan, ranks: int, *others: Any, **sizes: Any) -> Context:
    """Where the plan would run on a mesh of so many context ranks."""
    techniques = {t.name(): t for t in (TECHNIQUE, *others)}
    data = plan.data.model_copy(update=sizes)
    plan = plan.model_copy(
        update={"mesh": MeshConfig(context=ranks), "techniques": techniques, "data": data}
    )
    return make_context(plan, torch.device("cpu"))


def work_of(rows: int, length: int, *, documents: bool) -> MicroBatch:
    """A micro-batch of which every number names its place."""
    index_BT = torch.arange(rows * length).view(rows, length)
    place_BT = torch.arange(length).expand(rows, -1)
    parts = Rows(place_BT % 3, place_BT // 3) if documents else Rows(place_BT[:1])
    return MicroBatch(index_BT + 100, index_BT + 200, parts, index_BT)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "length", "remedy"),
    [
        (1, 16, "mesh.context=2"),
        (2, 17, "data.sequence_length=16"),
        (4, 12, "data.sequence_length=16"),
        (4, 29, "data.sequence_length=32"),
        (8, 3, "data.sequence_length=16"),
    ],
)
def test_refuses_with_what_works(tiny_plan: Make, ranks: int, length: int, remedy: str) -> None:
    answer = TECHNIQUE.supports(context_of(tiny_plan(), ranks, sequence_length=length))
    assert isinstance(answer, Unsupported) and answer.remedy.text == remedy
    key, value = remedy.split("=")
    now = {"ranks": ranks, "length": length}
    now["ranks" if key == "mesh.context" else "length"] = int(value)
    mended = context_of(tiny_plan(), now["ranks"], sequence_length=now["length"])
    assert isinstance(TECHNIQUE.supports(mended), Supported)


def test_refuses_a_mixer_that_is_not_attention(tiny_plan: Make) -> None:
    other = SimpleNamespace(name=lambda: "state_space", claims=("parts.mixer",))
    answer = TECHNIQUE.supports(context_of(tiny_plan(), 2, other))
    assert isinstance(answer, Unsupported) and answer.remedy.text == "--without state_space"


@pytest.mark.parametrize(
    ("other", "words", "says"),
    [
        (CudnnAttention(), (), ""),
        (FlashAttention(), (), ""),
        (FlashAttention3(), (), ""),
        (FlexAttention(), (), "flex_attention computes attention over whole rows"),
        (CudnnAttention(), (DocumentPacking(),), "document_packing needs a mask, and cudnn"),
    ],
)
def test_takes_a_backend_whose_results_over_blocks_merge(
    tiny_plan: Make, other: Any, words: tuple[Any, ...], says: str
) -> None:
    context = context_of(tiny_plan(), 2, other, *words)
    answer = TECHNIQUE.supports(context)
    assert context.has_ring
    if not says:
        assert isinstance(answer, Supported)
        return
    assert isinstance(answer, Unsupported) and says in answer.reason
    assert f"--without {other.name()}" in answer.remedy.text


def test_a_window_needs_a_kernel_with_a_mask(tiny_plan: Make) -> None:
    plan = tiny_plan()
    windowed = plan.model_copy(update={"model": plan.model.model_copy(update={"window": 3})})
    answer = TECHNIQUE.supports(context_of(windowed, 2, CudnnAttention()))
    assert isinstance(answer, Unsupported) and "model.window = 3 needs a mask" in answer.reason
    assert isinstance(TECHNIQUE.supports(context_of(windowed, 2)), Supported)


@pytest.mark.parametrize(
    ("other", "width", "says"),
    [
        (FlashAttention(), 20, "multiples of 8 features up to 256, and these have 20"),
        (FlashAttention(), 192, ""),
        (CudnnAttention(), 192, "multiples of 8 features up to 128, and these have 192"),
        (CudnnAttention(), 128, ""),
    ],
)
def test_blocks_have_heads_that_kernels_take_without_padding(
    tiny_plan: Make, other: Any, width: int, says: str
) -> None:
    plan = tiny_plan()
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"head_dim": width})})
    answer = TECHNIQUE.supports(context_of(plan, 2, other))
    assert isinstance(answer, Unsupported if says else Supported)
    assert not isinstance(answer, Unsupported) or says in answer.reason


def test_refuses_apple_gpus(tiny_plan: Make) -> None:
    apple = replace(context_of(tiny_plan(), 2), device="mps")
    with pytest.raises(UnsupportedError, match="Apple GPUs") as caught:
        check_supported([TECHNIQUE], apple)
    assert caught.value.remedy.text == "device=cpu"


def test_refuses_a_prefix() -> None:
    attend = RingAttend(ring_of(0, 2))
    with pytest.raises(UnsupportedError, match="prefix"):
        attend.prepare(MaskSpec(prefix=True), Rows(torch.arange(4)[None]), 4)


def test_refuses_rows_that_shrank_to_what_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="rows of 14 tokens"):
        RingAttend(ring_of(1, 2)).part(work_of(2, 14, documents=False))


# --- what it fills ---------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_token_is_on_one_rank_with_all_that_is_its_own(ranks: int, documents: bool) -> None:
    work, c = work_of(3, 12, documents=documents), 6 // ranks
    seen = []
    for rank in range(ranks):
        part = RingAttend(ring_of(rank, ranks)).part(work)
        first, last = rank * c, (2 * ranks - 1 - rank) * c
        place_t = torch.tensor([*range(first, first + c), *range(last, last + c)])
        assert torch.equal(part.index_BT, work.index_BT[:, place_t])
        assert torch.equal(part.ids_BT, part.index_BT + 100)
        assert torch.equal(part.targets_BT, part.index_BT + 200)
        assert torch.equal(part.rows.positions_BT, work.rows.positions_BT[:, place_t])
        if documents:
            assert part.rows.segments_BT is not None
            assert torch.equal(part.rows.segments_BT, (part.index_BT % 12) // 3)
        else:
            assert part.rows.segments_BT is None and part.rows.positions_BT.size(0) == 1
        seen += part.index_BT.flatten().tolist()
    assert sorted(seen) == list(range(36))


def apply_to(work: MicroBatch, rank: int, ranks: int, *others: Any, attend: Any = None) -> Any:
    """Return a build of the sockets that it touches, after `apply`."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    build = SimpleNamespace(
        world=SimpleNamespace(group=lambda axis: group if axis == "context" else None),
        parts=SimpleNamespace(attend=attend),
        techniques=[TECHNIQUE, *others],
        place=lambda build, micro: work,
        notes={},
    )
    TECHNIQUE.apply(build)  # type: ignore[arg-type]
    return build


def test_it_acts_before_the_decoder_reads_its_parts() -> None:
    assert TECHNIQUE.stage < Stage.MODEL


def test_evidence_comes_from_tokens_and_traffic_not_from_apply() -> None:
    build = apply_to(work_of(2, 8, documents=False), 1, 2)
    assert not TECHNIQUE.active(build).active
    assert build.place(build, None).ids_BT.shape == (2, 4)
    assert not TECHNIQUE.active(build).active  # cut, and nothing went round
    traffic = build.parts.attend.ring.traffic
    traffic.calls, traffic.bytes_sent = 1, 640
    evidence = TECHNIQUE.active(build)
    assert evidence.active and "held 4 of 8 tokens" in evidence.detail
    assert evidence.numbers["bytes_sent"] == 640
    build.parts.attend.own = 8
    assert not TECHNIQUE.active(build).active


def test_blocks_are_computed_by_what_fills_attention() -> None:
    """The kernel that a ring has run is the evidence, and not what was asked of it."""
    work, backend = work_of(2, 8, documents=False), CudnnSdpa()
    build = apply_to(work, 0, 2, CudnnAttention(), attend=backend)
    ring = build.parts.attend.ring
    assert ring.kernel == "cudnn" and build.parts.attend.asked is backend
    build.model = SimpleNamespace(attend=build.parts.attend)
    evidence = CudnnAttention().active(build)
    assert not evidence.active and "no kernel computed the blocks" in evidence.detail
    for launched, active in (({"cudnn"}, True), ({"cudnn", "flash"}, False)):
        ring.launched = launched
        assert CudnnAttention().active(build).active is active
    ring.launched = {"FA3"}  # which torch's flash operation calls while it stands there
    assert FlashAttention3(version="FA3").active(build).active
    assert not FlashAttention().active(build).active
    assert apply_to(work, 0, 2).parts.attend.ring.kernel is None


def test_a_backend_of_a_ring_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 is loaded before a forward pass, and refuses a mask that it has not."""
    loaded = list[str]()
    monkeypatch.setattr(flash_attention_3, "activate", loaded.append)
    attend = RingAttend(ring_of(0, 2), flash_attention_3.Flash3Sdpa("FA3"))
    rows = Rows(torch.arange(4)[None])
    assert attend.prepare(MaskSpec(), rows, 4) == (True, None, None) and loaded == ["FA3"]
    for spec in (MaskSpec(document=True), MaskSpec(window=6)):  # of whole rows, which are of 8
        with pytest.raises(UnsupportedError, match="has no kernel for a block of a ring"):
            attend.prepare(spec, rows, 4)
    assert attend.prepare(MaskSpec(window=8), rows, 4).window == 8
    q = torch.zeros(1, 2, 4, 8)
    for kernel in ("cudnn", "flash"):
        with pytest.raises(ValueError, match="takes no mask"):
            block_attention(q, q, q, torch.ones(1, 4, 4, dtype=torch.bool), kernel=kernel)


def test_a_mask_carries_documents_only_where_they_are_asked_for() -> None:
    attend = RingAttend(ring_of(0, 2))
    attend.ring.gather = lambda x: torch.stack((x, x + 1))  # type: ignore[method-assign]
    rows = Rows(torch.arange(4)[None], torch.tensor([[0, 0, 1, 1]], dtype=torch.int32))
    assert attend.prepare(MaskSpec(window=3), rows, 4) == (True, 3, None)
    mask = attend.prepare(MaskSpec(document=True), rows, 4)
    assert mask.segments_RBt is not None and mask.segments_RBt.shape == (2, 1, 4)
    assert attend.prepare(MaskSpec(document=True), Rows(rows.positions_BT), 4).segments_RBt is None


# --- prediction ------------------------------------------------------------------------------


def ledger_of(plan: Plan, length: int, ranks: int, **keys: Any) -> Ledger:
    """Return the baseline's ledger on a mesh of so many context ranks."""
    model = plan.model.model_copy(update={"vocab": 300, **keys})
    ledger = baseline_ledger(model, rows=3, length=length, precision="bf16", device="cuda")
    return replace(ledger, sizes={**ledger.sizes, "context_ranks": ranks})


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_what_rows_of_its_own_tokens_would(tiny_plan: Make, ranks: int) -> None:
    """Compare line by line with the baseline's ledger of rows as long as a rank's part."""
    plan = tiny_plan("model.kv_heads=2", "model.qk_norm=true")
    found = TECHNIQUE.predict(ledger_of(plan, 64, ranks))
    right = ledger_of(plan, 64 // ranks, ranks)
    lines = {name: line.bytes for name, line in found.memory.items()}
    ring = lines.pop("ring")
    assert lines == pytest.approx({name: line.bytes for name, line in right.memory.items()})
    row = 3 * 64 / ranks * plan.model.resolved_head_dim
    assert ring == pytest.approx(row * (2 * 2 * 2 * (2 + 4) + 4 * plan.model.heads))
    for name in ("tokens", "residual", "logits_fused", "head_gradients", "mask"):
        assert found.sizes[name] == pytest.approx(right.sizes[name]), name
    assert found.flops == ledger_of(plan, 64, ranks).flops  # per token as before


@pytest.mark.parametrize("chunk", [5, 1000])
def test_predictions_commute_with_a_chunked_head(tiny_plan: Make, chunk: int) -> None:
    ledger, chunked = ledger_of(tiny_plan(), 64, 2), ChunkedCrossEntropy(chunk_tokens=chunk)
    one = chunked.predict(TECHNIQUE.predict(ledger))
    other = TECHNIQUE.predict(chunked.predict(ledger))
    for name in ("logits", "head_gradients"):
        assert one.memory[name].bytes == pytest.approx(other.memory[name].bytes), name
