"""bf16 autocast rewrites one key, and shows what products come out as."""

from collections.abc import Callable

import pytest
import torch

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.precision.bf16_autocast import Bf16Autocast
from headrace.train.train import step

Make = Callable[..., Build]
ON = "techniques.bf16_autocast={}"


def test_the_run_is_the_one_that_the_key_gives(
    make_tiny: Make, batch: Callable[[Build], list[Micro]]
) -> None:
    by_technique, by_key = make_tiny(ON), make_tiny("model.precision=bf16")
    losses = [step(build, batch(build), 0)[0] for build in (by_technique, by_key)]
    assert losses[0].equal(losses[1])
    exact = step(build := make_tiny(), batch(build), 0)[0]
    assert 0 < abs(losses[0] - exact) / exact < 0.01
    for name, p in by_technique.model.named_parameters():
        assert p.dtype == torch.float32 and p.grad.dtype == torch.float32, name  # type: ignore


def test_evidence_is_a_products_dtype(
    make_tiny: Make, batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(ON)
    step(build, batch(build), 0)
    found = check_active(build)["bf16_autocast"]
    assert found.numbers == {"product_bytes": 2} and "bfloat16" in found.detail
    assert "CPU" in found.detail
    plain = Bf16Autocast().active(make_tiny("model.precision=fp32"))
    assert not plain.active and plain.numbers == {"product_bytes": 4}


def test_a_plan_that_leaves_the_precision_open_may_be_told(tiny_plan: Callable[..., Plan]) -> None:
    assert tiny_plan("model.precision=auto", ON).model.precision == "bf16"
    with pytest.raises(ConfigError, match="bf16_autocast makes it 'bf16'"):
        tiny_plan("model.precision=fp32", ON)


def test_says_where_it_runs(make_tiny: Make) -> None:
    plain = make_tiny().context

    def place(**how: object) -> Context:
        known = {"device": "cuda", "device_name": "GPU", "capability": (8, 0)}
        return Context(**{**vars(plain), **known, **how})  # type: ignore[arg-type]

    assert isinstance(Bf16Autocast().supports(plain), Supported)
    assert isinstance(Bf16Autocast().supports(place()), Supported)
    for capability in ((7, 5), None):
        answer = Bf16Autocast().supports(place(capability=capability))
        assert isinstance(answer, Unsupported) and "8.0" in answer.reason and answer.remedy.text
