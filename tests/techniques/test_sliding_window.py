"""A sliding window: what a token sees, beside documents, and while sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.context import make_context
from headrace.core.technique import Supported, Unsupported
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.sample import generate
from headrace.sockets import Build
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


def test_sampling_sees_the_window_too(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(WINDOW)
    prompt = torch.arange(5)[None]
    found = generate(build.model, prompt, new_tokens=6, temperature=0)
    for end in range(5, 11):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert int(logits[0, -1].argmax()) == int(found[0, end])


def test_a_window_that_limits_nothing_is_refused(tiny_plan: Callable[..., Any]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    assert isinstance(SlidingWindow(window=15).supports(context), Supported)
    answer = SlidingWindow(window=16).supports(context)
    assert isinstance(answer, Unsupported) and "rows of 16" in answer.reason
    assert answer.remedy == "techniques.sliding_window.window=4"
