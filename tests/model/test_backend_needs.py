"""The table of backends refuses by device, precision, heads and mask, each with what mends it."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.model.backend_needs import NEEDS, lacks


def place(head_dim: int = 64, composes: tuple[str, ...] = (), **changes: Any) -> Any:
    """Return a Hopper GPU in bf16, with `changes`, and a plan of one other technique."""
    other = SimpleNamespace(composes=composes, claims=())
    data = SimpleNamespace(sequence_length=64)
    plan = SimpleNamespace(
        model=ModelConfig(head_dim=head_dim), data=data, techniques={"other": other}
    )
    here = {"device": "cuda", "device_name": "a GPU", "capability": (9, 0), "has_triton": True}
    here |= {"capability_text": "9.0", "precision": "bf16", "has_ring": False}
    return SimpleNamespace(plan=plan, **{**here, **changes})


@pytest.mark.parametrize("name", NEEDS)
def test_a_hopper_gpu_in_bf16_lacks_nothing(name: str) -> None:
    assert lacks(place(), name) is None


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize(
    "changes", [{"device": "cpu"}, {"capability": (7, 5)}, {"capability": None}], ids=str
)
def test_every_backend_refuses_other_devices(name: str, changes: dict[str, Any]) -> None:
    answer = lacks(place(**changes), name)
    assert answer is not None and answer.kind is RefusalKind.DEVICE


@pytest.mark.parametrize(
    ("name", "changes", "kind", "mended"),
    [
        ("cudnn_attention", {"precision": "fp16"}, RefusalKind.PLAN, "model.precision=bf16"),
        ("varlen_attention", {"precision": "fp32"}, RefusalKind.PLAN, "model.precision=bf16"),
        ("flash_attention", {"head_dim": 300}, RefusalKind.PLAN, "model.head_dim=256"),
        ("FA4", {"head_dim": 300}, RefusalKind.PLAN, "model.head_dim=128"),
        ("FA3", {"capability": (10, 0)}, RefusalKind.DEVICE, "flash_attention"),
        ("flash_attention", {"composes": ("mask",)}, RefusalKind.COMBINATION, "varlen_attention"),
        (
            "flash_attention",
            {"composes": ("mask",), "has_ring": True},
            RefusalKind.COMBINATION,
            "--without flash_attention",
        ),
        ("flex_attention", {"has_triton": False}, RefusalKind.PACKAGE, "pip install triton"),
    ],
)
def test_what_one_backend_lacks(
    name: str, changes: dict[str, Any], kind: RefusalKind, mended: str
) -> None:
    answer = lacks(place(**changes), name)
    assert answer is not None and answer.kind is kind and mended in answer.remedy.text


def test_a_backend_with_masks_takes_other_techniques_masks() -> None:
    assert lacks(place(composes=("mask",)), "flex_attention") is None
    assert lacks(place(composes=("mask",), precision="fp32"), "flex_attention") is None
