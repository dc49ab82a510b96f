"""Linear attention is a mixer: the recurrence by hand, documents, slices of heads, sampling."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import in_order
from torch import Tensor

from headrace.assemble.context import make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.inference.sample import generate
from headrace.kernels import gated_delta, linear_attention
from headrace.model.attention import Shared
from headrace.model.mask import MaskSpec, Rows
from headrace.model.position import POSITIONS
from headrace.plan.technique import Unsupported
from headrace.techniques.attention.linear_attention import (
    TEMPERATURE,
    DeltaMixer,
    Documents,
    LinearAttention,
    LinearMixer,
    Mix,
)
from headrace.train.train import step

CHUNK = "techniques.linear_attention.chunk_tokens=4"
DELTA = "techniques.linear_attention.rule=gated_delta"
KINDS = {
    LinearMixer: Mix(partial(linear_attention.chunked, chunk=4), 4),
    DeltaMixer: Mix(partial(gated_delta.chunked, chunk=4), 4),
}
RULES = pytest.mark.parametrize("kind", KINDS, ids=["sum", "gated_delta"])
B, T, D = 2, 11, 24


def make(kind: type[LinearMixer], **keys: Any) -> tuple[LinearMixer, ModelConfig]:
    torch.manual_seed(0)
    config = ModelConfig(dim=D, heads=4, vocab=64, **{"kv_heads": 2, **keys})
    mixer = kind(config, 0, Documents(), KINDS[kind])
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer, config


def shared_of(config: ModelConfig, segments: Tensor | None = None) -> Shared:
    positions = torch.arange(T)[None]
    return Shared(positions, segments, POSITIONS[config.position](config).prepare(positions))


def by_hand(mixer: LinearMixer, config: ModelConfig, x_TD: Tensor, starts: set[int]) -> Tensor:
    """Compute one row, token by token, query head by query head."""
    K, G = config.resolved_head_dim, config.resolved_kv_heads
    P = config.heads // G
    fused = mixer.qkv(x_TD).view(T, G, P + 2, K)
    states = [torch.zeros(K, K) for _ in range(G)]
    rows = []
    for t in range(T):
        heads = []
        for g in range(G):
            gate = torch.sigmoid(mixer.decay.weight[g] @ x_TD[t]) ** (1 / TEMPERATURE)
            kept = 0.0 if t in starts else gate
            k, v = fused[t, g, P], fused[t, g, P + 1]
            states[g] = states[g] * kept
            if isinstance(mixer, DeltaMixer):
                k = F.normalize(k, dim=0)
                strength = torch.sigmoid(mixer.strength.weight[g] @ x_TD[t])
                v = strength * (v - k @ states[g])
            states[g] = states[g] + torch.outer(k, v)
            for p in range(P):
                read = fused[t, g, p] @ states[g] / K**0.5
                heads.append(read / (read.square().mean() + torch.finfo(x_TD.dtype).eps).sqrt())
        rows.append(torch.cat(heads))
    return mixer.out(torch.stack(rows))


@RULES
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_equals_the_recurrence_by_hand(packed: bool, kind: type[LinearMixer]) -> None:
    mixer, config = make(kind, position="none")
    x = torch.randn(B, T, D, requires_grad=True)
    starts = [{0, 3, 4}, {0, 10}] if packed else [{0}, {0}]
    flags = torch.tensor([[t in row for t in range(T)] for row in starts])
    segments = flags.long().cumsum(1) if packed else None
    found = mixer(x, shared_of(config, segments))
    right = torch.stack([by_hand(mixer, config, x[b], starts[b]) for b in range(B)])
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    weigh = torch.randn(B, T, D)
    both = [
        torch.autograd.grad((y * weigh).sum(), [x, *mixer.parameters()]) for y in (found, right)
    ]
    for a, b in zip(*both, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@RULES
def test_slices_of_the_heads_add_up(kind: type[LinearMixer]) -> None:
    """As tensor parallelism cuts it: columns and rows in groups of key-value heads."""
    whole, config = make(kind)
    x, shared = torch.randn(B, T, D), shared_of(config)
    parts = []
    for rank in range(whole.units):
        part, _ = make(kind)
        for names, dim in ((part.columns, 0), (part.rows, 1)):
            for name in names:
                cut = whole.get_submodule(name).weight.chunk(whole.units, dim)[rank]  # type: ignore[operator, union-attr]
                part.get_submodule(name).weight = torch.nn.Parameter(cut.clone())
        parts.append(part(x, shared))
    torch.testing.assert_close(sum(parts), whole(x, shared), rtol=1e-4, atol=1e-5)


def test_takes_documents_alone_from_the_mask() -> None:
    rows = Rows(torch.arange(T)[None], torch.zeros(1, T))
    backend = Documents()
    assert backend.prepare(MaskSpec(), rows, T) is None
    assert backend.prepare(MaskSpec(document=True), rows, T) is rows.segments_BT
    for spec in (MaskSpec(window=3), MaskSpec(causal=False), MaskSpec(prefix=True)):
        with pytest.raises(ConfigError, match="cannot see the mask"):
            backend.prepare(spec, rows, T)


@pytest.mark.parametrize(
    ("prompt", "more"), [(1, []), (4, []), (6, []), (6, [DELTA])], ids=["1", "4", "6", "6-delta"]
)
def test_sampling_continues_the_state(
    make_tiny: Callable[..., Build], prompt: int, more: list[str]
) -> None:
    """Each token is the likeliest of a forward pass over all that stands before it."""
    build = make_tiny(CHUNK, "model.qk_norm=true", *more)
    ids = torch.arange(2 * prompt).view(2, prompt)
    found = generate(build.model, ids, new_tokens=9, temperature=0)
    for end in range(prompt, prompt + 9):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert logits[:, -1].argmax(-1).equal(found[:, end])


def test_stands_beside_no_window(tiny_plan: Callable[..., Any], make_tiny: Any) -> None:
    with pytest.raises(ConfigError, match=in_order("linear_attention", "sliding_window")):
        make_tiny(CHUNK, "techniques.sliding_window.window=4")


def test_refuses_cut_rows_and_given_weights(tiny_plan: Callable[..., Any]) -> None:
    plan = tiny_plan()
    for key, change in (("mesh", {"context": 2}), ("model", {"pretrained": "there"})):
        asked = plan.model_copy(update={key: getattr(plan, key).model_copy(update=change)})
        answer = LinearAttention().supports(make_context(asked, torch.device("cpu")))
        assert isinstance(answer, Unsupported) and answer.remedy.text


@pytest.mark.parametrize("more", [[], [DELTA]], ids=["sum", "gated_delta"])
def test_a_block_that_was_left_out_does_not_end_the_run(
    make_tiny: Callable[..., Build], batch: Any, more: list[str]
) -> None:
    """Its layer has computed no chunk yet; the others have."""
    build = make_tiny(CHUNK, *more, "model.layers=4", "techniques.stochastic_depth.rate=0.9")
    technique = build.plan.techniques["linear_attention"]
    assert technique.active(build).active is None
    step(build, batch(build), 0)
    assert build.notes["stochastic_depth"]["left_out"] > 0
    found = check_active(build)["linear_attention"]
    assert found.active and found.numbers["longest_chunk"] == 4
    assert " of 4 layers" in found.detail and not found.detail.startswith("4")
    build.model.blocks["3"].mixer = torch.nn.Identity()
    assert technique.active(build).active is False


def test_the_gate_starts_by_remembering() -> None:
    """A gate of weight 0 keeps half of what it held 16 tokens ago."""
    kept = F.logsigmoid(torch.zeros(())) / TEMPERATURE * 16
    assert float(kept.exp()) == pytest.approx(0.5)
