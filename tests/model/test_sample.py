"""Sampling: the cache changes nothing, seeds decide, limits hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import tells
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.inference.sample import draw, generate
from headrace.model.decoder import Decoder
from headrace.model.mask import MaskSpec, Rows

PROMPTS = torch.tensor([[3, 14, 15, 9, 2], [60, 0, 7, 7, 31]])
MakeDecoder = Callable[..., Decoder]


def by_hand(model: Decoder, ids: Tensor, new_tokens: int) -> Tensor:
    """Sample greedily, with every row computed whole for every token."""
    for _ in range(new_tokens):
        rows = Rows(torch.arange(ids.size(1)).expand(len(ids), -1))
        ids = torch.cat((ids, model.logits(ids, rows)[:, -1:].argmax(-1)), dim=1)
    return ids


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
@pytest.mark.parametrize("mask", [MaskSpec(), MaskSpec(document=True), MaskSpec(window=3)], ids=str)
def test_greedy_with_a_cache_is_greedy_without(
    make_decoder: MakeDecoder, position: str, mask: MaskSpec
) -> None:
    model = make_decoder(position=position, mask=mask, qk_norm=True)
    found = generate(model, PROMPTS, new_tokens=9, temperature=0)
    assert torch.equal(found, by_hand(model, PROMPTS, 9))
    one = generate(model, PROMPTS[1:], new_tokens=9, temperature=0)
    assert torch.equal(one, found[1:])


def test_the_seed_decides(make_decoder: MakeDecoder) -> None:
    model = make_decoder()
    first, again, other = (generate(model, PROMPTS, new_tokens=9, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_autocast_keeps_its_own_cache(make_decoder: MakeDecoder) -> None:
    model = make_decoder(qk_norm=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = generate(model, PROMPTS, new_tokens=4, temperature=0)
    assert found.shape == (2, 9)


def test_stop_ends_a_row_and_then_the_text(make_decoder: MakeDecoder) -> None:
    model = make_decoder()
    free = generate(model, PROMPTS, new_tokens=9, temperature=0)[:, 5:].tolist()
    stop = free[0][2]
    ends = [row.index(stop) if stop in row else 9 for row in free]
    found = generate(model, PROMPTS, new_tokens=9, temperature=0, stop=stop)[:, 5:].tolist()
    length = min(9, max(ends) + 1)
    for row, end, got in zip(free, ends, found, strict=True):
        assert got == (row[: end + 1] + [stop] * 9)[:length]
    alone = generate(model, PROMPTS[:1], new_tokens=9, temperature=0, stop=stop)
    assert alone.size(1) == 5 + ends[0] + 1


def test_padding_of_the_embedding_is_never_drawn(make_decoder: MakeDecoder) -> None:
    model = make_decoder()
    found = generate(model, PROMPTS, new_tokens=12, temperature=5.0, entries=10)[:, 5:]
    assert found.max() < 10
    assert generate(model, PROMPTS, new_tokens=12, temperature=5.0)[:, 5:].max() >= 10


def frequencies(**arguments: Any) -> Tensor:
    """How often each of six ids comes, with probabilities .4 .3 .1 .1 .06 .04."""
    logits = torch.tensor([0.1, 0.4, 0.06, 0.3, 0.04, 0.1]).log().expand(20_000, -1)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **arguments}
    ids = draw(logits, **values, generator=torch.Generator().manual_seed(0))
    return torch.bincount(ids, minlength=6) / len(ids)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [0.1, 0.4, 0.06, 0.3, 0.04, 0.1]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.06, 0.3, 0.04, 0.1]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [1 / 8, 4 / 8, 0, 3 / 8, 0, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.037, 0.588, 0.013, 0.331, 0.006, 0.037]),
        ({"temperature": 0}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 1e-38, "top_k": 3, "top_p": 0.9}, [0, 1, 0, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(arguments: dict[str, Any], expected: list[float]) -> None:
    found, wanted = frequencies(**arguments), torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.012)
    assert torch.equal(found > 0, wanted > 0)


@pytest.mark.parametrize(
    "wrong",
    [{"new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_arguments_out_of_range(make_decoder: MakeDecoder, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} cannot be"):
        generate(make_decoder(), PROMPTS, **{"new_tokens": 1, **wrong})


def test_an_empty_prompt(make_decoder: MakeDecoder) -> None:
    with pytest.raises(ConfigError, match="document token"):
        generate(make_decoder(), PROMPTS[:, :0], new_tokens=1)


def test_learned_positions_end(make_decoder: MakeDecoder) -> None:
    model = make_decoder(position="learned")  # of 19 positions
    assert generate(model, PROMPTS, new_tokens=14, temperature=0).size(1) == 19
    with pytest.raises(ConfigError, match="learned 19") as caught:
        generate(model, PROMPTS, new_tokens=15)
    assert caught.value.remedy.text == "--tokens 14"
    with pytest.raises(ConfigError) as caught:
        generate(model, torch.zeros(1, 25, dtype=torch.long), new_tokens=1)
    assert tells(caught.value.remedy.text, "--prompt TEXT", "--tokens 1", "17 tokens")
    assert generate(make_decoder(), PROMPTS, new_tokens=20).size(1) == 25
