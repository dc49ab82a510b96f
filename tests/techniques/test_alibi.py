"""ALiBi has no rotation, slopes that a longer row and packed documents keep, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.loader import Micro
from headrace.inference.sample import generate
from headrace.model.mask import MaskSpec, Rows, bias, dense, own_slopes, slopes
from headrace.parallel.world import World
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.alibi import Alibi

ON = "techniques.alibi={}"


def test_slopes_are_all_that_tells_a_place(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(ON)
    assert build.config.position == "none" and build.mask == MaskSpec(alibi=2)
    ids = torch.tensor([[5, 5, 5, 5, 7, 9]])
    with torch.no_grad():
        states = build.model.hidden(ids, Rows(torch.arange(6)[None]))
        bare = make_tiny("model.position=none").model
        bare_states = bare.hidden(ids, Rows(torch.arange(6)[None]))
        swapped = ids[:, [1, 0, 4, 3, 2, 5]]
        moved = build.model.hidden(swapped, Rows(torch.arange(6)[None]))
        bare_moved = bare.hidden(swapped, Rows(torch.arange(6)[None]))
    assert not states[0, -1].allclose(bare_states[0, -1], rtol=1e-4)
    assert not states[0, -1].allclose(moved[0, -1], rtol=1e-4)
    assert not bare_states[0, 4].allclose(bare_moved[0, 4], rtol=1e-4)


def test_a_plan_that_wants_a_rotation_is_refused(tiny_plan: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigError, match=in_order("model.position", "'rope'", "alibi", "'none'")
    ) as told:
        tiny_plan(ON, "model.position=rope")
    assert told.value.remedy.changes == (("-alibi",),)


def test_a_packed_document_is_a_row_of_its_own(make_tiny: Callable[..., Build]) -> None:
    """Bit for bit: nothing of what stands before it, its distances included, is seen."""
    build = make_tiny(ON, "techniques.document_packing={}")
    assert build.mask == MaskSpec(document=True, alibi=2)
    T, begin = 12, 5
    ids = torch.arange(T)[None]
    segments = (torch.arange(T) >= begin).int()[None]
    places = torch.arange(T)[None] - begin * segments
    with torch.no_grad():
        packed = build.model.hidden(ids, Rows(places, segments))
        other = ids.where(segments == 1, ids + 50)
        again = build.model.hidden(other, Rows(places, segments))
        alone = build.model.hidden(ids[:, begin:], Rows(torch.arange(T - begin)[None]))
    assert packed[:, begin:].equal(again[:, begin:])
    assert not packed[:, :begin].equal(again[:, :begin])
    torch.testing.assert_close(packed[:, begin:], alone, rtol=1e-5, atol=1e-6)


def test_sampling_goes_beyond_the_rows_of_training(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(ON)
    found = generate(build.model, torch.arange(12)[None], new_tokens=10, temperature=0)
    for end in range(12, 22):  # rows of 16 in training
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert int(logits[0, -1].argmax()) == int(found[0, end])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_dense_bias_is_foreseen_as_it_is(
    make_tiny: Callable[..., Build], packed: bool, precision: str
) -> None:
    more = ["techniques.document_packing={}"] * packed
    build = make_tiny(ON, f"model.precision={precision}", "batch.micro_sequences=4", *more)
    ids = torch.zeros(4, 16, dtype=torch.int64)
    work = build.place(build, Micro(ids, ids, ids.int(), torch.arange(16).expand(4, -1)))
    made = dense(build.mask, work.rows, 16, build.dtype)
    assert build.predicted(build.plan).memory["mask"].bytes == made.nbytes


def test_evidence_tells_other_slopes_apart(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(ON)
    evidence = Alibi().active(build)
    assert evidence.active and evidence.numbers["steepest"] == pytest.approx(1 / 16, rel=1e-3)
    assert evidence.numbers["flattest"] == pytest.approx(1 / 256, rel=1e-2)
    build.model.mask = MaskSpec()
    assert not Alibi().active(build).active
    rotated = make_tiny()
    rotated.model.mask = MaskSpec(alibi=2)
    assert not Alibi().active(rotated).active


@pytest.mark.parametrize("place", [0, 1])
def test_evidence_tells_the_slopes_of_other_heads_apart(
    make_tiny: Callable[..., Build], place: int
) -> None:
    build = make_tiny(ON, "model.kv_heads=2")
    build.world = World(place, 2, sizes={"tensor": 2})
    whole = build.model.mask
    build.model.mask = whole.of_heads(place, 2)
    evidence = Alibi().active(build)
    assert evidence.active and "1 heads" in evidence.detail
    assert evidence.numbers["steepest"] == pytest.approx((1 / 16, 1 / 256)[place], rel=1e-2)
    build.model.mask = whole.of_heads(1 - place, 2)
    assert not Alibi().active(build).active


def test_ranks_have_the_slopes_of_their_own_heads() -> None:
    heads, length = 12, 5
    whole = MaskSpec(alibi=heads)
    shares = [whole.of_heads(a, 2).of_heads(b, 3) for a in range(2) for b in range(3)]
    assert torch.cat([own_slopes(spec) for spec in shares]).equal(slopes(heads))
    assert torch.cat([bias(spec, length) for spec in shares], 1).equal(bias(whole, length))
    assert MaskSpec(window=3).of_heads(1, 2) == MaskSpec(window=3)


@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_bias_of_a_rank_is_foreseen_for_its_heads(
    make_tiny: Callable[..., Build], tiny_plan: Callable[..., Any], axis: str, packed: bool
) -> None:
    packing = ["techniques.document_packing={}"] * packed
    splits = "tensor_parallel" if axis == "tensor" else "ulysses"
    build = make_tiny(ON, *packing)
    plan = tiny_plan(
        ON, "model.kv_heads=2", f"mesh.{axis}=2", f"techniques.{splits}={{}}", *packing
    )
    whole, own = (build.predicted(one).memory["mask"].bytes for one in (build.plan, plan))
    assert own == whole / 2


def test_refuses_rows_that_go_round_a_ring(tiny_plan: Callable[..., Any]) -> None:
    asked: dict[str, tuple[str, ...]] = {
        "": (),
        "tensor": ("mesh.tensor=2", "techniques.tensor_parallel={}"),
        "heads": ("mesh.context=2", "techniques.ulysses={}"),
        "ring": ("mesh.context=2", "techniques.context_parallel={}"),
    }
    for name, changes in asked.items():
        context = make_context(tiny_plan(ON, *changes), torch.device("cpu"))
        answer = Alibi().supports(context)
        assert isinstance(answer, Unsupported) == (name == "ring"), name
        assert isinstance(answer, Supported) or "no bias" in answer.reason


def test_a_state_has_no_slopes(make_tiny: Callable[..., Build]) -> None:
    with pytest.raises(ConfigError, match=in_order("linear_attention", "alibi", "mask")) as told:
        make_tiny(ON, "techniques.linear_attention={}")
    assert told.value.remedy.changes == (("-linear_attention",),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["", "techniques.flex_attention={}"])
def test_slopes_on_a_gpu(make_tiny: Callable[..., Build], backend: str) -> None:
    build = make_tiny(ON, "device=cuda", "model.head_dim=16", *filter(None, [backend]))
    assert Alibi().active(build).active
