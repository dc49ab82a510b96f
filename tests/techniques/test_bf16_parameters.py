"""bf16 weights against torch's AdamW on fp32 copies, and what survives in them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.data.loader import Micro
from headrace.kernels.adamw import KERNEL, Noise
from headrace.kernels.bf16_weight import joined, keys_of, places
from headrace.kernels.launches import COUNTS
from headrace.optim.bf16_adamw import Bf16AdamW
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.precision.bf16_parameters import Bf16Parameters
from headrace.train.checkpoint import Saved
from headrace.train.evaluate import evaluate
from headrace.train.train import step

Make = Callable[..., Build]
ON = "techniques.bf16_parameters.rounding={}"
ONE = "batch.micro_sequences=0"
ROUNDINGS = ["master", "stochastic"]
FUNCTIONS = Path(__file__).with_name("bf16_parameters_ranks.py")


def optimizer_of(build: Build, p: nn.Parameter, rounding: str, *, fused: bool = False) -> Bf16AdamW:
    """Return the optimizer over one matrix."""
    shape = tuple(p.shape)

    def noise(name: str) -> Noise:
        return Noise(keys_of(0, name, p.device), *places((0,) * p.ndim, shape, shape, p.device))

    return Bf16AdamW(build.plan.optimizer, {"w": p}, rounding=rounding, noise=noise, fused=fused)


def start(rounding: str, build: Build) -> tuple[nn.Parameter, Bf16AdamW, torch.Generator]:
    draw = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(60, 70, generator=draw).bfloat16())
    return p, optimizer_of(build, p, rounding), draw


def test_a_master_is_torchs_adamw_to_the_bit(make_tiny: Make) -> None:
    build = make_tiny("optimizer.weight_decay=0.1", "optimizer.lr=1e-4")
    p, optimizer, draw = start("master", build)
    config = build.plan.optimizer
    right = nn.Parameter(p.detach().float())
    reference = torch.optim.AdamW(
        [right],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for _ in range(30):
        p.grad = torch.randn(p.shape, generator=draw).bfloat16()
        right.grad = p.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state[p]
    assert joined(p.detach(), state["rest"]).equal(right.detach())
    assert state["exp_avg"].equal(reference.state[right]["exp_avg"])
    assert ((p.float() - right).abs() <= right.abs() * 2.0**-8).all()


def test_chance_follows_updates_that_bf16_would_lose(make_tiny: Make) -> None:
    """Updates of 2^-10 of a weight: rounded to the nearest none would move it."""
    build = make_tiny("optimizer.weight_decay=0", f"optimizer.lr={2.0**-10}")
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = optimizer_of(build, p, "stochastic")
    for _ in range(32):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    wanted = 1 + 32 * 2.0**-10
    spread = 2.0**-7 * (32 * 0.125 * 0.875 / p.numel()) ** 0.5
    assert abs(float(p.detach().double().mean()) - wanted) < 5 * spread
    assert (1 + torch.tensor(2.0**-10)).bfloat16() == 1


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_masked_step_changes_nothing(make_tiny: Make, rounding: str) -> None:
    p, optimizer, draw = start(rounding, make_tiny())
    for bad in (0.0, 1.0):
        p.grad = torch.randn(p.shape, generator=draw).bfloat16()
        if bad:
            p.grad[3, 4] = torch.inf
        before = [p.detach().clone(), *(t.clone() for t in optimizer.state[p].values())]
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        if bad:
            after = [p.detach(), *optimizer.state[p].values()]
            assert len(before) == len(after)
            assert all(x.equal(y) for x, y in zip(before, after, strict=True))
            assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_one_kernel_is_the_same_as_slices(make_tiny: Make, rounding: str) -> None:
    """Compare clipping, moments, a masked step in between, the rest and the noise, on odd sizes."""
    ends = []
    for fused in (False, True):
        p, _, draw = start(rounding, build := make_tiny("optimizer.weight_decay=0.1"))
        optimizer = optimizer_of(build, p, rounding, fused=fused)
        before = COUNTS[KERNEL]
        for index in range(4):
            p.grad = torch.randn(p.shape, generator=draw).bfloat16()
            optimizer.gradient_factor = torch.tensor(0.25) if index else None
            optimizer.found_inf = torch.tensor(float(index == 2))
            optimizer.step()
        assert COUNTS[KERNEL] - before == 4 * fused
        state = optimizer.state[p]
        assert state["step"] == 3
        ends.append([joined(p.detach(), state.get("rest")), state["exp_avg"], state["exp_avg_sq"]])
    for slices, kernel in zip(*ends, strict=True):
        torch.testing.assert_close(kernel, slices, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_halves_weights_and_gradients_that_are_computed_once(
    make_tiny: Make, batch: Callable[[Build], list[Micro]], rounding: str
) -> None:
    build = make_tiny(ON.format(rounding), ONE)
    plain = make_tiny()
    names = dict(plain.model.named_parameters())
    step(build, batch(build), 0)
    for name, p in build.model.named_parameters():
        low = p.ndim >= 2 and name != "embed.weight"  # a host adds up a table's in its own dtype
        wanted = torch.bfloat16 if low else torch.float32
        assert p.dtype == p.grad.dtype == wanted and p.shape == names[name].shape  # type: ignore
    found = check_active(build)["bf16_parameters"]
    assert found.numbers["bytes_per_weight"] == 2
    assert found.numbers["state_bytes"] == pytest.approx(10 if rounding == "master" else 8, abs=0.1)
    rest = build.routed["adamw"]
    assert all(p.ndim < 2 for name, p in rest.items() if name != "embed.weight")


def test_a_frequent_tokens_gradient_is_whole(make_tiny: Make) -> None:
    """In bf16 its 256th occurrence would add nothing to the 255 before."""
    norms = []
    for keys in ([ON.format("master"), ONE], ["model.precision=bf16", ONE]):
        build = make_tiny("data.sequence_length=512", "batch.tokens=4096", *keys)
        same = torch.full((8, 512), 7)
        step(build, [Micro(same, same)], 0)
        norms.append(float(build.model.get_parameter("embed.weight").grad[7].float().norm()))  # type: ignore[index]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_another_rounding_is_refused_on_resume(train: Callable[..., Path], rounding: str) -> None:
    keys = ("checkpoint.every_steps=2", "checkpoint.keep_last=9")
    train(ON.format(rounding), *keys)
    other = next(r for r in ROUNDINGS if r != rounding)
    with pytest.raises(ConfigError, match=f"rounding={rounding}"):
        train(ON.format(other), *keys, resume=True, checkpoint="step-2")


def test_gradients_that_are_added_up_are_fp32(
    make_tiny: Make, batch: Callable[[Build], list[Micro]]
) -> None:
    """Many micro-batches give what one gives, as near as bf16 products of parts allow."""
    found = []
    for rows in (1, 0):
        build = make_tiny(ON.format("master"), f"batch.micro_sequences={rows}")
        step(build, batch(build), 0)
        found.append(dict(build.model.named_parameters()))
    for name, p in found[0].items():
        once = found[1][name].grad.float()  # type: ignore[union-attr]
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert (p.grad - once).norm() / once.norm() < 0.01, name


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_slices_learn_as_one_process_to_the_bit(
    zygote: Any, tmp_path: Path, data: dict[str, str], rounding: str
) -> None:
    zygote.call(4, tmp_path, FUNCTIONS, "updates", ranks=4, rounding=rounding, **data)


def test_bytes_of_slices_are_predicted(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    zygote.call(4, tmp_path, FUNCTIONS, "held", ranks=4, **data)


def test_a_router_stays_fp32(make_tiny: Make) -> None:
    build = make_tiny(ON.format("master"), "techniques.mixture_of_experts.experts=4")
    kinds = {n: p.dtype for n, p in build.model.named_parameters() if p.ndim >= 2}
    routers = {n for n, kind in kinds.items() if kind == torch.float32}
    routers -= {"embed.weight"}
    assert routers and all(n.endswith("router.weight") for n in routers)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_checkpoint_holds_16_bits_and_resumes_exactly(
    train: Callable[..., Path], rounding: str
) -> None:
    keys = (ON.format(rounding), "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    folder = train(*keys)
    ends = []
    for _ in range(2):
        saved = Saved(folder / "checkpoints" / "latest")
        kinds = {n: saved.shape_of(n)[1] for n in saved.names()}
        assert kinds["model/head.weight"] == torch.bfloat16
        assert kinds["optimizer/head.weight/exp_avg"] == torch.float32
        assert kinds.get("optimizer/head.weight/rest") == (
            torch.int16 if rounding == "master" else None
        )
        shape, kind = saved.shape_of("model/head.weight")
        ends.append(weight := torch.empty(shape, dtype=kind))
        saved.fill_("model/head.weight", weight)
        folder = train(*keys, resume=True, checkpoint="step-2")
    assert ends[0].equal(ends[1])


def test_the_loss_falls_as_with_fp32_weights(make_tiny: Make) -> None:
    ends = {}
    for name, keys in {
        "fp32": ["model.precision=bf16"],
        "master": [ON.format("master")],
        "stochastic": [ON.format("stochastic")],
    }.items():
        build = make_tiny("optimizer.lr=3e-3", *keys)
        micros = build.loader.step(0).micros
        losses = [float(step(build, micros, n)[0]) for n in range(1, 31)]
        ends[name] = losses[-1]
        assert math.isfinite(losses[-1]) and losses[-1] < losses[0] - 0.3
    assert ends["master"] == pytest.approx(ends["fp32"], rel=0.02)
    assert ends["stochastic"] == pytest.approx(ends["fp32"], rel=0.02)


def test_says_where_it_runs(make_tiny: Make) -> None:
    plain = make_tiny().context

    def place(**how: object) -> Context:
        known = {"device": "cuda", "device_name": "GPU", "capability": (9, 0)}
        return Context(**{**vars(plain), **known, **how})  # type: ignore[arg-type]

    assert isinstance(Bf16Parameters().supports(place()), Supported)
    answer = Bf16Parameters().supports(place(capability=(7, 5)))
    assert isinstance(answer, Unsupported) and "bf16" in answer.reason and answer.remedy.text
    for other in ("muon", "adamw_8bit", "sophia"):
        with pytest.raises(UnsupportedError, match=f"{other} adds its updates"):
            make_tiny(ON.format("master"), f"techniques.{other}={{}}")
    with pytest.raises(ConfigError, match="bf16_parameters makes it 'bf16'"):
        make_tiny(ON.format("master"), "model.precision=fp32")


@pytest.mark.parametrize("scope", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_compiled_code_is_traced_again_beside_gradients_that_were_added_up(
    make_tiny: Make, batch: Callable[[Build], list[Micro]], scope: str
) -> None:
    """Other lengths in a later micro-batch, and an evaluation, with fp32 sums in `grad`."""
    build = make_tiny(
        ON.format("master"),
        "batch.micro_sequences=4",
        "techniques.torch_compile.fullgraph=true",
        "techniques.torch_compile.backend=aot_eager",
        f"techniques.torch_compile.scope={scope}",
    )
    plain = make_tiny(ON.format("master"), "batch.micro_sequences=4")
    whole, *_ = batch(build)
    half = replace(
        whole, **{n: v[:, :16].contiguous() for n, v in vars(whole).items() if torch.is_tensor(v)}
    )
    for one in (build, plain):
        step(one, [whole, half], 0)
        assert {p.grad.dtype for p in one.model.parameters() if p.grad is not None} == {
            torch.float32
        }
        assert math.isfinite(evaluate(one).loss_nats)
    for ours, theirs in zip(build.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "beside",
    [
        "",
        "lora={rank = 2}",
        "qlora={rank = 2, base = 'int8'}",
        "mixture_of_experts={experts = 4}",
        "linear_attention={rule = 'gated_delta'}",
        "short_convolution={between = 1}",
    ],
)
def test_its_bytes_are_predicted_beside_adapters(
    make_tiny: Make, states: Callable[[Build], tuple[Any, Any]], beside: str, rounding: str
) -> None:
    """Frozen matrices are kept in bf16 too, and only adapters have gradients and states."""
    build = make_tiny(ON.format(rounding), ONE, *([f"techniques.{beside}"] if beside else []))
    held, predicted = states(build)
    assert predicted == held


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_block_that_is_left_out_has_no_state_yet(
    make_tiny: Make, batch: Callable[[Build], list[Micro]], rounding: str
) -> None:
    build = make_tiny(ON.format(rounding), "techniques.stochastic_depth.rate=0.999")
    step(build, batch(build), 0)
    assert build.notes["stochastic_depth"]["left_out"] > 0 == build.notes["stochastic_depth"]["run"]
    assert check_active(build)["bf16_parameters"].active
