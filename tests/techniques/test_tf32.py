"""TF32: a flag that is set and restored, and products that show it on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from facts import in_order

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.attention.linear_attention import LinearAttention
from headrace.techniques.design.mixture_of_experts import MixtureOfExperts
from headrace.techniques.precision.tf32 import SIZE, Tf32, probe, tf32_matmuls
from headrace.train.train import step

Make = Callable[..., Build]
ON = "techniques.tf32={}"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    """Whatever a test does to the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_flag_is_set_and_restored() -> None:
    for before in ("highest", "medium"):
        torch.set_float32_matmul_precision(before)
        with pytest.raises(KeyError), tf32_matmuls():
            assert torch.get_float32_matmul_precision() == "high"
            raise KeyError
        assert torch.get_float32_matmul_precision() == before


def test_products_of_whole_fp32_are_no_evidence(make_tiny: Make) -> None:
    """On a CPU the probe's operands keep their last bits, whatever `apply` has done."""
    build = make_tiny()
    Tf32().apply(build)
    assert len(build.runtime) == 1
    with ExitStack() as flags:
        flags.enter_context(build.runtime[0]())
        found = Tf32().active(build)
    assert not found.active and found.numbers["units_off"] == 0.25
    rounded = torch.ones(SIZE, SIZE) @ torch.ones(SIZE, SIZE)  # what TF32 makes of the probe
    assert (rounded == SIZE).all() and not (probe(build.device) == SIZE).any()


def test_half_precision_is_no_evidence(make_tiny: Make) -> None:
    """bf16 would round the probe's operand to one, too: the probe is made beside autocast."""
    build = make_tiny("model.precision=bf16")
    with build.autocast():
        assert not Tf32().active(build).active


def test_says_where_it_runs(make_tiny: Make) -> None:
    plain = make_tiny().context

    def place(**how: object) -> Context:
        known = {"device": "cuda", "device_name": "GPU", "capability": (8, 0), "precision": "fp32"}
        return Context(**{**vars(plain), **known, **how})  # type: ignore[arg-type]

    assert isinstance(Tf32().supports(place()), Supported)
    for left in (MixtureOfExperts(), LinearAttention(rule="gated_delta")):
        half = plain.plan.replaced(techniques={left.name(): left})
        assert isinstance(Tf32().supports(place(precision="bf16", plan=half)), Supported)
    for context, why in (
        (plain, "cpu has no TF32"),
        (place(device="mps", capability=None), "mps has no TF32"),
        (place(capability=(7, 5)), "7.5"),
        (place(precision="bf16"), "multiplies in bf16 alone"),
    ):
        answer = Tf32().supports(context)
        assert isinstance(answer, Unsupported) and why in answer.reason and answer.remedy.text
    with pytest.raises(UnsupportedError, match=in_order("tf32", "cpu has no TF32")) as told:
        make_tiny(ON)
    assert ("-tf32",) in told.value.remedy.changes


@pytest.mark.gpu
@on_a_gpu
def test_a_gpus_products_are_rounded(make_tiny: Make) -> None:
    sizes = ["model.dim=128", "model.heads=4", "model.ffn=256"]
    gpu = ["device=cuda", "model.precision=fp32", *sizes]
    torch.set_float32_matmul_precision("highest")
    plain, build = make_tiny(*gpu), make_tiny(ON, *gpu)
    assert not Tf32().active(plain).active and not Tf32().active(build).active
    step(plain, plain.loader.step(0).micros, 0)
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        step(build, build.loader.step(0).micros, 0)
        assert check_active(build)["tf32"].numbers["units_off"] == 0
    assert torch.get_float32_matmul_precision() == "highest"
    right = dict(plain.model.named_parameters())
    off = {
        name: float((p.grad - right[name].grad).norm() / right[name].grad.norm())  # type: ignore
        for name, p in build.model.named_parameters()
    }
    assert max(off.values()) <= Tf32.band
    assert max(off.values()) > 1e-5, "nothing was rounded"


@pytest.mark.gpu
@on_a_gpu
def test_the_products_that_autocast_leaves_are_rounded(make_tiny: Make) -> None:
    """A router's scores are fp32 in a run of bf16: they are rounded."""
    keys = [
        "device=cuda",
        "model.precision=bf16",
        "model.dim=128",
        "model.heads=4",
        "techniques.mixture_of_experts.experts=4",
        "techniques.mixture_of_experts.expert_ffn=64",
    ]
    torch.set_float32_matmul_precision("highest")
    plain, build = make_tiny(*keys), make_tiny(ON, *keys)
    micros = build.loader.step(0).micros
    step(plain, micros, 0)
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        step(build, micros, 0)
        assert check_active(build)["tf32"].active
    assert not Tf32().active(plain).active
    name = next(n for n, _ in plain.model.named_parameters() if n.endswith("router.weight"))
    right, found = (dict(b.model.named_parameters())[name].grad for b in (plain, build))
    assert right is not None and found is not None
    assert 1e-6 < float((found - right).norm() / right.norm()) < 0.1
