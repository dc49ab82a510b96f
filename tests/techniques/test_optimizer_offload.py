"""Compare the host's AdamW with torch's, on plain and on sharded parameters, and on a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.costs.ledger import DERIVED
from headrace.optim.adamw import make_adamw
from headrace.plan.plan import OptimizerConfig
from headrace.techniques.memory.optimizer_offload import (
    HOSTED,
    LAUNCHED,
    HostAdamW,
    HostState,
    OptimizerOffload,
)
from headrace.train.train import step

CONFIG = OptimizerConfig(lr=0.03, weight_decay=0.2, eps=1e-6)
SHAPES = {"a": (7, 9), "b": (5,), "c": (13, 3), "d": (1,), "e": (31,)}
CHUNKS = (1, 5, 64, 10_000)


def parameters(device: str = "cpu") -> dict[str, nn.Parameter]:
    seed = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=seed).to(device)) for n, s in SHAPES.items()}


def give_gradients(named: dict[str, nn.Parameter], index: int) -> None:
    for place, p in enumerate(named.values()):
        seed = torch.Generator().manual_seed(10 * index + place)
        p.grad = torch.randn(p.shape, generator=seed).to(p)


def scheduled(optimizer: Any, index: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = CONFIG.lr / (1 + index)


def compare(device: str, chunk: int) -> None:
    named, right = parameters(device), parameters(device)
    mine, torchs = HostAdamW(CONFIG, named, chunk), make_adamw(CONFIG, right)
    for index in range(5):
        give_gradients(named, index)
        give_gradients(right, index)
        if index == 1:  # a parameter that has no gradient in one step
            named["b"].grad = right["b"].grad = None
        if index == 3:  # somebody else writes a weight
            for some in (named, right):
                with torch.no_grad():
                    some["c"].mul_(0.5)
        scheduled(mine, index)
        scheduled(torchs, index)
        mine.step()
        torchs.step()
        for name, p in right.items():
            torch.testing.assert_close(named[name], p, rtol=2e-6, atol=2e-7)
            for key, value in torchs.state[p].items():
                own = mine.state[named[name]][key]
                assert own.device.type == "cpu"
                torch.testing.assert_close(own, value.cpu(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_five_updates_equal_torchs_adamw(chunk: int) -> None:
    compare("cpu", chunk)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_five_updates_equal_torchs_adamw_on_a_gpu(chunk: int) -> None:
    compare("cuda", chunk)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_updates_that_overlap_equal_torchs_adamw() -> None:
    """Many buffers are in flight; matmuls write each gradient late and read each weight soon."""
    ends = []
    for host in (False, True):
        seed = torch.Generator("cuda").manual_seed(0)
        shape = (2048, 2048)
        named = {
            str(n): nn.Parameter(torch.randn(shape, generator=seed, device="cuda"))
            for n in range(12)
        }
        optimizer = HostAdamW(CONFIG, named, 1 << 20) if host else make_adamw(CONFIG, named)
        seen = torch.zeros((), device="cuda", dtype=torch.float64)
        for _ in range(4):
            for p in named.values():
                left, right = torch.randn(2, *shape, generator=seed, device="cuda")
                p.grad = left @ right
            optimizer.step()
            seen += torch.stack([p.detach().double().abs().sum() for p in named.values()]).sum()
            for p in named.values():
                p.grad = None
        ends.append([*(p.detach() for p in named.values()), seen.float()])
    for one, two in zip(*ends, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-6, atol=1e-6)


def test_a_masked_step_changes_nothing() -> None:
    named = parameters()
    optimizer = HostAdamW(CONFIG, named, 16)
    give_gradients(named, 0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    weights = [p.detach().clone() for p in named.values()]
    states = [t.clone() for p in named.values() for t in optimizer.state[p].values()]
    for p in named.values():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    now = [t for p in named.values() for t in optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(weights, named.values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states, now, strict=True))


def test_a_state_that_is_filled_in_goes_on() -> None:
    """As a resume does: states are put into the dictionary key by key, weights in place."""
    whole, again = parameters(), parameters()
    first, second = HostAdamW(CONFIG, whole, 10), HostAdamW(CONFIG, again, 10)
    for index in range(4):
        give_gradients(whole, index)
        first.step()
        if index == 1:
            with torch.no_grad():
                for name, p in again.items():
                    p.copy_(whole[name])
                    for key, value in first.state[whole[name]].items():
                        second.state[p][key] = value.clone()
            assert isinstance(second.state[again["a"]], HostState)
    for index in (2, 3):
        give_gradients(again, index)
        second.step()
    for name, p in whole.items():
        assert torch.equal(again[name], p)
        assert second.state[again[name]]["step"] == 4


def sharded() -> None:
    """Two ranks: FSDP2's sharded parameters move as those of one process do."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 3))
    alone = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    fully_shard(model)
    named = dict(model.named_parameters())
    mine, right = HostAdamW(CONFIG, named, 8), make_adamw(CONFIG, alone)
    for index in range(3):
        give_gradients(alone, index)
        for name, p in named.items():
            assert isinstance(p, DTensor)
            whole = alone[name].grad
            assert whole is not None
            p.grad = torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements)
        mine.step()
        right.step()
    for name, p in named.items():
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), alone[name], rtol=2e-6, atol=2e-7)
        state = mine.state[p]["exp_avg"]
        assert isinstance(state, DTensor) and state.to_local().shape == p.to_local().shape
        torch.testing.assert_close(
            state.full_tensor(), right.state[alone[name]]["exp_avg"], rtol=2e-6, atol=2e-7
        )
    dist.destroy_process_group()


def test_sharded_parameters(zygote: Any, tmp_path: Path) -> None:
    zygote.call(2, tmp_path, Path(__file__), "sharded")


def test_on_a_cpu_there_is_nothing_to_move(make_tiny: Callable[..., Any]) -> None:
    answer = OptimizerOffload().supports(SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    assert "already" in answer.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("beside", ["lora.rank=2", "muon={}"])
def test_states_of_others_are_predicted_to_stay(
    make_tiny: Callable[..., Any], batch: Callable[[Any], list[Any]], beside: str
) -> None:
    build = make_tiny(f"techniques.{beside}")
    step(build, batch(build), 0)
    others = [s for n, o in build.optimizers.items() if n != "adamw" for s in o.state.values()]
    held = sum(t.nbytes for state in others for name, t in state.items() if name != "step")
    ledger = OptimizerOffload().predict(build.predicted(build.plan))
    assert ledger.memory["optimizer"].bytes == held


def test_the_host_s_update_is_foreseen_and_others_stay_on_the_device(
    tiny_plan: Callable[..., Any],
) -> None:
    def foreseen(*words: str) -> Any:
        plan = tiny_plan(*words)
        return make_ledger(plan, make_context(plan, torch.device("cpu")))

    offload, muon = "techniques.optimizer_offload={}", "techniques.muon={}"
    plain, ledger = foreseen(), foreseen(offload)
    numbers = plain.memory["gradients"].bytes / 4
    assert plain.work["update/optimizer"].bytes == 28 * numbers
    assert "update/optimizer" not in ledger.work
    piece = ledger.work["update/host"]
    assert piece.bytes == (HOSTED + 8) * numbers  # all of it is less than one buffer
    assert piece.launch == LAUNCHED * numbers and ledger.sizes[DERIVED]
    small = foreseen("techniques.optimizer_offload.chunk_mib=1").work["update/host"]
    assert small.bytes == HOSTED * numbers + 2 * min(2**20, 4 * numbers)
    both = foreseen(offload, muon)
    taken = sum(matrix.numbers for matrix in both.updates("muon").values())
    assert both.work["update/host"].bytes == pytest.approx((HOSTED + 8) * (numbers - taken))
    assert 0 < taken < numbers and "update/optimizer" not in both.work
