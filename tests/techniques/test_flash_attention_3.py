"""FlashAttention 3 and 4 are found without being imported, put in place and taken out again."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import in_order, tells
from pieces import h200, qkv
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention import flash_attention_3
from headrace.techniques.attention.flash_attention_3 import (
    RELEASES,
    FetchedFlash3,
    Flash3Sdpa,
    FlashAttention3,
    activate,
    activated,
    is_installed,
)
from headrace.techniques.data.document_packing import DocumentPacking

PLAN = Plan.model_validate({"goal": {"steps": 1}})
GPU = h200()
FA3, FA4 = FlashAttention3(version="FA3"), FlashAttention3(version="FA4")
HERE = [v for v, release in RELEASES.items() if is_installed(release.module)]


class Standing:
    """What stands in for the kernels of a version that a test registers."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self) -> None:
        """As torch calls it."""
        self.removed = True


@pytest.fixture
def versions() -> dict[str, list[Standing]]:
    """Two versions that torch can activate anywhere, and what of each was put in place."""
    made: dict[str, list[Standing]] = {"one": [], "two": []}

    def register(name: str) -> None:
        def stand() -> Standing:
            made[name].append(Standing())
            return made[name][-1]

        register_flash_attention_impl(name, register_fn=stand)

    for name in made:
        register(name)
    return made


def test_stands_inside_and_is_taken_out(versions: dict[str, list[Standing]]) -> None:
    assert current_flash_attention_impl() is None
    with activated("one"):
        assert current_flash_attention_impl() == "one"
        with activated("one"), activated("two"):
            assert current_flash_attention_impl() == "two" and versions["one"][0].removed
        assert current_flash_attention_impl() == "one"
    assert current_flash_attention_impl() is None
    assert all(standing.removed for name in versions for standing in versions[name])


def test_is_taken_out_when_a_run_fails(versions: dict[str, list[Standing]]) -> None:
    with pytest.raises(ZeroDivisionError), activated("one"):
        _ = 1 / 0
    assert current_flash_attention_impl() is None and versions["one"][0].removed


def test_a_forward_pass_sees_to_its_own_kernels(versions: dict[str, list[Standing]]) -> None:
    rows = Rows(torch.arange(4)[None])
    with activated("two"):
        Flash3Sdpa("one").prepare(MaskSpec(), rows, 4)
        Flash3Sdpa("one").prepare(MaskSpec(), rows, 4)
        assert current_flash_attention_impl() == "one" and len(versions["one"]) == 1
    assert current_flash_attention_impl() is None
    with pytest.raises(UnsupportedError, match="no mask"):
        Flash3Sdpa("one").prepare(MaskSpec(document=True), rows, 4)


def test_one_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(version: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(flash_attention_3, "activate_flash_attention_impl", fail)
    with pytest.raises(
        UnsupportedError, match=in_order("FA3", "installed", "undefined symbol")
    ) as caught:
        activate("FA3")
    assert "flash-attention" in caught.value.remedy.text


def test_one_whose_results_torch_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def two() -> tuple[Tensor, Tensor]: ...
    def four() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...

    stood: list[str] = []
    monkeypatch.setattr(flash_attention_3, "activate_flash_attention_impl", stood.append)
    for function in (two, four):
        package = SimpleNamespace(_flash_attn_fwd=function)
        monkeypatch.setattr(flash_attention_3, "import_module", lambda _, package=package: package)
        with nullcontext() if function is two else pytest.raises(UnsupportedError) as caught:
            activate("FA4")
    assert stood == ["FA4"] and tells(caught.value.message, "4 results", "torch", 2)


def test_takes_the_version_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {v: release.module for v, release in RELEASES.items()}
    for here, meant in ((("FA4",), "FA4"), (("FA3", "FA4"), "FA3"), ((), "FA3")):
        found = {modules[v] for v in here}
        monkeypatch.setattr(flash_attention_3, "is_installed", lambda m, found=found: m in found)
        assert FlashAttention3().release == meant and FA4.release == "FA4"
        assert FlashAttention3(source="kernels").release == "FA3"


def test_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "headrace_fake").mkdir()
    (tmp_path / "headrace_fake" / "__init__.py").write_text("raise ImportError('was imported')")
    assert not is_installed("headrace_fake.cute.interface")
    (tmp_path / "headrace_fake" / "cute").mkdir()
    (tmp_path / "headrace_fake" / "cute" / "interface.py").touch()
    assert is_installed("headrace_fake.cute.interface") and is_installed("headrace_fake")
    (tmp_path / "headrace_folder").mkdir()  # as this repository's tests/kernels is one
    assert not is_installed("headrace_folder")
    assert not is_installed("headrace_missing") and not is_installed("headrace_missing.interface")
    assert "headrace_fake" not in sys.modules


def test_a_file_of_its_name_is_not_the_fetcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attention_3, "FETCHER", "headrace_fetcher")
    (tmp_path / "headrace_fetcher.py").touch()
    assert is_installed("headrace_fetcher") and not flash_attention_3.has_fetcher()
    (tmp_path / "headrace_fetcher-1.dist-info").mkdir()
    told = "Name: headrace_fetcher\nVersion: 1\n"
    (tmp_path / "headrace_fetcher-1.dist-info" / "METADATA").write_text(told)
    assert flash_attention_3.has_fetcher()


@pytest.mark.parametrize("technique", [FA3, FA4], ids=["FA3", "FA4"])
def test_refuses_what_is_not_there(
    technique: FlashAttention3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention_3, "is_installed", lambda module: False)
    monkeypatch.setattr(flash_attention_3, "has_fetcher", lambda: False)
    answer = technique.supports(GPU)
    assert isinstance(answer, Unsupported) and "not installed" in answer.reason
    assert answer.remedy.text.startswith(RELEASES[technique.release].install)
    assert ("source=kernels" in answer.remedy.text) == (technique is FA3)
    fetched = technique.model_copy(update={"source": "kernels"})
    answer = fetched.supports(GPU)
    assert isinstance(answer, Unsupported)
    assert answer.remedy.text == (
        "pip install kernels" if technique is FA3 else "techniques.flash_attention_3.version=FA3"
    )
    monkeypatch.setattr(flash_attention_3, "has_fetcher", lambda: True)
    assert isinstance(fetched.supports(GPU), Supported) == (technique is FA3)


def test_refuses_where_it_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_3, "is_installed", lambda module: True)
    wide = Plan.model_validate({"goal": {"steps": 1}, "model": {"head_dim": 264}})
    packed = PLAN.replaced(techniques={"document_packing": DocumentPacking()})
    for technique, how, says in (
        (FA3, {"device": "cpu"}, "not cpu"),
        (FA4, {"device": "cpu"}, "not cpu"),
        (FA3, {"capability": (8, 0)}, "Hopper"),
        (FA3, {"capability": (10, 0)}, "Hopper"),
        (FA3, {"capability": None}, "unknown"),
        (FA4, {"capability": (8, 9)}, "Blackwell"),
        (FA4, {"capability": (12, 0)}, "12.0"),
        (FA3, {"precision": "fp32"}, "half precision"),
        (FA3, {"plan": wide}, "have 264"),
        (FA3, {"plan": packed}, "document_packing"),
    ):
        answer = technique.supports(replace(GPU, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text
    for technique, capability in ((FA3, (9, 0)), (FA4, (9, 0)), (FA4, (10, 3))):
        assert isinstance(technique.supports(replace(GPU, capability=capability)), Supported)


def test_version_4_makes_gradients_of_some_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass does not compile for 8, 16, 24, 40, 48 and 192 features."""
    monkeypatch.setattr(flash_attention_3, "is_installed", lambda module: True)
    for width, nearest in (
        (8, 32),
        (48, 32),
        (56, 64),
        (76, 80),
        (192, 128),
        (32, None),
        (80, None),
    ):
        plan = Plan.model_validate({"goal": {"steps": 1}, "model": {"head_dim": width}})
        answer = FA4.supports(replace(GPU, plan=plan))
        assert isinstance(FA3.supports(replace(GPU, plan=plan)), Supported)
        if nearest is None:
            assert isinstance(answer, Supported)
            continue
        assert isinstance(answer, Unsupported)
        assert tells(answer.reason, "FA4", "gradients", 32, 64, 80, 96, 128, width)
        assert answer.remedy.text == f"model.head_dim={nearest}"
    plan = Plan.model_validate({"goal": {"steps": 1}, "model": {"head_dim": 264}})
    answer = FA4.supports(replace(GPU, plan=plan))
    assert isinstance(answer, Unsupported) and answer.remedy.text == "model.head_dim=128"


def test_a_torch_that_cannot_activate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_3, "list_flash_attention_impls", lambda: ["FA4"])
    answer = FA3.supports(GPU)
    assert isinstance(answer, Unsupported) and "cannot activate FA3" in answer.reason


def test_is_not_in_force_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flash_attention_3, "activated", nullcontext)
    for attend in (Flash3Sdpa("FA3"), Sdpa()):
        build: Any = SimpleNamespace(
            config=ModelConfig(dim=32, heads=4, kv_heads=2),
            device=torch.device("cpu"),
            context=GPU,
            model=SimpleNamespace(attend=attend),
        )
        evidence = FA3.active(build)
        assert evidence.active is False and "no flash kernel" in evidence.detail


def test_a_forward_pass_and_a_query_over_a_cache_are_the_trunks() -> None:
    q, k, v = qkv(13)
    for query in (q, q[:, -1:]):
        torch.testing.assert_close(Flash3Sdpa("FA3")(query, k, v, None), Sdpa()(query, k, v, None))


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, statistics: bool = False
) -> Any:
    """Compute what the fetched function promises by matmuls: its layout, groups and causal flag."""
    assert q.size(-1) % 8 == 0 and q.dtype == k.dtype == v.dtype
    k, v = (x.repeat_interleave(q.size(2) // k.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) * softmax_scale
    if causal:
        assert q.size(1) == k.size(1)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    with torch.profiler.record_function("a flash kernel"):
        out = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)
    return (out, scores.logsumexp(-1)) if statistics else out


class Fetcher:
    """What stands in for the package that fetches."""

    def __init__(self, function: Any) -> None:
        self.function, self.asked = function, []

    def get_kernel(self, repository: str, **which: Any) -> Any:
        """As the package is called."""
        self.asked.append((repository, which))
        if isinstance(self.function, Exception):
            raise self.function
        return SimpleNamespace(flash_attn_func=self.function)


@pytest.mark.parametrize("statistics", [False, True])
def test_what_is_fetched_is_the_trunks(monkeypatch: pytest.MonkeyPatch, statistics: bool) -> None:
    """Forward, gradients, padded heads, a query over a cache, and nothing ahead of a query."""
    fetcher = Fetcher(partial(plain, statistics=statistics))
    monkeypatch.setitem(sys.modules, "kernels", fetcher)
    build: Any = SimpleNamespace(parts=SimpleNamespace(attend=None), runtime=[])
    FlashAttention3(source="kernels").apply(build)
    FlashAttention3(source="kernels", revision="c0ffee").apply(build)
    assert fetcher.asked == [
        ("kernels-community/flash-attn3", {"version": 1}),
        ("kernels-community/flash-attn3", {"revision": "c0ffee"}),
    ]
    attend = build.parts.attend
    assert not build.runtime and attend.prepare(MaskSpec(), Rows(torch.arange(4)[None]), 4) is None
    for length, width in ((1, 8), (13, 6)):
        seen = []
        for backend in (attend, Sdpa()):
            given = [x.requires_grad_() for x in qkv(length, width)]
            out = backend(*given, None)
            seen.append([out, *torch.autograd.grad(out.square().sum(), given)])
        for found, right in zip(*seen, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    q, k, v = qkv(13, 6)
    torch.testing.assert_close(attend(q[:, -1:], k, v, None), Sdpa()(q[:, -1:], k, v, None))
    assert attend(q, k, v.bfloat16(), None).dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="no mask"):
        attend.prepare(MaskSpec(prefix=True), Rows(torch.arange(4)[None]), 4)


@pytest.mark.parametrize("error", [OSError("no network"), TypeError("unexpected 'version'")])
def test_what_cannot_be_fetched_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "kernels", Fetcher(error))
    with pytest.raises(UnsupportedError, match=str(error)) as caught:
        FlashAttention3(source="kernels").apply(SimpleNamespace())  # type: ignore[arg-type]
    assert "version 1" in caught.value.message and "pip install kernels" in caught.value.remedy.text


def test_what_is_fetched_is_in_force_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is launched on a GPU: not in force. With such names it is."""
    on = FlashAttention3(source="kernels")
    build: Any = SimpleNamespace(
        config=ModelConfig(dim=32, heads=4, kv_heads=2),
        device=torch.device("cpu"),
        context=GPU,
        model=SimpleNamespace(attend=FetchedFlash3(plain)),
    )
    assert on.active(build).active is False
    real = flash_attention_3.kernels_of
    monkeypatch.setattr(flash_attention_3, "kernels_of", lambda *a, only: real(*a, only=""))
    assert on.active(build).active is True
    build.model.attend = Sdpa()
    assert on.active(build).active is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not HERE, reason="needs FlashAttention 3 or 4")
@pytest.mark.parametrize("version", HERE)
@pytest.mark.parametrize("length", [13, 200, 513])
def test_the_kernel_equals_a_dense_reference(version: str, length: int) -> None:
    """Results are in bf16 within its rounding of the fp32 reference, forward and every gradient."""
    rows, seen = Rows(torch.arange(length, device="cuda")[None]), []
    causal = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    with activated(version):
        for backend, dtype in ((Flash3Sdpa(version), torch.bfloat16), (Sdpa(), torch.float32)):
            given = [x.bfloat16().to(dtype).requires_grad_() for x in qkv(length, 64, "cuda")]
            backend.prepare(MaskSpec(), rows, length)
            out = backend(*given, causal if dtype == torch.float32 else None)
            weigh = torch.linspace(-1, 1, 64, device="cuda")
            seen.append([out, *torch.autograd.grad((out * weigh.to(dtype)).sum(), given)])
    for found, right in zip(*seen, strict=True):
        off = (found.float() - right).norm() / right.norm()
        assert off < 0.02, f"off by {off}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not HERE, reason="needs FlashAttention 3 or 4")
@pytest.mark.parametrize("version", HERE)
def test_a_later_token_does_not_reach_an_earlier_one(version: str) -> None:
    """The leak that plain causal rows can have: bit by bit, outputs before a changed token."""
    q, k, v = (x.bfloat16() for x in qkv(200, 64, "cuda"))
    place = torch.arange(200, device="cuda")[None, :, None, None]
    with activated(version):
        before = Flash3Sdpa(version)(q, k, v, None)
        after = Flash3Sdpa(version)(q, *(torch.where(place >= 130, x + 1, x) for x in (k, v)), None)
    assert before[:, :130].equal(after[:, :130]) and not before[:, 130:].equal(after[:, 130:])
