"""Run the programs that measure on a tiny plan, for a mistake there costs time on a device.

Limits, peers, kernels and attention; techniques have a file of their own.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import attention
import kernel_table
import limits
import peers
import pytest
import torch
from programs import rows, run

import headrace.assemble.build
from headrace.core.errors import EXIT_INTERRUPTED
from headrace.core.model_config import ModelConfig
from headrace.train.start import Start, process_age_s
from headrace.tuner import readings
from headrace.tuner.worker import Worker

OURS = {"tokens_per_s": 10.0, "peak_bytes": 5, "mfu": 0.1, "report": {"techniques": {}}}


class StandIn:
    """A peer that answers, `works` times."""

    works = 9

    def __init__(self, name: str, size: str) -> None:
        self.left = self.works

    def read(self) -> dict[str, Any]:
        """Return one reading, or fail after `works` of them."""
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the peer failed")
        return {"tokens_per_s": 8.0, "peak_bytes": 10}

    def close(self) -> None:
        """Do nothing: the stand-in holds no process."""


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_readings_beside_a_peer_have_their_rows_whatever_ends_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    called: list[list[str]] = []

    def train(size: str, work: Path, extra: list[str]) -> dict[str, Any]:
        called.append(extra)
        if len(called) == 5:  # headrace in the third round
            raise stop("stopped")
        return OURS

    monkeypatch.setattr(peers, "time_headrace", train)
    monkeypatch.setattr(peers, "Peer", StandIn)
    sides = ["headrace", "headrace_micro", "torchtitan"]

    def compare() -> None:
        peers.compare("160m", sides, 3, 1e9, tmp_path, tmp_path, ["seed=1"], ["torchtitan"])

    if stop is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            compare()
    else:
        compare()
    ours, micro, peer = rows(tmp_path, "peers")
    assert (ours["n"], micro["n"], peer["n"]) == (2, 3 if stop is RuntimeError else 2, 1)
    assert ours.get("failed_later") == ("stopped" if stop is RuntimeError else None)
    assert micro["overrides"] == ["batch.micro_sequences=2", "seed=1"] == called[1]
    assert ours["plan_sha256"] != micro["plan_sha256"]
    assert ours["metrics"]["ratio_to_torchtitan"]["value"] == 10 / 8


def test_memory_tells_who_failed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def train(size: str, work: Path, extra: list[str]) -> dict[str, Any]:
        called.append(1)
        if len(called) == 4:  # `chunked` in the second round
            raise RuntimeError("out of memory")
        return OURS

    monkeypatch.setattr(peers, "time_headrace", train)
    monkeypatch.setattr(peers, "Peer", StandIn)
    monkeypatch.setattr(StandIn, "works", 1)
    words = ["memory", "--rounds", 3, "--variants", "recipe", "chunked", "--results", tmp_path]
    run(monkeypatch, limits, *words, "--set", "seed=1")
    peer, recipe, chunked = rows(tmp_path, "memory")
    assert (peer["n"], peer["failed_later"]) == (1, "the peer failed")
    assert recipe["n"] == 3 and "failed_later" not in recipe and recipe["overrides"] == ["seed=1"]
    assert (chunked["n"], chunked["failed_later"]) == (1, "out of memory")
    monkeypatch.setattr(StandIn, "works", 0)
    run(monkeypatch, limits, *words)
    assert rows(tmp_path, "memory")[3]["refused"] == "the peer failed"


def test_memory_that_is_interrupted_writes_what_was_read_and_measures_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def train(size: str, work: Path, extra: list[str]) -> dict[str, Any]:
        called.append(1)
        if len(called) == 2:  # `chunked` in the first round
            raise KeyboardInterrupt
        return OURS

    monkeypatch.setattr(peers, "time_headrace", train)
    monkeypatch.setattr(peers, "Peer", StandIn)
    monkeypatch.setitem(limits.MEASURES, "start", lambda args: pytest.fail("it went on"))
    words = ["memory", "start", "--variants", "recipe", "chunked", "--results", tmp_path]
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, limits, *words)
    peer, recipe = rows(tmp_path, "memory")
    assert stopped.value.code == EXIT_INTERRUPTED and (peer["n"], recipe["n"]) == (1, 1)


def test_a_shape_that_a_peer_would_not_follow_is_refused(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for item in ("model.layers=2", "data.sequence_length=64", "batch.tokens = 64", "model={}"):
        with pytest.raises(SystemExit, match="peer keeps the shape"):
            run(monkeypatch, limits, "memory", "--set", item)
        with pytest.raises(SystemExit, match="peer keeps the shape"):
            monkeypatch.setattr(sys, "argv", ["peers.py", "1b", "--set", item])
            peers.main()
    with pytest.raises(SystemExit, match="peer keeps the shape"):
        run(monkeypatch, limits, "memory", "--variants", "half: batch.tokens=16384")
    with pytest.raises(SystemExit, match="a peer reads"):
        run(monkeypatch, limits, "memory", "--plan", plan)
    peers.check_shape(["batch.micro_sequences=2", "goal.steps=3"])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_3", "elementwise"),
        ("triton_red_fused__fused_rms_norm_mm_7", "elementwise"),
        ("triton_tem_fused_mm_0", "products"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
    ],
)
def test_a_kernel_is_told_by_how_its_name_begins(name: str, family: str) -> None:
    assert kernel_table.family_of(name) == family


def test_copies_over_the_link_are_told_beside_kernels() -> None:
    def ran(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    copies = [ran("Memcpy DtoH (Device -> Pinned)", 0, 3000), ran("Memcpy HtoD", 2000, 6000)]
    others = [ran("gemm", 1000, 2000), ran("add", 5000, 9000), ran("Memcpy DtoD", 3000, 5000)]
    assert kernel_table.over_link(copies + others) == {"over_link": 2, "beside_kernels": 2 / 3}
    assert kernel_table.over_link(others) == {}


def test_backends_of_attention_are_timed_at_a_shape(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    small = "model.dim=32 model.heads=2 model.layers=2 model.ffn=48 model.vocab=320 batch.tokens=32"
    sizes = f"{small} data.vocab=300 data.sequence_length=16 data.workers=0 device=cpu".split()
    asked = [*sizes, f"data.sources='{corpus}'", f"data.directory='{prepared_folder}'"]
    left_out = ["torch_compile", "cudnn_attention", "fused_swiglu", "fused_cross_entropy"]
    words = ["160m", "--without", *left_out, "bf16_parameters", "--set", *asked]
    for known in (False, True):
        monkeypatch.setattr(sys, "argv", ["attention.py", *words, "--results", str(tmp_path)])
        attention.main()
        row = rows(tmp_path, "attention")[-1]
        assert row["cached"] is known and row["chosen"] == "trunk" and row["kernels"]
        assert "cudnn_attention" in row["cannot"] and row["at"]["rows"] == 2
        assert row["n"] == 0 and not row["metrics"]  # nothing else runs on a CPU


def test_limits_measure_and_refuse(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--plan", plan, "--results", tmp_path]
    run(
        monkeypatch,
        limits,
        "mfu",
        *words,
        "--warm",
        1,
        "--timed",
        2,
        "--variants",
        "small: -selective_checkpoint +full_checkpoint batch.micro_sequences=2",
        "none: +cuda_graphs",
    )
    long = "long: -selective_checkpoint techniques.chunked_cross_entropy.chunk_tokens=8"
    run(monkeypatch, limits, "context", *words, "--variants", long, "--lengths", 64, "--short", 16)
    small, none, context = rows(tmp_path, "limits")
    assert small["metrics"]["tokens_per_s"]["value"] > 0 and small["n"] == 2
    assert {"full_checkpoint", "chunked_cross_entropy"} == set(small["evidence"])
    assert "CUDA graphs" in none["refused"] and none["metrics"] == {}
    assert context["metrics"]["row"]["value"] == 64 == context["length"]
    assert "of 64 tokens" in context["evidence"]["chunked_cross_entropy"]  # not of the short row
    capsys.readouterr()
    run(monkeypatch, limits, "plan", "mfu", "memory", "context", "--device-name", "NVIDIA H200")
    told = capsys.readouterr().out
    refused = [line for line in told.splitlines() if "refused" in line]  # FA4 is not installed here
    flash4 = ("mfu flash4_once4 refused", "memory exact_rows2_flash4 refused")
    assert all(line.startswith(flash4) for line in refused)
    assert "mfu none_rows2 1" in told


def test_utilization_of_a_gpu_counts_attention_whole_and_half(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = limits.Variant.parse("x:", {}).of(plan, [])
    context = limits.context_of(read, "NVIDIA H200")
    monkeypatch.setattr(limits, "context_of", lambda plan: context)
    matrices = 2 * (32 * 32 * 4 + 3 * 32 * 48) + 32 * 320
    attention = 12 * 2 * 32 * 16
    found = limits.utilization(read, 989e12)
    assert found["mfu"] == pytest.approx(6 * matrices + attention)
    assert found["mfu_causal"] == pytest.approx(6 * matrices + attention / 2)


def test_weights_drawn_on_a_device_have_the_trunks_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "LARGE", 1)
    plain, shape = headrace.assemble.build.random_source, torch.Size((256, 128))
    config = ModelConfig(dim=32, layers=2, heads=2)
    with readings.device_weights(torch.device("cpu")):
        drawn = headrace.assemble.build.random_source(config, 3)
        for name in ("blocks.0.mlp.down.weight", "embed.weight"):
            value, right = drawn(name, shape), plain(config, 3)(name, shape)
            assert value.std() == pytest.approx(float(right.std()), rel=0.05)
            assert torch.equal(value, drawn(name, shape))
        assert bool((drawn("norm.weight", torch.Size((64,))) == 1).all())
    assert headrace.assemble.build.random_source is plain


def test_a_start_is_told_part_by_part() -> None:
    start = Start(process_age_s())
    start.mark("build")
    start.mark("first_step", compile_s=0.25)
    assert list(start.spent_s)[-3:] == ["build", "first_step", "compile"]
    assert start.spent_s["first_step"] < 0  # the compiler's share is told apart
    assert start.spent_s.get("imports", 1.0) > 0
    assert "imports" not in Start().spent_s  # a notebook may be an hour old


def dies(code: int) -> NoReturn:
    """A reading that takes its process with it."""
    os._exit(code)


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(plan: Path) -> None:
    read = limits.Variant.parse("x:", {}).of(plan, [])
    with Worker() as worker:
        assert worker.ask(dies, 1, limit_s=60).refused == "its process died"
        found = worker.ask(
            readings.time_steps, read, limit_s=60, text=True, warm=1, timed=1, blocks=2
        )
    assert not found.refused and len(found.seconds) == 2


@pytest.mark.slow
def test_a_start_is_measured_cold_and_warm(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, limits, "start", "--plan", plan, "--results", tmp_path)
    cold, warm = rows(tmp_path, "limits")
    run(
        monkeypatch,
        limits,
        "start",
        "--plan",
        plan,
        "--results",
        tmp_path,
        "--variants",
        "compile_cache: +torch_compile +compile_cache",
        "--set",
        "techniques.torch_compile.scope=block",
    )
    found = rows(tmp_path, "limits")[2:]
    assert [row["variant"] for row in found] == ["compile_cache cold", "compile_cache kept"]
    cold_graphs, kept = (row["evidence"]["compile_cache"] for row in found)
    assert cold_graphs.startswith("0 graphs") and not kept.startswith("0 graphs")
    assert (cold["variant"], warm["variant"]) == ("cold", "warm")
    parts = {"imports", "prepare", "choose", "build", "guard", "first_step"}
    assert parts <= warm["metrics"].keys()
    whole, to_first = (warm["metrics"][n]["value"] for n in ("whole_command", "to_first_step"))
    assert 0 < to_first < whole
