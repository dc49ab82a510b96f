"""Which techniques multiply in fp32 in a run of half precision: what they say is what they do."""

from typing import Any

import house
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.train.train import step

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
SAID = [
    house.Variant("mixture_of_experts", {"experts": 4}),
    house.Variant("linear_attention", {"chunk_tokens": 4, "rule": "gated_delta"}),
    house.Variant("linear_attention", {"chunk_tokens": 4}),
    house.Variant("dora", {"rank": 2, "alpha": 4.0}),
    house.Variant("rope"),
    house.Variant("short_convolution", {"between": 1}),
    house.Variant("logit_soft_cap"),
]


class Wide(TorchDispatchMode):
    """Products whose operands are all fp32."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the product and let it be."""
        name = func.overloadpacket.__name__
        operands = [a for a in args if isinstance(a, Tensor)]
        if name in PRODUCTS and all(a.dtype == torch.float32 for a in operands):
            self.found.add(f"{name} {[tuple(a.shape) for a in operands]}")
        return func(*args, **(kwargs or {}))


def wide_products(variant: house.Variant, device: str) -> set[str]:
    """Return the fp32 matmuls of one step in bf16."""
    plan = house.plan_of(variant, device=device, precision="bf16")
    build, wide = house.build_of(plan), Wide()
    micros = build.loader.step(0).micros
    with wide:
        step(build, micros, 0)
    return wide.found


@pytest.mark.parametrize("variant", SAID, ids=str)
def test_what_is_said_to_multiply_in_fp32_does(variant: house.Variant) -> None:
    found = wide_products(variant, "cpu")
    assert bool(found) == variant.technique().multiplies_fp32(), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(house.CATALOGUE.techniques))
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_other_technique_does_on_a_gpu(name: str) -> None:
    found = house.variants(name, "cuda")
    inside = name == "flex_attention"  # it compiles its own kernel
    if not found or inside or house.compiles(found[0], "cuda"):
        pytest.skip("does not run here, or is compiled: no product of it passes by")
    if name == "tf32" or not house.fits(found[0], device="cuda", precision="bf16"):
        pytest.skip("takes another precision")
    products = wide_products(found[0], "cuda")
    assert bool(products) == found[0].technique().multiplies_fp32(), products
