"""Kernels whose shapes are known, against the ceilings of the device that the trace names."""

from pathlib import Path
from typing import Any

import pytest
from recorded import GEMM, NETWORK, POINTWISE, REDUCE, TO_HOST, Recorder
from test_trace import healthy, record

from headrace.core.machine import Machine
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.trace.facts import facts_of, kernel_lines, trace_facts
from headrace.doctor.trace.file import Operation
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.trace.roofline import LOADED, Roof, _moved, machine_of

H200 = Machine.assumed("NVIDIA H200")
CARD = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9}]}
BF16 = "c10::BFloat16"
M, N, K = 8192, 2048, 2048
MM = ("aten::mm", [[M, K], [K, N]], [BF16, BF16])
BEST_US = H200.product_s("bf16", M, N, K) * LOADED * 1e6
NUMBERS = 64 * 1024 * 1024
ADD = ("aten::add", [[NUMBERS], [NUMBERS], []], [BF16, BF16, "Scalar"])
ADD_US = 3 * 2 * NUMBERS / Roof(H200).bandwidth * 1e6


def trace(path: Path, *kernels: tuple[Any, ...], **more: Any) -> Path:
    """Six steps of 20 of each (name, microseconds, operation)."""
    made = Recorder()
    for _ in range(6):
        for _ in range(20):
            for name, spent, op in kernels:
                made.run(name, spent, op=op)
        made.end_step()
    return made.write(path, **{**CARD, **more})


def test_products_at_their_best_are_healthy_and_slow_ones_are_not(tmp_path: Path) -> None:
    best = trace(tmp_path / "best.json", (GEMM, BEST_US * 1.05, MM))
    (only,) = diagnose_trace([best])
    assert only.bottleneck == "computation" and only.not_measured == ""
    assert "95% of their shapes' best" in only.evidence and "datasheet" in only.evidence
    facts = facts_of(measure_traces([best]))
    assert facts is not None and facts.inefficient == 0
    assert facts.product_efficiency == pytest.approx(1 / 1.05, rel=1e-3)
    peak = 2 * M * N * K / Roof(H200).peak("bf16") * 1e6
    assert facts.product_of_peak == pytest.approx(peak / BEST_US / 1.05, rel=1e-3)
    (row,) = facts.kernels
    assert (row.bound, row.of_roof) == ("compute", pytest.approx(facts.product_of_peak))
    slow = trace(tmp_path / "slow.json", (GEMM, BEST_US * 2, MM))
    (found,) = diagnose_trace([slow])
    assert found.bottleneck == "kernel efficiency" and found.confidence == "inferred"
    assert found.share == pytest.approx(1 - 1 / (2 * 0.9), rel=0.01)
    twice = measure_traces([slow], Machine.assumed("NVIDIA A100"))
    assert facts_of(twice).product_of_peak > 1  # type: ignore[union-attr]  # of another device


def test_bandwidth_is_named_by_bytes_not_by_names(tmp_path: Path) -> None:
    """A kernel of unknown family that streams; and one of a known family that takes too long."""
    mm = (GEMM, BEST_US * 1.05, MM)
    full = trace(tmp_path / "full.json", mm, ("my_kernel", ADD_US * 1.1, ADD))
    (found,) = diagnose_trace([full])
    spent = 1.1 * ADD_US / (1.1 * ADD_US + BEST_US * 1.05)
    assert found.bottleneck == "memory bandwidth"
    assert found.share == pytest.approx(0.15 * spent, rel=0.02)
    facts = facts_of(measure_traces([full]))
    assert facts is not None and facts.bandwidth_modelled
    assert facts.bandwidth_bound == pytest.approx(spent, rel=0.02)
    lazy = trace(tmp_path / "lazy.json", mm, (POINTWISE, ADD_US * 2, ADD))
    facts = facts_of(measure_traces([lazy]))
    assert facts is not None and facts.bandwidth_bound == 0
    assert facts.families["elementwise"] > 0.5 > facts.families["products"]
    unknown = trace(tmp_path / "unknown.json", mm, (POINTWISE, ADD_US, ADD), deviceProperties=[])
    facts = facts_of(measure_traces([unknown]))
    assert facts is not None and facts.ceilings == "" and facts.product_efficiency is None
    assert not facts.bandwidth_modelled and facts.bandwidth_bound > 0.4  # by names
    assert machine_of("A brick") is None


DEEP: list[Any] = [1]
for _ in range(900):
    DEEP = [DEEP]
NO_SHAPES = [
    [[-M, K], [K, N]], [[0, 0], [0, 0]], [[10**200] * 2] * 2, [[10**30, K], [K, 10**30]],
    [[float("inf"), K], [K, N]], [["a", "b"]] * 2, [None, None], [{"a": 1}] * 2, [[1]], [], [DEEP],
]  # fmt: skip


@pytest.mark.parametrize("name", ["aten::mm", "aten::add", "aten::_flash_attention_forward"])
@pytest.mark.parametrize("dims", NO_SHAPES, ids=lambda dims: repr(dims)[:20])
def test_shapes_that_no_tensor_has_tell_nothing(name: str, dims: list[Any], tmp_path: Path) -> None:
    """Beside them real ones tell what they tell alone."""
    kernel, odd = (GEMM, BEST_US * 1.05, MM), (name, dims, [BF16] * len(dims))
    path = trace(tmp_path / "t.json", kernel, (GEMM, BEST_US, odd))
    (rank,) = measure_traces([path]).ranks
    (alone,) = measure_traces([trace(tmp_path / "one.json", kernel)]).ranks
    assert rank.roof is not None and alone.roof is not None
    assert rank.roof.products_s == pytest.approx(alone.roof.products_s)
    assert (rank.roof.attention_s, rank.roof.moved_s) == (0, 0)
    (found,) = diagnose_trace([path])
    assert found.bottleneck == "computation" and "95% of their shapes' best" in found.evidence


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
    ]  # fmt: skip
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
    assert roof._product((), bmm)[0] == 2 * 12 * 64**3


def test_facts_of_a_folder(tmp_path: Path) -> None:
    """Waits of the host, short kernels, what was exposed; the newest burst, and only whole ones."""
    assert trace_facts(tmp_path) is None
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
    facts = trace_facts(tmp_path)
    assert facts is not None and facts.files == ("step-20.rank-0.json.gz",)
    assert facts.steps == 5 and facts.step_s == pytest.approx(9.5e-3, rel=0.02)
    assert facts.tiny_kernels == pytest.approx(100) and facts.kernels_per_step == 102
    assert facts.tiny == pytest.approx(0.5 / 9.5, rel=0.03)
    (wait,) = facts.syncs  # .item() is three events, and one wait
    assert (wait.name, wait.calls) == ("cudaStreamSynchronize", 1)
    assert sum(w.spent_s for w in facts.syncs) > 8e-3 and facts.copies_to_host == 1
    assert facts.exposed == pytest.approx(1 / 9.5, rel=0.03) and facts.jitter is None
    assert facts.idle["sync"] < 0.01
    first = kernel_lines(facts)[0]
    assert first[0] == GEMM and first[1] == "products" and first[2].startswith("8")
    (folder / "step-30.rank-0.json.gz").write_bytes(b"\x1f\x8bnothing")
    assert trace_facts(tmp_path) is None  # the doctor tells that it is damaged
