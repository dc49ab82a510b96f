"""The probe that evidence rests on: what a backend launches, and nothing that it does not."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa, equal_scores, kernels_of

CONFIG = ModelConfig(dim=32, heads=4, kv_heads=2)
MATH = "aten::_scaled_dot_product_attention_math"


def test_zeros_have_the_models_heads() -> None:
    q, k = equal_scores(CONFIG, torch.device("cpu"), torch.bfloat16, rows=2, length=5)
    assert q.shape == (2, 5, 4, 8) and k.shape == (2, 5, 2, 8)
    assert q.dtype == k.dtype == torch.bfloat16 and q.is_contiguous() and not q.any()


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_names_tell_kernels_apart(kernel: SDPBackend) -> None:
    q, k = equal_scores(CONFIG, torch.device("cpu"), torch.float32)
    with sdpa_kernel(kernel):
        names = kernels_of(Sdpa(), q, k, k)
        on_the_host, on_a_gpu = (kernels_of(Sdpa(), q, k, k, only=x) for x in ("CPU", "CUDA"))
    assert (MATH in names) == (kernel == SDPBackend.MATH)
    assert sum("flash_attention" in name for name in names) == (kernel != SDPBackend.MATH)
    assert set(on_the_host) == set(names) and not on_a_gpu


def test_compiling_is_not_looked_at() -> None:
    """The first call, and it has gradients off: what is seen is a forward pass that is warm."""
    seen = []

    class Once(Sdpa):
        def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
            name = "later" if seen else "first"
            seen.append(torch.is_grad_enabled())
            with torch.profiler.record_function(name):
                return super().__call__(q_BTHK, k_BTGK, v_BTGK, mask)

    q, k = equal_scores(CONFIG, torch.device("cpu"), torch.float32)
    names = kernels_of(Once(), q, k, k)
    assert "later" in names and "first" not in names and seen == [False, False]
