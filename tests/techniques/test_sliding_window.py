"""A sliding window is tested: what a token sees, beside documents, and while sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.inference.sample import generate
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.sliding_window import SlidingWindow

WINDOW = "techniques.sliding_window.window=3"


def test_composes_with_documents(make_tiny: Callable[..., Build]) -> None:
    assert make_tiny(WINDOW).mask == MaskSpec(window=3)
    assert make_tiny(WINDOW).mask.with_document() == MaskSpec(window=3, document=True)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_token_hears_of_as_many_as_its_layers_pass_on(
    make_tiny: Callable[..., Build], layers: int
) -> None:
    """The last token's state moves with the last layers x (window - 1) + 1 tokens, no other."""
    build = make_tiny(WINDOW, f"model.layers={layers}")
    T = 12
    rows = Rows(torch.arange(T)[None])
    ids = torch.arange(T)[None]
    with torch.no_grad():
        before = build.model.hidden(ids, rows)[0, -1]
        moved = []
        for place in range(T):
            other = ids.clone()
            other[0, place] += 100
            moved.append(not build.model.hidden(other, rows)[0, -1].equal(before))
    heard = layers * 2 + 1
    assert moved == [place >= T - heard for place in range(T)]


def test_the_step_equals_a_dense_mask_by_hand(make_tiny: Callable[..., Build]) -> None:
    build, trunk = make_tiny(WINDOW), make_tiny()
    T = 12
    rows, ids = Rows(torch.arange(T)[None]), torch.arange(T)[None]
    place = torch.arange(T)
    by_hand = (place[:, None] >= place) & (place[:, None] - place < 3)
    assert allowed(build.mask, rows, T)[0, 0].equal(by_hand)
    shared = trunk.model.share(rows, T)._replace(mask=by_hand[None, None])
    right = trunk.model.states(ids, shared)
    found = build.model.hidden(ids, rows)
    torch.testing.assert_close(found, right)
    for model, states in ((build.model, found), (trunk.model, right)):
        model.zero_grad()
        states.square().sum().backward()
    for name, parameter in trunk.model.named_parameters():
        if parameter.grad is not None:
            other = build.model.get_parameter(name).grad
            torch.testing.assert_close(other, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "key",
    [WINDOW, "techniques.sparse_attention={block = 2, local = 1, first = 0, random = 1}"],
    ids=["window", "blocks"],
)
def test_an_imported_model_sees_what_a_plan_composes(
    make_tiny: Callable[..., Build], given: Callable[..., str], key: str
) -> None:
    """A mask is a part of the plan: weights of a folder read by it what the definition allows."""
    weights = given("model.layers=2", "model.init_std=0.2")
    build, plain = make_tiny(weights, key), make_tiny(weights)
    T = 12
    rows, ids = Rows(torch.arange(T)[None]), torch.arange(T)[None]
    with torch.no_grad():
        shared = plain.model.share(rows, T)._replace(mask=allowed(build.mask, rows, T))
        right, found = plain.model.states(ids, shared), build.model.hidden(ids, rows)
        torch.testing.assert_close(found, right)
        assert (found - plain.model.hidden(ids, rows)).abs().max() > 1e-3


def test_an_imported_models_own_window_is_not_replaced(
    make_tiny: Callable[..., Build], given: Callable[..., str]
) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.window = 4"):
        make_tiny(given("model.layers=2", "model.window=4"), WINDOW)


@pytest.mark.parametrize(("between", "opened"), [(0, []), (1, [1, 3]), (2, [2]), (3, [3])])
@pytest.mark.parametrize("packed", [False, True])
def test_every_so_many_layers_one_hears_of_all(
    make_tiny: Callable[..., Build], between: int, opened: list[int], packed: bool
) -> None:
    """Look at each layer by itself: what its mixer's last token hears of, in its document."""
    more = ["techniques.document_packing={}"] if packed else []
    build = make_tiny(
        WINDOW, f"techniques.sliding_window.between={between}", "model.layers=4", *more
    )
    T, begin = 12, 4
    segments = (torch.arange(T) >= begin).int()[None] if packed else None
    rows = Rows(torch.arange(T)[None], segments)
    seen: list[torch.Tensor] = []
    for name, block in build.model.blocks.items():
        mixer: Any = block.mixer
        given: list[Any] = []
        hook = mixer.register_forward_pre_hook(lambda module, args, kept=given: kept.extend(args))
        with torch.no_grad():
            build.model.hidden(torch.arange(T)[None], rows)
            hook.remove()
            x_BTD, shared = given
            far = x_BTD.clone()
            far[0, begin + 2] += 1
            moved = bool((mixer(far, shared)[0, -1] != mixer(x_BTD, shared)[0, -1]).any())
            first = x_BTD.clone()
            first[0, begin - 1] += 1
            leaked = bool((mixer(first, shared)[0, -1] != mixer(x_BTD, shared)[0, -1]).any())
        assert moved == (int(name) in opened)
        assert leaked == (moved and not packed)
        seen.append(shared.open_mask)
    assert all(mask is None for mask in seen)
    (technique,) = (t for t in build.techniques if t.name() == "sliding_window")
    evidence = technique.active(build)
    assert evidence.active and evidence.numbers["open_layers"] == len(opened)
    build.model.mask = MaskSpec(window=3, between=0 if between else 1)
    assert not technique.active(build).active


def test_only_layers_that_attend_have_a_window(make_tiny: Callable[..., Build]) -> None:
    """The window is nowhere when convolutions fill its layers."""
    build = make_tiny(WINDOW, "techniques.short_convolution.between=1", "model.layers=4")
    (technique,) = (t for t in build.techniques if t.name() == "sliding_window")
    assert technique.active(build).active
    build.model.mask = MaskSpec(window=3, between=1)
    found = SlidingWindow(window=3, between=1).active(build)
    assert found.active is False and "no layer of attention" in found.detail


def test_a_gradient_through_both_kinds_of_layer(make_tiny: Callable[..., Build]) -> None:
    build, trunk = make_tiny(WINDOW, "techniques.sliding_window.between=1"), make_tiny()
    ids, place = torch.arange(12)[None], torch.arange(12)
    rows = Rows(place[None])
    near = (place[:, None] >= place) & (place[:, None] - place < 3)
    shared = trunk.model.share(rows, 12)
    x_BTD = trunk.model.enter(ids, shared)
    x_BTD = trunk.model.blocks["0"](x_BTD, shared._replace(mask=near[None, None]))
    right = trunk.model.leave(trunk.model.blocks["1"](x_BTD, shared))
    found = build.model.hidden(ids, rows)
    torch.testing.assert_close(found, right)
    weigh = torch.linspace(-1, 1, found.numel()).view_as(found)
    for states in (found, right):
        (states * weigh).sum().backward()
    for name, parameter in trunk.model.named_parameters():
        if parameter.grad is not None:
            other = build.model.get_parameter(name).grad
            torch.testing.assert_close(other, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("between", [0, 1])
def test_sampling_sees_the_window_too(make_tiny: Callable[..., Build], between: int) -> None:
    build = make_tiny(WINDOW, f"techniques.sliding_window.between={between}")
    prompt = torch.arange(5)[None]
    found = generate(build.model, prompt, new_tokens=6, temperature=0)
    for end in range(5, 11):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert int(logits[0, -1].argmax()) == int(found[0, end])


@pytest.mark.parametrize(("between", "share"), [(0, 1.0), (1, 0.5), (3, 0.75)])
def test_windows_are_foreseen_where_they_are(
    tiny_plan: Callable[..., Any], between: int, share: float
) -> None:
    """It counts the layers that have a window, and the blocks of a row that it leaves."""
    plan = tiny_plan(
        f"techniques.sliding_window={{window = 129, between = {between}}}",
        "model.layers=4",
        "data.sequence_length=1024",
        "batch.tokens=1024",
    )
    work = make_ledger(plan, make_context(plan, torch.device("cpu"))).work
    for piece in (work["attention/forward"], work["attention/backward"]):
        assert piece.mask.layers == share
        assert piece.mask.seen == pytest.approx(
            15 / 36
        )  # blocks of 128: the diagonal and one below


def test_a_window_that_limits_nothing_is_refused(tiny_plan: Callable[..., Any]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    assert isinstance(SlidingWindow(window=15).supports(context), Supported)
    answer = SlidingWindow(window=16).supports(context)
    assert isinstance(answer, Unsupported) and "rows of 16" in answer.reason
    assert answer.remedy.text == "techniques.sliding_window.window=4"
    answer = SlidingWindow(window=4, between=1).supports(context)
    assert isinstance(answer, Unsupported) and "no layer of 1" in answer.reason


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize(
    "beside",
    [
        "prefix_lm.tokens=12",
        "sparse_attention={block = 2, local = 1, first = 0, stride = 0, random = 0}",
    ],
)
def test_its_evidence_stands_beside_other_masks(
    make_tiny: Callable[..., Build], beside: str, between: int
) -> None:
    """A prefix is seen from beyond the window, and blocks may hide the first token from all."""
    build = make_tiny(
        WINDOW, f"techniques.sliding_window.between={between}", f"techniques.{beside}"
    )
    evidence = build.plan.techniques["sliding_window"].active(build)
    assert evidence.active, evidence.detail
