"""Whole steps with the fused norm and rotation, on a CPU in Triton's interpreter; who refuses."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import h200

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.kernels.launches import COUNTS
from headrace.model.attention import Shared
from headrace.model.position import Rotation
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.fusion import liger_kernels
from headrace.techniques.fusion.fused_rms_norm import FusedRmsNorm
from headrace.techniques.fusion.fused_rope import FusedRope
from headrace.techniques.fusion.fused_swiglu import FusedSwiglu
from headrace.techniques.fusion.liger_kernels import LigerKernels
from headrace.train.train import step

KINDS = (FusedRmsNorm, FusedRope, FusedSwiglu, LigerKernels)
OURS = pytest.mark.parametrize("kind", (FusedRmsNorm, FusedRope, FusedSwiglu))
ON_THE_HOST = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.fixture
def build_with(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Build]:
    """A build with or without a technique that the host's interpreter stands in for."""

    def make(kind: Any, *overrides: str) -> Build:
        few = "batch.tokens=32"  # each is interpreted for milliseconds
        plan = tiny_plan("model.kv_heads=1", "model.init_std=0.2", few, *overrides)
        if kind is not None:
            monkeypatch.setattr(kind, "supports", lambda self, context: Supported())
            plan = plan.replaced(techniques={kind.name(): kind()})
        return make_build(plan, prepare(plan), World(), torch.device("cpu"))

    return make


def gradients_of(build: Build) -> dict[str, torch.Tensor]:
    """Return gradients after one step of the run's own."""
    step(build, build.loader.step(0).micros, 0)
    return {n: p.grad for n, p in build.model.named_parameters() if p.grad is not None}


@OURS
@ON_THE_HOST
def test_a_step_is_the_trunks_and_shows_it(kind: Any, build_with: Callable[..., Build]) -> None:
    pytest.importorskip("triton")
    plain, fused = build_with(None), build_with(kind)
    assert not kind().active(fused).active, "nothing has run yet"
    wanted, found = gradients_of(plain), gradients_of(fused)
    assert list(found) == list(wanted)
    for name, right in wanted.items():
        off = (found[name] - right).abs().max() / right.abs().max()
        assert off < 1e-5, f"{name} is off by {off}"
    evidence = kind().active(fused)
    assert evidence.active and evidence.numbers["forward"] == evidence.numbers["backward"] > 0
    plain.notes = fused.notes
    if kind is not FusedRope:
        assert not kind().active(plain).active, "these modules are the trunk's"


@ON_THE_HOST
def test_a_blocks_second_norm_takes_in_its_addition(build_with: Callable[..., Build]) -> None:
    """Two of four norms in two blocks have one, and not the norm at the end."""
    pytest.importorskip("triton")
    build = build_with(FusedRmsNorm, "model.layers=2", "batch.micro_sequences=0")
    gradients_of(build)
    numbers = FusedRmsNorm().active(build).numbers
    assert numbers["norms"] == 5 and numbers["forward"] == numbers["backward"] == 5
    assert numbers["additions"] == numbers["additions_backward"] == 2


@ON_THE_HOST
@pytest.mark.parametrize("groups", [1, 2])
def test_the_rotation_takes_in_the_norm(groups: int, build_with: Callable[..., Build]) -> None:
    pytest.importorskip("triton")
    keys = ("model.qk_norm=true", "model.heads=4", f"model.kv_heads={groups}")
    plain, fused = build_with(None, *keys), build_with(FusedRope, *keys)
    wanted, found = gradients_of(plain), gradients_of(fused)
    for name, right in wanted.items():
        off = (found[name] - right).abs().max() / right.abs().max()
        assert off < 1e-5, f"{name} is off by {off}"
    evidence = FusedRope().active(fused)
    assert evidence.active and evidence.numbers["norms"] == evidence.numbers["forward"]
    assert evidence.numbers["norms_backward"] == evidence.numbers["backward"] > 0
    before = fused.notes["fused_rope"]
    for kernel in ("rope_norm_rotate", "rope_norm_back"):
        fused.notes["fused_rope"] = {**before, kernel: COUNTS[kernel]}
        assert not FusedRope().active(fused).active, f"no {kernel} is not in force"
    fused.model.requires_grad_(False)
    assert FusedRope().active(fused).active, "nothing learns, so no gradient passes a rotation"


@OURS
@ON_THE_HOST
def test_a_compiler_takes_it_in_one_graph(kind: Any, build_with: Callable[..., Build]) -> None:
    pytest.importorskip("triton")
    keys = ("model.qk_norm=true",) if kind is FusedRope else ()
    wanted = gradients_of(build_with(kind, *keys))
    build = build_with(kind, *keys)
    torch.compiler.reset()
    build.model.states = torch.compile(build.model.states, backend="aot_eager", fullgraph=True)
    for name, found in gradients_of(build).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-7)
    assert kind().active(build).active, "launches are counted in compiled code too"


def test_a_rotation_is_what_the_filler_made(build_with: Callable[..., Build]) -> None:
    """It keeps whatever angles it is given, and passes the rest of what layers share."""
    build, seen = build_with(FusedRope), []
    block = build.model.blocks["0"]
    wrapped = FusedRope.__module__, block.forward.__module__
    assert wrapped[0] == wrapped[1]
    mixer = block.mixer.forward
    block.mixer.forward = lambda x, shared: seen.append(shared) or torch.zeros_like(x)
    rotation = Rotation(torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    shared = Shared(torch.arange(2)[None], "mask", rotation)
    block(torch.randn(1, 2, 16), shared)
    block.mixer.forward = mixer
    assert seen[0].mask == "mask" and seen[0].positions_BT is shared.positions_BT
    assert tuple(seen[0].rotation) == tuple(rotation) and type(seen[0].rotation) is not Rotation


def gpu() -> Context:
    model = SimpleNamespace(norm="rms_norm", position="rope", activation="swiglu")
    return h200(SimpleNamespace(model=model))


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_where_it_cannot_run(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger_kernels, "version", lambda name: "0.8.5.post1")
    assert isinstance(kind().supports(gpu()), Supported)
    for how, says in (({"device": "cpu"}, "GPU"), ({"has_triton": False}, "Triton")):
        answer = kind().supports(replace(gpu(), **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text
    other = gpu()
    vars(other.plan.model).update(norm="layer_norm", position="learned", activation="gelu")
    answer = kind().supports(other)
    assert isinstance(answer, Unsupported) and "model." in answer.reason and answer.remedy.text


def test_liger_refuses_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise PackageNotFoundError(name)

    for version, says in (
        (nowhere, "not installed"),
        (lambda name: "0.8.4", "0.8.4 is older than 0.8.5"),
    ):
        monkeypatch.setattr(liger_kernels, "version", version)
        answer = LigerKernels().supports(gpu())
        assert isinstance(answer, Unsupported) and says in answer.reason
        assert answer.remedy.text == "pip install 'headrace[kernels]'"


@pytest.mark.parametrize("kind", (FusedRmsNorm, LigerKernels))
def test_predicts_what_a_norm_keeps(kind: Any, tiny_plan: Callable[..., Plan]) -> None:
    """A block has two norms: each keeps input and result in bf16, and one fp32 number per row."""
    from headrace.costs.count import baseline_ledger

    plan = tiny_plan("model.vocab=300")
    trunk = baseline_ledger(plan.model, rows=2, length=16, precision="bf16", device="cuda")
    edited = kind().predict(trunk)
    dim, tokens = plan.model.dim, 32

    def kept(ledger: Any) -> float:
        return ledger.memory["0/norm"].bytes + ledger.memory["0/residual"].bytes

    assert kept(edited) == 2 * tokens * (2 * 2 * dim + 4)
    assert kept(trunk) - kept(edited) == pytest.approx(2 * tokens * 2 * dim, rel=0.2)


@pytest.mark.slow
@ON_THE_HOST
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (FusedRmsNorm, {}),
        (FusedRope, {}),
        (FusedRope, {"qk_norm": True}),
        (FusedRope, {"qk_norm": True, "kv_heads": 2}),
    ],
    ids=["fused_rms_norm", "fused_rope", "fused_rope-qk_norm", "fused_rope-qk_norm-grouped"],
)
def test_memory_is_what_a_traced_step_shows(
    kind: Any,
    model: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    prepared_folder: Path,
) -> None:
    """As the contract does it for what runs on a CPU: slope over layers, and peak."""
    pytest.importorskip("triton")
    import house
    import test_predicts

    house.put_data_in(str(corpus), str(prepared_folder))
    monkeypatch.setattr(kind, "supports", lambda self, context: Supported())
    test_predicts.check_against_trace(house.Variant(kind.name()), **model)
