"""A prefix is seen both ways: by its words, beside documents, in validation and sampling."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from tiny import metrics
from torch import Tensor

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.row_parts import part_of
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError
from headrace.data.loader import Micro, validation_batches
from headrace.inference.sample import generate
from headrace.model.attention import Sdpa
from headrace.model.head import IGNORED
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.flex_attention import FlexBackend, mask_mod
from headrace.techniques.attention.prefix_lm import PrefixLm, prefixes, with_prefix
from headrace.train.evaluate import evaluate

ON, PACKED = "techniques.prefix_lm.tokens=5", "techniques.document_packing={}"
B, H, G, K = 3, 4, 2, 8
STARTS = [[0], [0, 4, 5], [0, 1, 9]]
"""Where the documents of each row begin."""


def rows_of(length: int, device: str = "cpu") -> Rows:
    """Make documents whose places restart, and prefixes of none, few and many tokens."""
    starts = [[s for s in begins if s < length] for begins in STARTS]
    segments = [[sum(s <= t for s in begins) - 1 for t in range(length)] for begins in starts]
    places = [[t - max(s for s in begins if s <= t) for t in range(length)] for begins in starts]
    given = (torch.tensor(x, device=device) for x in (places, segments, [0, 3, 7]))
    return Rows(*given)


def sees(rows: Rows, row: int, query: int, key: int, spec: MaskSpec) -> bool:
    """Say it in words: back, or inside of the prefix; and the same document."""
    assert rows.segments_BT is not None and rows.prefix_B is not None
    document, place = rows.segments_BT[row], rows.positions_BT[row]
    if spec.document and document[query] != document[key]:
        return False
    near = spec.window is None or abs(query - key) < spec.window
    return (key <= query and near) or bool(place[key] < rows.prefix_B[row])


def qkv(length: int, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, length, n, K).to(device).requires_grad_() for n in (H, G, G)]


def by_hand(length: int, spec: MaskSpec) -> tuple[Rows, list[Tensor]]:
    """Compute attention by its formula, the keys of each query picked one by one; and gradients."""
    rows, (q, k, v) = rows_of(length), qkv(length)
    if not spec.document:  # places go on then
        rows = rows._replace(positions_BT=torch.arange(length).expand(B, -1))
    out = torch.zeros(B, length, H, K)
    for b, t, h in product(range(B), range(length), range(H)):
        keys = [s for s in range(length) if sees(rows, b, t, s, spec)]
        score = k[b, keys, h // (H // G)] @ q[b, t, h] / K**0.5
        out = out.index_put(
            tuple(map(torch.tensor, (b, t, h))), score.softmax(0) @ v[b, keys, h // (H // G)]
        )
    return rows, [out, *torch.autograd.grad((out * weigh(out)).sum(), (q, k, v))]


def weigh(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, K, device=like.device).to(like)


@pytest.mark.parametrize("length", [1, 11])
@pytest.mark.parametrize("spec", [MaskSpec(prefix=True), MaskSpec(True, True, 3, True)], ids=str)
def test_attention_is_the_words(spec: MaskSpec, length: int) -> None:
    rows, right = by_hand(length, spec)
    given = qkv(length)
    out = Sdpa()(*given, Sdpa().prepare(spec, rows, length))
    found = [out, *torch.autograd.grad((out * weigh(out)).sum(), given)]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    may_see = mask_mod(spec, rows, length)
    for b, q, k in product(range(B), range(length), range(length)):
        place = (torch.tensor(x) for x in (b, 0, q, k))
        assert bool(may_see(*place)) == sees(rows, b, q, k, spec)


def test_draws_are_of_the_rows_place_alone() -> None:
    row = torch.arange(4000)
    drawn = prefixes(row, 7, 3)
    assert drawn[17:40].equal(prefixes(row[17:40], 7, 3)) and not drawn.equal(prefixes(row, 7, 4))
    counts = drawn.bincount(minlength=8)
    assert len(counts) == 8 and counts.min() > 420 and counts.max() < 580
    assert drawn[:8].tolist() == prefixes(row[:8], 7, 3).tolist()


def test_targets_that_a_prefix_shows_are_ignored(make_tiny: Callable[..., Build]) -> None:
    """Every micro-batch has it, however rows are dealt out; in short rows something is left."""
    build = make_tiny(ON, "batch.micro_sequences=2")
    assert build.mask == MaskSpec(prefix=True)
    seen = [build.place(build, micro) for micro in build.loader.step(0).micros]
    prefix = torch.cat([work.rows.prefix_B for work in seen])  # type: ignore[misc]
    assert prefix.equal(prefixes(torch.arange(8), 5, build.plan.seed)) and len(set(prefix)) > 1
    targets = torch.cat([work.targets_BT for work in seen])
    for row, tokens in zip(targets, prefix.tolist(), strict=True):
        shown = max(0, tokens - 1)
        assert (row[:shown] == IGNORED).all() and (row[shown:] != IGNORED).all()
    ids = torch.zeros(9, 3, dtype=torch.int64)
    rows = Rows(torch.arange(3)[None])
    short = with_prefix(MicroBatch(ids, ids, rows, torch.arange(27).view(9, 3)), 5, 0)
    assert (short.targets_BT[:, -2:] != IGNORED).all()


def states_of(build: Build, micro: Micro, prefix: int) -> Tensor:
    work = build.place(build, micro)
    rows = work.rows._replace(prefix_B=torch.full_like(work.ids_BT[:, 0], prefix))
    return build.model.hidden(work.ids_BT, rows)


def test_no_document_and_nothing_before_feels_a_change(make_tiny: Callable[..., Build]) -> None:
    """Bit for bit: a changed token moves its own prefix and what follows in its document."""
    build, T, starts, prefix = make_tiny(ON, PACKED), 13, (0, 5, 6), 4
    place = torch.arange(T)
    segments = torch.stack([place >= s for s in starts[1:]]).sum(0)[None]
    positions = place[None] - torch.tensor(starts)[segments]
    ids = place[None] + 7
    with torch.no_grad():
        before = states_of(build, Micro(ids, ids, segments, positions), prefix)
        for changed in range(T):
            other = torch.where(place == changed, ids + 50, ids)
            after = states_of(build, Micro(other, other, segments, positions), prefix)
            own = segments[0] == segments[0, changed]
            in_prefix = bool(positions[0, changed] < prefix)
            hears = own & ((place >= changed) | (in_prefix & (positions[0] < prefix)))
            assert (before != after).any(-1)[0].tolist() == hears.tolist(), changed
        alone = states_of(build, Micro(ids[:, 6:], ids[:, 6:]), prefix)
    assert (before[:, 6:] - alone).norm() <= 1e-6 * alone.norm()


def test_validation_counts_what_is_left(make_tiny: Callable[..., Build]) -> None:
    builds = [make_tiny(ON, f"batch.micro_sequences={n}") for n in (1, 8)]
    one, other = (evaluate(build, 512) for build in builds)
    assert (one.tokens, one.bytes) == (other.tokens, other.bytes)
    assert one.loss_nats == pytest.approx(other.loss_nats, rel=1e-6)
    tokens = nats = 0.0
    for micro in validation_batches(builds[0].prepared.validation, 16, tokens=512, micro_rows=1):
        work = builds[0].place(builds[0], micro)
        counted = work.targets_BT[0] != IGNORED
        with torch.no_grad():
            logits = builds[0].model.logits(work.ids_BT, work.rows)[0, counted]
        nats += float(
            torch.nn.functional.cross_entropy(logits, work.targets_BT[0, counted], reduction="sum")
        )
        tokens += int(counted.sum())
    assert one.tokens == tokens < evaluate(make_tiny(), 512).tokens
    assert one.loss_nats == pytest.approx(nats / tokens, rel=1e-5)


@pytest.mark.parametrize("target", [IGNORED, None], ids=["no target", "no text"])
def test_a_validation_without_targets_says_so(
    make_tiny: Callable[..., Build], target: int | None
) -> None:
    build = make_tiny(ON, "eval.tokens=32")
    value, whole = target or build.prepared.tokenizer.document_token, build.place

    def emptied(build: Build, micro: Micro) -> MicroBatch:
        work = whole(build, micro)
        return work._replace(targets_BT=torch.full_like(work.targets_BT, value))

    build.place = emptied
    with pytest.raises(ConfigError, match="0 bytes of text") as caught:
        evaluate(build, 32)
    assert "prefix_lm.tokens" in caught.value.remedy.text
    assert "eval.tokens" in caught.value.remedy.text


@pytest.mark.parametrize("windowed", [False, True])
def test_sampling_takes_the_prompt_as_the_prefix(
    make_tiny: Callable[..., Build], windowed: bool
) -> None:
    """Over a cache, and where rows are computed whole."""
    build = make_tiny(ON, *(["techniques.sliding_window.window=3"] * windowed))
    prompt = torch.tensor([[3, 14, 15, 9, 2], [60, 0, 7, 7, 31]])
    found = generate(build.model, prompt, new_tokens=5, temperature=0)
    for end in range(5, 10):
        rows = Rows(torch.arange(end).expand(2, -1), None, torch.tensor([5, 5]))
        assert build.model.logits(found[:, :end], rows)[:, -1].argmax(-1).equal(found[:, end])


def test_evidence_and_refusals(
    make_tiny: Callable[..., Build], tiny_plan: Callable[..., Any]
) -> None:
    build = make_tiny(ON)
    on = PrefixLm(tokens=5)
    assert on.active(build).active and on.active(build).numbers["prefix_tokens"] == 5
    build.model.mask = MaskSpec()
    assert not on.active(build).active
    trunk = make_tiny()
    assert not on.active(trunk).active
    trunk.model.mask = replace(trunk.model.mask, prefix=True)
    trunk.annotate = build.annotate
    assert on.active(trunk).active
    trunk.place = lambda trunk, micro: build.place(build, micro)._replace(
        targets_BT=micro.targets_BT
    )
    assert not on.active(trunk).active  # what a prefix shows is asked for
    context = make_context(tiny_plan(), torch.device("cpu"))
    assert isinstance(PrefixLm(tokens=15).supports(context), Supported)
    answer = PrefixLm(tokens=16).supports(context)
    assert isinstance(answer, Unsupported) and answer.remedy.text == "techniques.prefix_lm.tokens=8"
    split = tiny_plan(ON, "mesh.context=2", "techniques.context_parallel={}")
    answer = on.supports(make_context(split, torch.device("cpu")))
    assert isinstance(answer, Unsupported) and "both ways" in answer.reason
    split = tiny_plan(ON, "mesh.context=2", "techniques.ulysses={}")
    assert isinstance(on.supports(make_context(split, torch.device("cpu"))), Supported)
    with pytest.raises(ConfigError, match=in_order("linear_attention", "prefix", "mask")):
        make_tiny(ON, "techniques.linear_attention={}")


def test_noise_and_a_ranks_part_of_rows_stand_beside_it(make_tiny: Callable[..., Build]) -> None:
    """What whole rows draw is drawn before it is cut, in whatever order techniques are applied."""
    alone, both = make_tiny(ON), make_tiny(ON, "techniques.neftune={}")
    micro = alone.loader.step(0).micros[0]
    one, two = alone.place(alone, micro), both.place(both, micro)
    assert one.rows.prefix_B is not None and two.rows.prefix_B is not None
    assert one.targets_BT.equal(two.targets_BT) and one.rows.prefix_B.equal(two.rows.prefix_B)
    assert one.rows.noise_BT is None and two.rows.noise_BT is not None
    parts = [part_of(two, 2, 1, lambda x_BT, n=n: x_BT.chunk(2, 1)[n]) for n in range(2)]
    for name in ("ids_BT", "targets_BT", "index_BT"):
        assert torch.cat([getattr(part, name) for part in parts], 1).equal(getattr(two, name))
    noise = [part.rows.noise_BT for part in parts if part.rows.noise_BT is not None]
    assert torch.cat(noise, 1).equal(two.rows.noise_BT)
    assert all(part.rows.prefix_B is two.rows.prefix_B for part in parts)


def test_ranks_that_share_rows_train_what_one_does(zygote: Any, plan_file: Path) -> None:
    """Compare losses of training, and of a validation, whose targets prefixes leave out too."""
    words = ("guard=false", "goal.steps=3", "model.kv_heads=2", "eval.every_steps=2", ON, PACKED)
    words = ("--with", "neftune", *words)
    ended = [zygote.run(plan_file.parent, "train", "tiny.toml", *words, "name=one")]
    two = ("mesh.context=2", "--with", "ulysses", "name=two")
    ended += zygote.ranks(2, plan_file.parent, "train", "tiny.toml", *words, *two)
    assert not any(e.code for e in ended), ended[-1].err
    rows = [metrics(plan_file.parent / "runs" / name) for name in ("one", "two")]
    assert any("val_loss_nats" in row for row in rows[0])
    for one, other in zip(*rows, strict=True):
        same = ("loss", "tokens", *(name for name in one if name.startswith("val_")))
        assert {n: other[n] for n in same} == pytest.approx({n: one[n] for n in same}, rel=1e-4)


def test_the_scores_that_prefixes_add_are_foreseen(tiny_plan: Callable[..., Any]) -> None:
    """Take the mean over their lengths, counted in the mask."""
    length, most = 64, 48
    spec, places = MaskSpec(prefix=True), torch.arange(length)[None]
    seen = [
        allowed(spec, Rows(places, None, torch.tensor([n])), length).sum().item()
        for n in range(most + 1)
    ]
    causal = allowed(MaskSpec(), Rows(places), length).sum().item()
    plan = tiny_plan(f"techniques.prefix_lm.tokens={most}", f"data.sequence_length={length}")
    work = make_ledger(plan, make_context(plan, torch.device("cpu"))).work
    wanted = sum(seen) / len(seen) / causal
    for phase in ("forward", "backward"):
        assert work[f"attention/{phase}"].mask.seen == pytest.approx(wanted, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_document_feels_another_on_a_gpu(changed: int) -> None:
    """Outputs and gradients are equal bit for bit, in the generated kernel."""
    torch.compiler.reset()  # what other tests compiled counts for the compiler's limit
    length, spec = 300, MaskSpec(document=True, prefix=True)
    rows = rows_of(length, "cuda")._replace(prefix_B=torch.tensor([0, 3, 170], device="cuda"))
    assert rows.segments_BT is not None
    mine = torch.zeros(B, length, dtype=torch.bool, device="cuda")
    mine[2] = rows.segments_BT[2] == changed
    backend, seen = FlexBackend(), []
    for more in (0, 1):
        given = [
            (x + more * mine[:, :, None, None]).detach().bfloat16().requires_grad_()
            for x in qkv(length, "cuda")
        ]
        out = backend(*given, backend.prepare(spec, rows, length))
        seen.append([out, *torch.autograd.grad((out * weigh(out)).sum(), given)])
    for before, after in zip(*seen, strict=True):
        assert before[~mine].equal(after[~mine])
    assert not seen[0][0][mine].equal(seen[1][0][mine])
