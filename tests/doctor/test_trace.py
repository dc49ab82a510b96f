"""The doctor names faults of known size in traces of a known making."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import (
    COMPUTE,
    GEMM,
    NETWORK,
    POINTWISE,
    REDUCE,
    SIDE,
    TO_DEVICE,
    TO_HOST,
    Recorder,
)

from headrace.core.errors import ConfigError
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.trace.kernels import family_of
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.words import describe

STEPS, KERNELS, KERNEL_US = 6, 20, 1000.0
WORK_US = KERNELS * KERNEL_US
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
Fault = Callable[[Recorder, float], None]


def work(made: Recorder, count: int = KERNELS, name: str = GEMM) -> None:
    for _ in range(count):
        made.run(name, KERNEL_US)


def more(share: float) -> float:
    """Return what makes `share` of a step, added to its work."""
    return WORK_US * share / (1 - share)


def slow_loader(made: Recorder, share: float) -> None:
    made.away(WORK_US + more(share) - KERNELS * 5, LOADER)
    work(made)


def slow_loader_that_nobody_marked(made: Recorder, share: float) -> None:
    made.away(WORK_US + more(share) - KERNELS * 5 - 5)
    made.run(TO_DEVICE, 20, launch="cudaMemcpyAsync")
    work(made)


def unpinned_batches(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    made.run(TO_DEVICE, more(share), launch="cudaMemcpyAsync")
    made.wait()
    work(made)


def item_in_every_layer(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    for _ in range(4):
        work(made, KERNELS // 4)
        made.run(TO_HOST, 1, launch="cudaMemcpyAsync")
        made.wait(op="aten::item")
        made.away(more(share) / 4 - 9)


def tiny_kernels(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    for _ in range(400):
        made.run(POINTWISE, 6, cost=6 / (1 - share))


def exposed_collective(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    work(made, KERNELS - 1)
    made.run(REDUCE, more(share), NETWORK, after=(COMPUTE,))
    made.run("multi_tensor_apply_kernel", KERNEL_US, after=(NETWORK,))


def offload(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    work(made)
    made.run(TO_HOST, more(share) / 2, SIDE, after=(COMPUTE,), launch="cudaMemcpyAsync")
    made.run(TO_DEVICE, more(share) / 2, after=(SIDE,), launch="cudaMemcpyAsync")


def full_memory(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    work(made)
    made.wait("cudaFree")
    begun = made.now
    made.now += more(share)
    made.host("cuda_runtime", "cudaMalloc", begun)


def slow_products(made: Recorder, share: float) -> None:
    made.away(10, LOADER)
    work(made)
    made.run("ampere_sgemm_128x64_tn", more(share))


FAULTS: dict[Fault, str] = {
    slow_loader: "input",
    slow_loader_that_nobody_marked: "input",
    unpinned_batches: "input",
    item_in_every_layer: "launch",
    tiny_kernels: "launch",
    exposed_collective: "interconnect",
    offload: "interconnect",
    full_memory: "memory capacity",
    slow_products: "kernel efficiency",
}


def healthy(made: Recorder, share: float = 0.0) -> None:
    """The host runs ahead, a collective hides behind the backward pass, small kernels are few."""
    made.away(200, LOADER)
    made.run(TO_DEVICE, 30, SIDE, launch="cudaMemcpyAsync")
    work(made, 10)
    made.run(REDUCE, 5 * KERNEL_US, NETWORK, after=(COMPUTE,))
    work(made, 9)
    for _ in range(50):
        made.run(POINTWISE, 8)
    made.run("multi_tensor_apply_kernel", KERNEL_US, after=(NETWORK,))


def healthy_under_a_graph(made: Recorder, share: float = 0.0) -> None:
    """One launch, and a step that ends in .item()."""
    made.away(50, LOADER)
    made.run(GEMM, 100, launch="cudaGraphLaunch", count=200, gap=1)
    made.run(TO_HOST, 1, launch="cudaMemcpyAsync")
    made.wait(op="aten::item")


def record(path: Path, step: Fault, share: float = 0.0, steps: int = STEPS) -> Path:
    made = Recorder()
    for _ in range(steps):
        step(made, share)
        made.end_step()
    made.wait("cudaDeviceSynchronize")
    return made.write(path)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_and_sized(fault: Fault, share: float, tmp_path: Path) -> None:
    first, *others = diagnose_trace([record(tmp_path / "t.json.gz", fault, share)])
    assert first.bottleneck == FAULTS[fault] and not others, [first, *others]
    known = share * 0.75 if fault is slow_products else share
    assert first.share == pytest.approx(known, rel=0.1)
    assert all((describe(first).sentence, describe(first).evidence))
    assert first.confidence in ("measured", "inferred")


@pytest.mark.parametrize("step", [healthy, healthy_under_a_graph], ids=lambda s: s.__name__)
def test_a_healthy_run_raises_no_alarm(step: Fault, tmp_path: Path) -> None:
    (only,) = diagnose_trace([record(tmp_path / "t.json", step)])
    assert only.bottleneck == "computation" and only.share > 0.95


def test_a_step_is_measured_on_the_device_not_by_the_hosts_marks(tmp_path: Path) -> None:
    """The host is done long before the device, and all of a step's time finds its place."""
    (rank,) = measure_traces([record(tmp_path / "t.json", healthy)]).ranks
    assert len(rank.steps) == STEPS - 1
    for step in rank.steps:
        assert step.wall_s == pytest.approx((WORK_US + 400) * 1e-6, rel=0.01)
        assert step.busy_s + sum(step.idle_s.values()) == pytest.approx(step.wall_s)
        assert step.collective_s == pytest.approx(5e-3)
        assert step.exposed_s == pytest.approx(0, abs=1e-6) and step.blocking_s < 1e-5


def test_exposed_is_not_blocking_where_the_host_is_late(tmp_path: Path) -> None:
    """No faster link would help: the next kernel was not launched when the collective ended."""

    def late(made: Recorder, share: float) -> None:
        work(made)
        made.run(REDUCE, 4000, NETWORK, after=(COMPUTE,))
        made.away(WORK_US + 6000)

    path = record(tmp_path / "t.json", late)
    step = measure_traces([path]).ranks[0].steps[1]
    assert step.exposed_s == pytest.approx(4e-3, rel=0.01) and step.blocking_s == 0
    assert step.idle_s["launch"] == pytest.approx(2e-3, rel=0.1)
    assert step.after_s["launch"] == pytest.approx(4e-3, rel=0.01)
    (only,) = diagnose_trace([path])
    assert only.bottleneck == "launch"


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("cause", ["kernels", "idle (input)"])
def test_a_slow_rank_is_told_from_a_slow_link(cause: str, share: float, tmp_path: Path) -> None:
    """The rank that waits shows it, and the late rank's own trace shows why it is late."""
    paths, late_us, transfer_us = [], more(share), 300.0
    for rank in range(2):
        made = Recorder(rank, 2)
        for _ in range(STEPS):
            loads = rank and cause != "kernels"
            made.away(WORK_US + late_us + transfer_us - 50 if loads else 10, LOADER)
            work(made)
            if rank and not loads:
                made.run(GEMM, late_us)
            made.run(REDUCE, transfer_us + (0 if rank else late_us), NETWORK, after=(COMPUTE,))
            made.run(POINTWISE, 50, after=(NETWORK,))
            made.end_step()
        paths.append(made.write(tmp_path / f"{rank}.json"))
    first, *others = diagnose_trace(paths)
    assert first.bottleneck == "straggler" and first.share == pytest.approx(share, rel=0.1)
    assert first.facts["rank"] == 1 and first.facts["slower_in"][0] == cause
    assert all(f.bottleneck == "input" and f.share < first.share for f in others)
    (alone,) = diagnose_trace(paths[:1])
    assert alone.bottleneck == "interconnect" and alone.confidence == "inferred"
    twin = Path(shutil.copy(paths[0], tmp_path / "twin.json"))
    with pytest.raises(ConfigError, match=r"^2 of the 2 ") as caught:
        diagnose_trace([paths[0], twin])
    assert all(part in caught.value.message for part in ("rank 0", paths[0].name, twin.name))
    kept = [f"headrace doctor {path}" for path in (paths[0], twin)]
    assert caught.value.remedy.text in kept, "one of each rank"


def test_steps_without_marks_are_told_by_the_optimizer(tmp_path: Path) -> None:
    made = Recorder()
    for _ in range(STEPS):
        slow_loader(made, 0.2)
        made.away(10, "Optimizer.step#AdamW.step")
    (first,) = diagnose_trace([made.write(tmp_path / "t.json")])
    assert first.bottleneck == "input" and first.share == pytest.approx(0.2, rel=0.1)


def test_the_table_and_families(tmp_path: Path) -> None:
    (rank,) = measure_traces([record(tmp_path / "t.json", healthy)]).ranks
    first = rank.kernels[0]
    assert (first.name, first.family, first.calls) == (GEMM, "products", 19 * (STEPS - 1))
    assert sum(row.share for row in rank.kernels) == pytest.approx(1)
    assert rank.brief_share == pytest.approx(50 / 71)
    names = {
        REDUCE: "collectives",
        POINTWISE: "elementwise",
        TO_HOST: "copies",
        "flash_fwd_kernel<cutlass::bfloat16_t>": "attention",
        "multi_tensor_apply": "optimizer",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>": "attention",
        "triton_tem_fused_mm_3": "products",
        "triton_red_fused_add_mean_1": "elementwise",
        "void cutlass::device_kernel<gemm>": "products",
        "my_kernel": "other",
    }
    assert {name: family_of(name) for name in names} == names
