"""Kernels whose shapes are known, against the ceilings of the device that the trace names."""

from pathlib import Path
from typing import Any

import pytest
from recorded import GEMM, NETWORK, POINTWISE, REDUCE, TO_HOST, Recorder
from test_trace import healthy, record

from headrace.costs.machine import Machine
from headrace.doctor.findings import Kind
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.trace.facts import kernel_lines, newest
from headrace.doctor.trace.file import Operation
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.trace.roofline import LOADED, Roof, RoofTimes, _moved, machine_of
from headrace.doctor.words import describe

H200 = Machine.assumed("NVIDIA H200")
CARD = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9}]}
BF16 = "c10::BFloat16"
M, N, K = 8192, 2048, 2048
MM = ("aten::mm", [[M, K], [K, N]], [BF16, BF16])
BEST_US = H200.matmul_s("bf16", M, N, K) * LOADED * 1e6
NUMBERS = 64 * 1024 * 1024
ADD = ("aten::add", [[NUMBERS], [NUMBERS], []], [BF16, BF16, "Scalar"])
ADD_US = 3 * 2 * NUMBERS / Roof(H200).bandwidth * 1e6


def trace(path: Path, *kernels: tuple[Any, ...], **more: Any) -> Path:
    """Write six steps of 20 of each (name, microseconds, operation)."""
    made = Recorder()
    for _ in range(6):
        for _ in range(20):
            for name, spent, op in kernels:
                made.run(name, spent, op=op)
        made.end_step()
    return made.write(path, **{**CARD, **more})


def roof_of(path: Path) -> RoofTimes:
    """Return one rank's steps compared with the ceilings."""
    (rank,) = measure_traces([path]).ranks
    assert rank.roof is not None
    return rank.roof


def test_products_at_their_best_are_healthy_and_slow_ones_are_not(tmp_path: Path) -> None:
    best = trace(tmp_path / "best.json", (GEMM, BEST_US * 1.05, MM))
    (only,) = diagnose_trace([best])
    assert only.kind is Kind.TRACE_COMPUTATION and not describe(only).not_measured
    assert only.facts["best_share"] == pytest.approx(1 / 1.05, rel=1e-3)
    assert "datasheet" in only.facts["rates"] and "95%" in describe(only).evidence
    roof, peak = roof_of(best), 2 * M * N * K / Roof(H200).peak("bf16") * 1e6
    assert roof.lost_s == 0
    assert roof.matmuls_best_s / roof.matmuls_s == pytest.approx(1 / 1.05, rel=1e-3)
    of_peak = roof.matmuls_roof_s / roof.matmuls_s
    assert of_peak == pytest.approx(peak / BEST_US / 1.05, rel=1e-3)
    (row,) = measure_traces([best]).ranks[0].kernels
    assert (row.bound, row.of_roof) == ("compute", pytest.approx(of_peak))
    slow = trace(tmp_path / "slow.json", (GEMM, BEST_US * 2, MM))
    (found,) = diagnose_trace([slow])
    assert found.bottleneck == "kernel efficiency" and found.confidence == "inferred"
    assert found.share == pytest.approx(1 - 1 / (2 * 0.9), rel=0.01)
    older = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100"}]}
    other = roof_of(trace(tmp_path / "other.json", (GEMM, BEST_US * 2, MM), **older))
    assert other.matmuls_roof_s > other.matmuls_s  # of another device


def test_bandwidth_is_named_by_bytes_not_by_names(tmp_path: Path) -> None:
    """One kernel of unknown family streams; one of a known family takes too long."""
    mm = (GEMM, BEST_US * 1.05, MM)
    full = trace(tmp_path / "full.json", mm, ("my_kernel", ADD_US * 1.1, ADD))
    (found,) = diagnose_trace([full])
    spent = 1.1 * ADD_US / (1.1 * ADD_US + BEST_US * 1.05)
    assert found.bottleneck == "memory bandwidth"
    assert found.share == pytest.approx(0.15 * spent, rel=0.02)
    (rank,) = measure_traces([full]).ranks
    assert roof_of(full).bandwidth_s / rank.wall_s == pytest.approx(spent, rel=0.02)
    lazy = trace(tmp_path / "lazy.json", mm, (POINTWISE, ADD_US * 2, ADD))
    (rank,) = measure_traces([lazy]).ranks
    shares = {row.family: row.share for row in rank.kernels}
    assert roof_of(lazy).bandwidth_s == 0 and shares["elementwise"] > 0.5 > shares["products"]
    unknown = trace(tmp_path / "unknown.json", mm, (POINTWISE, ADD_US, ADD), deviceProperties=[])
    numbers = measure_traces([unknown])
    assert numbers.ranks[0].roof is None
    assert numbers.share(lambda step: step.memory_s) > 0.4  # by names
    assert machine_of("A brick") is None


DEEP: list[Any] = [1]
for _ in range(900):
    DEEP = [DEEP]
NO_SHAPES = [
    [[-M, K], [K, N]],
    [[0, 0], [0, 0]],
    [[10**200] * 2] * 2,
    [[10**30, K], [K, 10**30]],
    [[float("inf"), K], [K, N]],
    [["a", "b"]] * 2,
    [None, None],
    [{"a": 1}] * 2,
    [[1]],
    [],
    [DEEP],
]


@pytest.mark.parametrize("name", ["aten::mm", "aten::add", "aten::_flash_attention_forward"])
@pytest.mark.parametrize("dims", NO_SHAPES, ids=lambda dims: repr(dims)[:20])
def test_shapes_that_no_tensor_has_tell_nothing(name: str, dims: list[Any], tmp_path: Path) -> None:
    """Real shapes beside them give what they give alone."""
    kernel, odd = (GEMM, BEST_US * 1.05, MM), (name, dims, [BF16] * len(dims))
    path = trace(tmp_path / "t.json", kernel, (GEMM, BEST_US, odd))
    (rank,) = measure_traces([path]).ranks
    (alone,) = measure_traces([trace(tmp_path / "one.json", kernel)]).ranks
    assert rank.roof is not None and alone.roof is not None
    assert rank.roof.matmuls_s == pytest.approx(alone.roof.matmuls_s)
    assert (rank.roof.attention_s, rank.roof.moved_s) == (0, 0)
    (found,) = diagnose_trace([path])
    assert found.bottleneck == "computation"
    assert found.facts["best_share"] == pytest.approx(1 / 1.05, rel=1e-3)


def test_operations_of_many_kinds() -> None:
    roof, none = Roof(H200), []
    lists = [[[10], [20]], [[10], [20]], [[10], [20]], [[10], [20]]]
    moved = [
        (Operation("aten::add_", [[8, 4], [8, 4]], [BF16, BF16], none), 3 * 64),
        (Operation("aten::sum", [[8, 4]], ["float"], none), 128),
        (Operation("aten::copy_", [[8], [8]], ["float", BF16], none), 48),
        (Operation("aten::_fused_adamw_", lists, ["TensorList"] * 4, none), 4 * 120 * 7 / 4),
        (Operation("triton_poi_fused_0", [[8], [8], []], [BF16, "float", "Scalar"], none), 48),
        (Operation("aten::empty", [[], []], ["ScalarList", ""], none), 0),
    ]
    assert [_moved(op) for op, _ in moved] == [bytes for _, bytes in moved]
    heads_first, dims = [""] * 10 + ["True"], [[2, 12, 2048, 64]] * 3
    flops, at_peak_s, best_s = roof._attention(
        Operation("aten::_cudnn_attention_forward", dims, [BF16] * 3, heads_first)
    )
    assert flops == 4 * 2 * 12 * 2048 * 2048 * 64 / 2 and 0 < at_peak_s < best_s
    back = [[2, 2048, 12, 64]] * 4
    flops_back, _, back_s = roof._attention(
        Operation("aten::_flash_attention_backward", back, [BF16] * 4, [""] * 11 + ["True"])
    )
    assert flops_back == 2.5 * flops and back_s > best_s
    bmm = Operation("aten::bmm", [[12, 64, 64], [12, 64, 64]], [BF16, BF16], none)
    assert roof._matmul((), bmm)[0] == 2 * 12 * 64**3


def test_the_newest_window_of_a_folder(tmp_path: Path) -> None:
    """It has brief kernels, what was exposed and the table of kernels, if the file is whole."""
    assert newest(tmp_path) == [] and kernel_lines(tmp_path) == []
    folder = tmp_path / "traces"
    folder.mkdir()
    record(folder / "step-10.rank-0.json.gz", healthy)
    made = Recorder(0)
    for _ in range(6):
        made.run(GEMM, 8000)
        made.run(REDUCE, 1000, NETWORK, after=(7,))
        for _ in range(100):
            made.run(POINTWISE, 5, after=(NETWORK,))
        made.run(TO_HOST, 2, launch="cudaMemcpyAsync")
        made.wait(op="aten::item")
        made.end_step()
    made.write(folder / "step-20.rank-0.json.gz")
    numbers = measure_traces(newest(tmp_path))
    (rank,) = numbers.ranks
    assert rank.path == "step-20.rank-0.json.gz" and numbers.between_ranks.matched == 0
    assert len(rank.steps) == 5 and numbers.step_s() == pytest.approx(9.5e-3, rel=0.02)
    assert rank.launches == 102 and rank.brief_share == pytest.approx(100 / 102)
    assert numbers.share(lambda step: step.exposed_s) == pytest.approx(1 / 9.5, rel=0.03)
    assert numbers.idle("sync") < 0.01
    first = kernel_lines(tmp_path)[0]
    assert first[0] == GEMM and first[1] == "products" and first[2].startswith("8")
    (folder / "step-30.rank-0.json.gz").write_bytes(b"\x1f\x8bnothing")
    assert kernel_lines(tmp_path) == []  # the doctor tells that it is damaged
