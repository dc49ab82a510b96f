"""A soft cap is tested: the formula through the model, beside documents, and its evidence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.logit_soft_cap import LogitSoftCap

ON = "techniques.logit_soft_cap.cap=0.5"


class ByHand:
    """A backend that is the formula."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        """Prepare nothing."""

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Compute causal attention under a cap of 0.5."""
        T, H, K = q_BTHK.shape[1:]
        k, v = (x.repeat_interleave(H // x.size(2), 2) for x in (k_BTGK, v_BTGK))
        scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k) / K**0.5
        scores = 0.5 * torch.tanh(scores / 0.5) - torch.full((T, T), torch.inf).triu(1)
        return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)


def test_the_step_equals_the_formula(make_tiny: Callable[..., Build]) -> None:
    build, trunk = make_tiny(ON, "model.kv_heads=1"), make_tiny("model.kv_heads=1")
    assert build.mask == MaskSpec(soft_cap=0.5)
    ids, rows = torch.arange(13)[None] * 7, Rows(torch.arange(13)[None])
    bare = trunk.model.hidden(ids, rows)
    trunk.model.attend = ByHand()
    for block in trunk.model.blocks.values():
        block.mixer.attend = trunk.model.attend  # type: ignore[union-attr]
    found, right = build.model.hidden(ids, rows), trunk.model.hidden(ids, rows)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    assert (found - bare).abs().max() > 1e-4
    weigh = torch.linspace(-1, 1, found.numel()).view_as(found)
    for states in (found, right):
        (states * weigh).sum().backward()
    for name, parameter in trunk.model.named_parameters():
        if parameter.grad is not None:
            other = build.model.get_parameter(name).grad
            assert other is not None
            assert (other - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max()


def test_a_document_does_not_feel_its_neighbour(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(ON, "techniques.document_packing={}")
    ids, segments = torch.arange(12)[None], (torch.arange(12) >= 5).int()[None]
    rows = Rows(torch.arange(12)[None] - 5 * segments, segments)
    with torch.no_grad():
        before = build.model.hidden(ids, rows)
        after = build.model.hidden(ids.where(segments == 1, ids + 50), rows)
    assert before[:, 5:].equal(after[:, 5:]) and not before[:, :5].equal(after[:, :5])


@pytest.mark.parametrize("cap", [0.5, 7.0, 50.0, 100.0])
def test_evidence_weighs_a_large_score(make_tiny: Callable[..., Build], cap: float) -> None:
    build = make_tiny(f"techniques.logit_soft_cap.cap={cap}")
    technique = LogitSoftCap(cap=cap)
    assert technique.active(build).active
    build.model.mask = MaskSpec()
    assert not technique.active(build).active
    build.model.mask = MaskSpec(soft_cap=2 * cap)
    assert not technique.active(build).active


def test_refuses_split_rows(tiny_plan: Callable[..., Any]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    assert isinstance(LogitSoftCap().supports(context), Supported)
    plan = tiny_plan("mesh.context=2", "techniques.context_parallel={}")
    answer = LogitSoftCap().supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported) and "no cap" in answer.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["", "techniques.flex_attention={}"])
def test_the_cap_on_a_gpu(make_tiny: Callable[..., Build], backend: str) -> None:
    build = make_tiny(
        "techniques.logit_soft_cap={}",
        "device=cuda",
        "model.head_dim=16",
        *filter(None, [backend]),
    )
    assert LogitSoftCap().active(build).active
