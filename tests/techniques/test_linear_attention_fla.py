"""Linear attention by flash-linear-attention's kernels: what they are given, and who refuses.

On a CPU a stand-in has the package's signatures (fla-core 0.6.0) and computes what its
documentation says, token by token; on a GPU the package itself is compared with torch's products.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pieces import h200
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.data.ingest import prepare
from headrace.kernels import fla, gated_delta, linear_attention
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.attention import linear_attention as technique
from headrace.techniques.attention.linear_attention import LinearAttention
from headrace.train.train import step

B, T, G, P, K = 2, 7, 2, 3, 4
RULES = {
    "sum": (fla.decayed_sum, linear_attention.recurrent, linear_attention.chunked),
    "gated_delta": (fla.gated_delta, gated_delta.recurrent, gated_delta.chunked),
}


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the contract: q, k, v [B, T, H, K], g and beta [B, T, H], states [N, H, K, V]."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == torch.float32
    assert q.shape == k.shape == v.shape and g.shape == q.shape[:3]
    assert beta is None or beta.shape == g.shape
    cuts = [(row, 0, q.size(1)) for row in range(len(q))]
    if cu_seqlens is not None:
        assert len(q) == 1 and cu_seqlens.dtype == torch.long
        ends = cu_seqlens.tolist()
        assert ends[0] == 0 and ends[-1] == q.size(1) and sorted(set(ends)) == ends
        cuts = [(0, a, b) for a, b in itertools.pairwise(ends)]
    assert initial_state is None or len(initial_state) == len(cuts)
    out, states = torch.zeros_like(v, dtype=torch.float32), []
    for n, (row, a, b) in enumerate(cuts):
        state = torch.zeros(q.size(2), q.size(3), v.size(3))
        state = state if initial_state is None else initial_state[n]
        for t in range(a, b):
            state = state * g[row, t, :, None, None].exp()
            new = v[row, t].float()
            if beta is not None:
                known = torch.einsum("hk,hkv->hv", k[row, t].float(), state)
                new = beta[row, t, :, None] * (new - known)
            state = state + torch.einsum("hk,hv->hkv", k[row, t].float(), new)
            out[row, t] = scale * torch.einsum("hk,hkv->hv", q[row, t].float(), state)
        states.append(state)
    return out.to(q.dtype), torch.stack(states) if output_final_state else None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package `fla` with two kernels."""
    names = {"simple_gla": "chunk_simple_gla", "gated_delta_rule": "chunk_gated_delta_rule"}
    for name in ("fla", "fla.ops", *(f"fla.ops.{n}" for n in names)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in names.items():
        monkeypatch.setattr(sys.modules[f"fla.ops.{name}"], function, kernel, raising=False)
    yield


def inputs(rule: str, B: int, T: int, G: int, P: int, K: int, device: str) -> list[Tensor]:
    """Numbers that bf16 has; gates in fp32."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(B, T, G, P, K), (B, T, G, K), (B, T, G, K), (B, T, G), (B, T, G)]
    q, k, v, g, strength = (torch.randn(s, generator=draw) for s in shapes)
    k = F.normalize(k, dim=-1)
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
    gates = [F.logsigmoid(g).to(device), strength.sigmoid().to(device)]
    return [q, k, v, *gates[: 1 if rule == "sum" else 2]]


def segments_of(rows: int, length: int, device: str) -> Tensor:
    """Return documents' indices: rows that begin anew, and documents of one token."""
    starts = torch.zeros(rows, length, dtype=torch.long)
    starts[0, [2, 3]] = 1
    starts[1, length - 1] = 1
    return starts.cumsum(1).to(device)


def test_where_documents_begin_and_end() -> None:
    segments = torch.tensor([[0, 0, 1, 2], [2, 2, 2, 3]])
    assert fla.ends_of(segments).tolist() == [0, 2, 3, 4, 7, 8]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_the_kernels_are_given_what_they_document(rule: str, packed: bool, stand_in: None) -> None:
    ours, recurrent, _ = RULES[rule]
    given = inputs(rule, B, T, G, P, K, "cpu")
    segments = segments_of(B, T, "cpu") if packed else None
    state = None if packed else torch.randn(B, G, K, K)
    right, end = recurrent(*(x.float() for x in given), segments, state_BGKV=state)
    found, after = ours(
        *given, None if segments is None else fla.ends_of(segments), state_BGKV=state
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), right, rtol=1e-2, atol=1e-2)
    assert (after is None) == packed
    if after is not None:
        torch.testing.assert_close(after, end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_packed_step_and_its_evidence(
    rule: str, tiny_plan: Callable[..., Plan], stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearAttention, "supports", lambda self, context: Supported())
    plan = tiny_plan("techniques.document_packing={}", "model.init_std=0.2", "model.kv_heads=1")
    losses = []
    for kernels in ("torch", "fla"):
        on = LinearAttention.model_validate({"rule": rule, "kernels": kernels})
        named = {**plan.techniques, on.name(): on}
        build = make_build(
            plan.replaced(techniques=named), prepare(plan), World(), torch.device("cpu")
        )
        assert not on.active(build).active, "nothing has run yet"
        losses.append(float(step(build, build.loader.step(0).micros, 0)[0]))
        evidence = on.active(build)
        assert evidence.active, evidence.detail
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    launches = {"sum": fla.SUM, "gated_delta": fla.GATED_DELTA}[rule]
    assert evidence.numbers[launches] > 0 and launches in evidence.detail
    other = on.model_copy(update={"rule": "sum" if rule == "gated_delta" else "gated_delta"})
    assert not other.active(build).active, "that rule did not run"


def gpu(**techniques: Any) -> Context:
    plan = SimpleNamespace(
        model=SimpleNamespace(pretrained="", resolved_head_dim=64),
        mesh=SimpleNamespace(context=1),
        techniques=techniques,
    )
    return h200(plan)


def test_refuses_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on = LinearAttention.model_validate({"kernels": "fla"})

    def refused(context: Context, says: str) -> None:
        answer = on.supports(context)
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text

    delta = on.model_copy(update={"rule": "gated_delta"})
    monkeypatch.setattr(technique, "_installed", lambda: "0.6.0")
    for (triton, wrong), tilelang in itertools.product(
        (("3.7.1", False), ("3.3.1", False), ("3.6.0", True)), (True, False)
    ):
        monkeypatch.setattr(technique, "version", lambda package, found=triton: found)
        found = "tilelang" if tilelang else None
        monkeypatch.setattr(technique, "find_spec", lambda package, found=found: found)
        for rule in (on, delta):
            answer = rule.supports(gpu())
            mended = tilelang and rule is delta  # not for a sum, whose states are fp32
            assert isinstance(answer, Unsupported) == (wrong and not mended)
            if isinstance(answer, Unsupported):
                assert "3.6.0 compiles" in answer.reason
                assert ("tilelang" in answer.remedy.text) == (rule is delta)
            assert isinstance(rule.supports(replace(gpu(), capability=(8, 0))), Supported)
    monkeypatch.setattr(technique, "version", lambda package: "3.7.1")
    for how, says in (
        ({"device": "cpu"}, "GPU"),
        ({"has_triton": False}, "Triton"),
        ({"precision": "fp32"}, "bf16"),
    ):
        refused(replace(gpu(), **how), says)
    whole = SimpleNamespace(composes=("compiled",), fullgraph=True, name=lambda: "torch_compile")
    refused(gpu(torch_compile=whole), "fullgraph")
    whole.fullgraph = False
    assert isinstance(on.supports(gpu(torch_compile=whole)), Supported)
    wide = gpu()
    wide.plan.model.resolved_head_dim = 512
    refused(wide, "512")
    for found, says in ((None, "not installed"), ("0.5.1", "0.5.1 is older than 0.6")):
        monkeypatch.setattr(technique, "_installed", lambda found=found: found)
        refused(gpu(), says)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None,
    reason="needs a CUDA device and flash-linear-attention",
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("length", [7, 200])
def test_the_package_computes_the_same(rule: str, packed: bool, length: int) -> None:
    """Compare results and gradients in bf16 with torch's matmuls in fp32, within 2% by L2."""
    if torch.cuda.get_device_capability()[0] == 9 and (triton := technique._miscompiles(rule)):
        pytest.skip(f"Triton {triton} is wrong for {rule} on Hopper; the plan refuses it")
    ours, _, chunked = RULES[rule]
    given = inputs(rule, 2, length, 2, 2, 64, "cuda")
    segments = segments_of(2, length, "cuda") if packed else None
    ends = None if segments is None else fla.ends_of(segments)
    weigh, seen = torch.randn_like(given[0].float()), []
    for run, mask, how in ((ours, ends, {}), (chunked, segments, {"chunk": 64})):
        leaves = [x.clone() if run is ours else x.float() for x in given]
        for leaf in leaves:
            leaf.requires_grad_()
        mixed = run(*leaves, mask, **how)[0]  # type: ignore[operator]
        seen.append([mixed, *torch.autograd.grad((mixed.float() * weigh).sum(), leaves)])
    names = ("result", "queries", "keys", "values", "decay", "strength")[: len(seen[0])]
    off = {
        name: float((found.float() - wanted.float()).norm() / wanted.float().norm())
        for name, found, wanted in zip(names, *seen, strict=True)
    }
    assert max(off.values()) < 0.02, off
