"""A token's embedding reads the token before it, as the plainest code of it does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.row_parts import part_of
from headrace.assemble.sockets import MicroBatch
from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import KVCache
from headrace.model.decoder import Decoder
from headrace.model.head import cross_entropy
from headrace.model.hf_config import config_to_hf
from headrace.model.init import random_source
from headrace.model.mask import MaskSpec, Rows
from headrace.model.token_before import PairEmbedding, stride_of

BOTH: dict[str, Any] = {"bigram_multiple": 2, "embedding_smear": True, "embedding_norm": True}
KEYS = {"bigram_multiple": 2, "embedding_smear": True}
B, T, VOCAB = 2, 9, 61
MakeDecoder = Callable[..., Decoder]


def ids(seed: int = 3, length: int = T) -> Tensor:
    return torch.randint(VOCAB, (B, length), generator=torch.Generator().manual_seed(seed))


def places(start: int = 0, end: int = T) -> Rows:
    return Rows(torch.arange(start, end).expand(B, -1))


def learned(make_decoder: MakeDecoder, **keys: Any) -> Decoder:
    """Make a decoder whose table of pairs and shares are not zeros any more."""
    model = make_decoder(**keys)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name in ("pairs.embed.weight", "smear.weight"):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


def plain_entry(model: Decoder, ids_BT: Tensor, begins: set[int]) -> Tensor:
    """What the first block reads, token by token."""
    w, config = dict(model.named_parameters()), model.config
    table, vocab = w["embed.weight"], config.vocab
    rows = []
    for row in ids_BT.tolist():
        summed = []
        for t, token in enumerate(row):
            before = vocab if t in begins else row[t - 1]
            x = table[token]
            if config.bigram_multiple:
                count = config.bigram_multiple * vocab
                place = (before * stride_of(count) + token) % count
                x = x + w["pairs.embed.weight"][place]
            summed.append(x)
        entered = list(summed)
        for t in range(len(row)):
            if config.embedding_smear and t not in begins:
                entered[t] = summed[t] + w["smear.weight"] * summed[t - 1]
        rows.append(torch.stack(entered))
    x = torch.stack(rows)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() if config.embedding_norm else x


@pytest.mark.parametrize("key", ["bigram_multiple", "embedding_smear", "both"])
@pytest.mark.parametrize("documents", [False, True])
def test_what_the_first_block_reads_is_the_plainest_code_of_it(
    make_decoder: MakeDecoder, key: str, documents: bool
) -> None:
    keys = BOTH if key == "both" else {key: KEYS[key]}
    model, ids_BT = learned(make_decoder, mask=MaskSpec(document=documents), **keys), ids()
    rows, begins = places(), {0}
    if documents:
        segments = torch.tensor([[0] * 4 + [1] * 5]).expand(B, -1)
        rows = Rows(torch.tensor([[*range(4), *range(5)]]).expand(B, -1), segments)
        begins = {0, 4}
    found = model.enter(ids_BT, model.share(rows, T))
    wanted = plain_entry(model, ids_BT, begins)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    named = {n: p for n, p in model.named_parameters() if n.split(".")[0] in ENTRY}
    ours = torch.autograd.grad((found * weights).sum(), list(named.values()))
    theirs = torch.autograd.grad((wanted * weights).sum(), list(named.values()))
    for name, left, right in zip(named, ours, theirs, strict=True):
        assert right.abs().max() > 0, name
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("keys", [BOTH, *({key: KEYS[key]} for key in KEYS)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("order", [[[0, 3], [1, 2]], [[0], [1]]])
def test_pieces_of_rows_on_several_ranks_read_what_whole_rows_do(
    make_decoder: MakeDecoder, keys: dict[str, Any], documents: bool, order: list[list[int]]
) -> None:
    """Pieces lie zig-zag, as a ring's, or are halves; documents begin at borders and beside."""
    length, pieces = 12, len(order) * len(order[0])
    model, ids_BT = learned(make_decoder, mask=MaskSpec(document=documents), **keys), ids(7, length)
    rows = places(end=length)
    if documents:
        starts = [[0, 6, 7], [0, 4, 9]]
        index = [[sum(t >= s for s in of) - 1 for t in range(length)] for of in starts]
        positions = [
            [t - of[i] for t, i in enumerate(at)] for of, at in zip(starts, index, strict=True)
        ]
        rows = Rows(torch.tensor(positions), torch.tensor(index))
    work = MicroBatch(ids_BT, ids_BT, rows, ids_BT)
    whole_BTD = model.enter(ids_BT, model.share(rows, length))
    weights = torch.randn(whole_BTD.shape, generator=torch.Generator().manual_seed(1))
    named = {n: p for n, p in model.named_parameters() if n.split(".")[0] in ENTRY}
    wanted = torch.autograd.grad((whole_BTD * weights).sum(), list(named.values()))
    total = torch.zeros(())
    for mine in order:

        def cut(x_BT: Tensor, mine: list[int] = mine) -> Tensor:
            return x_BT.unflatten(1, (pieces, -1))[:, mine].flatten(1, 2)

        part = part_of(work, len(order), len(mine), cut)
        found = model.enter(part.ids_BT, model.share(part.rows, part.ids_BT.size(1)))
        torch.testing.assert_close(found, cut(whole_BTD), rtol=1e-6, atol=1e-6)
        total = total + (found * cut(weights)).sum()
    ours = torch.autograd.grad(total, list(named.values()))
    for name, left, right in zip(named, ours, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=name)


ENTRY = ("embed", "pairs", "smear")
"""Modules that what the first block reads is made by."""


@pytest.mark.parametrize("key", KEYS)
def test_each_changes_nothing_at_first_and_matters_then(
    make_decoder: MakeDecoder, key: str
) -> None:
    plain, one = make_decoder(), make_decoder(**{key: KEYS[key]})
    one.load_state_dict(plain.state_dict(), strict=False)
    source = random_source(one.config, 0)
    for name, parameter in one.named_parameters():
        if name.startswith(("pairs", "smear")):
            parameter.data.copy_(source(name, parameter.shape))
    wanted = plain.logits(ids(), places())
    assert torch.equal(one.logits(ids(), places()), wanted)
    later = learned(make_decoder, **{key: KEYS[key]})
    later.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.allclose(later.logits(ids(), places()), wanted, atol=1e-3)


def test_a_cache_changes_nothing(make_decoder: MakeDecoder) -> None:
    model, ids_BT = learned(make_decoder, **BOTH), ids()
    whole = model.logits(ids_BT, places())
    cache = KVCache(model.config, B, T, like=whole)
    pieces = [model.logits(ids_BT[:, :4], places(end=4), cache)]
    pieces += [model.logits(ids_BT[:, t : t + 1], places(t, t + 1), cache) for t in range(4, T)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


def test_packed_documents_do_not_leak(make_decoder: MakeDecoder) -> None:
    model, ids_BT = learned(make_decoder, **BOTH, mask=MaskSpec(document=True)), ids()
    segments = torch.tensor([[0] * 4 + [1] * 5]).expand(B, -1)
    rows = Rows(torch.tensor([[*range(4), *range(5)]]).expand(B, -1), segments)
    packed, other = model.logits(ids_BT, rows), ids_BT.clone()
    other[:, :4] = (other[:, :4] + 1) % VOCAB
    assert torch.equal(model.logits(other, rows)[:, 4:], packed[:, 4:])
    alone = model.logits(ids_BT[:, 4:], places(end=5))
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-5, atol=1e-5)


def test_what_a_token_reads_is_not_ahead_of_it(make_decoder: MakeDecoder) -> None:
    model, ids_BT = learned(make_decoder, **BOTH), ids()
    other = ids_BT.clone()
    other[:, 5:] = (other[:, 5:] + 1) % VOCAB
    left, right = (model.logits(x, places())[:, :5] for x in (ids_BT, other))
    assert torch.equal(left, right)


@pytest.mark.parametrize("multiple", [1, 5])
def test_pairs_that_differ_in_one_token_have_rows_of_their_own(
    make_decoder: MakeDecoder, multiple: int
) -> None:
    model = make_decoder(bigram_multiple=multiple)
    tokens = torch.arange(VOCAB)
    rows = Rows(torch.arange(2).expand(VOCAB, -1))
    shared = model.share(rows, 2)
    behind = model.pairs.places(torch.stack((tokens.roll(1)[:1].expand(VOCAB), tokens), 1), shared)
    before = model.pairs.places(torch.stack((tokens, tokens[:1].expand(VOCAB)), 1), shared)
    assert len(set(behind[:, 1].tolist())) == len(set(before[:, 1].tolist())) == VOCAB
    assert int(torch.cat((behind, before)).max()) < multiple * model.config.vocab


@pytest.mark.parametrize(("vocab", "multiple"), [(8000, 5), (4096, 3), (50_304, 5), (8000, 1)])
def test_every_row_serves_about_as_many_pairs(vocab: int, multiple: int) -> None:
    """A stride that is small beside the rows would leave some unread, and let neighbours share."""
    pairs = PairEmbedding(multiple * vocab, 1, vocab)
    shared = SimpleNamespace(cache=None, positions_BT=torch.arange(2)[None])
    counts = torch.zeros(pairs.rows)
    befores = range(0, vocab, max(1, vocab // 200))
    for before in befores:
        ids_BT = torch.stack((torch.full((vocab,), before), torch.arange(vocab)), 1)
        counts += pairs.places(ids_BT, shared)[:, 1].bincount(minlength=pairs.rows)
    mean = len(befores) / multiple
    assert counts.sum() == len(befores) * vocab
    assert 0.7 * mean < float(counts.min()) and float(counts.max()) < 1.3 * mean
    apart = (pairs.stride * torch.arange(1, 2 * multiple)) % pairs.rows
    assert int(torch.minimum(apart, pairs.rows - apart).min()) > pairs.rows / (6 * multiple)


def test_loss_and_gradients_through_the_whole_model(make_decoder: MakeDecoder) -> None:
    """Ignored targets, rows of odd length; the model enters as the plainest code says."""
    model, ids_BT, targets = learned(make_decoder, **BOTH), ids(length=7), ids(4, 7)
    targets[0, 2] = targets[1, 6] = -100
    rows = places(end=7)
    found = model(ids_BT, targets, rows, objective=cross_entropy, scale=torch.ones(()))
    shared, x = model.share(rows, 7), plain_entry(model, ids_BT, {0})
    for block in model.blocks.values():
        x = block(x, shared.for_layer(is_open=False))
    logits = F.linear(model.leave(x), model.unembedding)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    named = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad(x, list(named.values())) for x in (found, wanted))
    for name, left, right in zip(named, ours, theirs, strict=True):
        assert float((left - right).norm() / right.norm()) < 1e-5, name


@pytest.mark.parametrize("key", KEYS)
def test_no_architecture_of_transformers_has_it(key: str) -> None:
    config = ModelConfig(vocab=67, dim=24, heads=4, **{key: KEYS[key]})
    with pytest.raises(UnsupportedError, match=f"model.{key} = ") as caught:
        config_to_hf(config, sequence_length=16)
    assert f"model.{key}=" in caught.value.remedy.text
