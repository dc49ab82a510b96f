"""The programs that measure run whole on a tiny plan: a mistake there costs time on a device."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from tiny import READ

import headrace.build
import headrace.train
from headrace.core.model_config import ModelConfig
from headrace.start import Start
from headrace.trials import readings
from headrace.trials.worker import Worker

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

attention, kernel_table, limits, peers, techniques = (
    import_module(n) for n in ("attention", "kernel_table", "limits", "peers", "techniques")
)

CHUNKED = "[techniques.chunked_cross_entropy]\nchunk_tokens = 8\n"
PLAN = READ + "[techniques.selective_checkpoint]\n" + CHUNKED


@pytest.fixture
def plan(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Path:
    """A plan file whose recipe has two techniques."""
    path = tmp_path / "tiny.toml"
    path.write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    return path


def run(patch: pytest.MonkeyPatch, program: Any, *words: Any) -> None:
    """The program in this process."""
    patch.setattr(sys, "argv", ["program", *map(str, words), "--here"])
    program.main()


def rows(folder: Path, topic: str) -> list[dict[str, Any]]:
    """Receipts."""
    return [json.loads(line) for line in (folder / f"{topic}.jsonl").read_text().splitlines()]


def test_a_technique_has_a_row_at_each_base(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["z_loss", "cuda_graphs", "selective_checkpoint", "full_checkpoint:every=2"]
    words = ["--shapes", plan, "--steps", 1, 1, "--loss-steps", 3]
    words += ["--results", tmp_path, "--missing", tmp_path]
    run(monkeypatch, techniques, *asked, *words)
    found = {(r["technique"], r["base"]): r for r in rows(tmp_path, "techniques")}
    assert len(found) == 8
    for base in ("trunk", "recipe"):
        assert "CUDA graphs" in found["cuda_graphs", base]["refused"]
        own = found["z_loss", base]
        assert own["n"] == 2 and own["metrics"]["speed_ratio"]["value"] > 0 and own["evidence"]
    assert "selective_checkpoint" in found["full_checkpoint", "recipe"]["refused"]
    assert found["selective_checkpoint", "recipe"]["left_out"]
    for base in ("trunk", "recipe"):
        told = found["selective_checkpoint", base]["metrics"]
        assert abs(told["loss_difference"]["value"]) < 1e-5 < told["loss_noise"]["value"]
        assert told["loss"]["value"] == pytest.approx(told["base_loss"]["value"])
        assert "scaled_dot_product_flash_attention" in found["z_loss", base]["base_attention"]
    run(monkeypatch, techniques, *asked, "fused_cross_entropy", *words, "--limit-s", 0)
    assert {r["technique"] for r in rows(tmp_path, "techniques")[8:]} == {"fused_cross_entropy"}
    capsys.readouterr()
    run(monkeypatch, techniques, "tf32:mode=x", "dynamic_batch", *words, "--limit-s", 0)
    assert "left: tiny trunk: dynamic_batch\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_is_read_alone_by_a_schedule_as_long_as_the_training(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shapes", plan, "--loss-steps", 9, "--only-loss", "--noise-seeds", 2]
    words += ["--results", tmp_path, "--missing", tmp_path]
    rates: list[float] = []
    step = headrace.train.step

    def watched(build: Any, micros: Any, index: int) -> Any:
        rates.append(build.values["lr"](index))
        return step(build, micros, index)

    monkeypatch.setattr(headrace.train, "step", watched)
    run(monkeypatch, techniques, "z_loss", "selective_checkpoint", *words)
    found = {(r["technique"], r["base"]): r for r in rows(tmp_path, "techniques")}
    assert len(found) == 3, "what is put into the recipe computes what it does in the trunk"
    assert found["selective_checkpoint", "recipe"]["left_out"]
    for row in found.values():
        assert (row["measurement"], row["n"], row["loss_schedule"]["steps"]) == ("loss", 1, 9)
        assert row["metrics"].keys() == {"loss", "base_loss", "loss_difference", "loss_noise"}
        low, high = (row["metrics"]["loss_noise"][k] for k in ("low", "high"))
        assert 0 < low < high
    assert "added" in found["z_loss", "trunk"]["evidence"]
    first = rates[:9]  # of the base; the plan's own schedule ends at its third step
    assert first == sorted(first, reverse=True) and first[4] > 2 * first[8] > 0
    run(monkeypatch, techniques, "z_loss", *words)
    assert len(rows(tmp_path, "techniques")) == 3
    run(monkeypatch, techniques, "z_loss", *words[:-1], tmp_path / "none", "--limit-s", 0)
    assert "left: tiny trunk: z_loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, techniques, "z_loss", "--only-loss")


@pytest.mark.slow
def test_a_whole_run_has_the_seconds_of_all_of_its_steps(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = "techniques.sequence_length_schedule."
    words = ["--shapes", plan, "--bases", "trunk", "--whole-run", 5, "--results", tmp_path]
    words += ["--base-with", "sequence_length_schedule", "torch_compile", "--set"]
    words += [f"{growing}start=2", "techniques.torch_compile.backend=eager"]
    run(monkeypatch, techniques, "shape_buckets:multiple=4", *words, f"{growing}until=4")
    (row,) = rows(tmp_path, "techniques")
    assert (row["measurement"], row["run_steps"]) == ("run", 5)
    assert len(row["graphs"]) == 3 and int(row["graphs"][0]) < int(row["graphs"][1])
    assert row["metrics"].keys() == {"run_ratio", "run", "base_run"} and row["n"] == 2
    assert row["evidence"].startswith("4 shapes came")


def test_a_base_that_is_read_once_counts_once_and_what_was_cut_off_is_missing(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def time(*given: Any, **how: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:  # the base, after the side
            return readings.Reading(refused="not done within 240 s")
        return readings.Reading(seconds=[1.0, 1.1], evidence={})

    monkeypatch.setattr(techniques, "time_steps", time)
    words = ["--shapes", plan, "--bases", "trunk", "--results", tmp_path, "--missing", tmp_path]
    run(monkeypatch, techniques, "z_loss", *words)
    (row,) = rows(tmp_path, "techniques")
    assert row["n"] == 1
    for more in ([], ["--loss-steps", 3], ["--set", "seed=1"]):  # measured; not so; not so
        run(monkeypatch, techniques, "z_loss", *words, *more, "--limit-s", 0)
        assert ("left: tiny trunk: z_loss" in capsys.readouterr().out) == bool(more)
    for why, again in (("not done within 240 s", True), ("its base cannot run: x", True),
                       ("out of memory: x", False)):  # fmt: skip
        file = tmp_path / "techniques.jsonl"
        file.write_text(json.dumps({**row, "metrics": {}, "refused": why}) + "\n")
        run(monkeypatch, techniques, "z_loss", *words, "--limit-s", 0)
        assert ("left: tiny trunk: z_loss" in capsys.readouterr().out) == again


def test_what_was_read_before_an_interruption_has_its_row(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def time(*given: Any, **how: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:  # the second side
            raise KeyboardInterrupt
        return readings.Reading(seconds=[len(asked) / 2], evidence={})

    monkeypatch.setattr(techniques, "time_steps", time)
    words = ["--shapes", plan, "--bases", "trunk", "--results", tmp_path]
    with pytest.raises(SystemExit):
        run(monkeypatch, techniques, "z_loss", "label_smoothing", *words)
    (row,) = rows(tmp_path, "techniques")
    assert row["technique"] == "z_loss" and row["n"] == 1
    assert row["metrics"]["speed_ratio"]["value"] == 0.5


OURS = {"tokens_per_s": 10.0, "peak_bytes": 5, "mfu": 0.1, "report": {"techniques": {}}}


class StandIn:
    """A peer that answers, `works` times."""

    works = 9

    def __init__(self, name: str, size: str) -> None:
        self.left = self.works

    def read(self) -> dict[str, Any]:
        """One reading."""
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the peer failed")
        return {"tokens_per_s": 8.0, "peak_bytes": 10}

    def close(self) -> None:
        """Nothing to end."""


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


def test_a_companion_stands_in_every_plan_and_what_is_in_its_way_in_none(plan: Path) -> None:
    for base in ("trunk", "recipe"):
        changes = (["device=cpu"], ["alibi"], ["selective_checkpoint"])
        first, side, own = techniques.sides(
            plan, base, ["z_loss", "alibi"], *changes
        )  # fmt: skip
        assert not side.refused
        assert "alibi" in first.plan.techniques
        assert "selective_checkpoint" not in first.plan.techniques
        assert set(side.plan.techniques) == {*first.plan.techniques, "z_loss"}
        assert ("alibi" in own.plan.techniques) == (base == "trunk")


def test_an_owner_of_the_same_socket_makes_way(plan: Path) -> None:
    _, side = techniques.sides(plan, "recipe", ["fused_cross_entropy"], ["device=auto"])
    assert side.replaces == ("chunked_cross_entropy",)


def test_limits_measure_and_refuse(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--plan", plan, "--results", tmp_path]
    run(monkeypatch, limits, "mfu", *words, "--warm", 1, "--timed", 2, "--variants",
        "small: -selective_checkpoint +full_checkpoint batch.micro_sequences=2",
        "none: +cuda_graphs")  # fmt: skip
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
    assert "refused" not in told and "mfu none_rows2 1" in told


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
    plain, shape = headrace.build.random_source, torch.Size((256, 128))
    config = ModelConfig(dim=32, layers=2, heads=2)
    with readings.device_weights(torch.device("cpu")):
        drawn = headrace.build.random_source(config, 3)
        for name in ("blocks.0.mlp.down.weight", "embed.weight"):
            value, right = drawn(name, shape), plain(config, 3)(name, shape)
            assert value.std() == pytest.approx(float(right.std()), rel=0.05)
            assert torch.equal(value, drawn(name, shape))
        assert bool((drawn("norm.weight", torch.Size((64,))) == 1).all())
    assert headrace.build.random_source is plain


def test_a_start_is_told_part_by_part() -> None:
    start = Start()
    start.mark("build")
    start.mark("first_step", compile_s=0.25)
    assert list(start.spent_s)[-3:] == ["build", "first_step", "compile"]
    assert start.spent_s["first_step"] < 0  # the compiler's share is told apart
    assert start.spent_s.get("imports", 1.0) > 0


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
    run(monkeypatch, limits, "start", "--plan", plan, "--results", tmp_path,
        "--variants", "compile_cache: +torch_compile +compile_cache",
        "--set", "techniques.torch_compile.scope=block")  # fmt: skip
    found = rows(tmp_path, "limits")[2:]
    assert [row["variant"] for row in found] == ["compile_cache cold", "compile_cache kept"]
    cold_graphs, kept = (row["evidence"]["compile_cache"] for row in found)
    assert cold_graphs.startswith("0 graphs") and not kept.startswith("0 graphs")
    assert (cold["variant"], warm["variant"]) == ("cold", "warm")
    parts = {"imports", "prepare", "choose", "build", "guard", "first_step"}
    assert parts <= warm["metrics"].keys()
    whole, to_first = (warm["metrics"][n]["value"] for n in ("whole_command", "to_first_step"))
    assert 0 < to_first < whole
