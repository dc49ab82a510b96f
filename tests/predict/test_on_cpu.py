"""A step's time on a CPU, from rates that are made up: nothing is timed here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from facts import tells
from probed_cpu import BEGIN_S, BYTES_PER_S, FLOPS, probed_cpu

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.costs.rates import MatmulPoint, MatmulRates, MeasuredStep, StreamPoint
from headrace.plan.plan import Plan
from headrace.predict import on_cpu, sweep
from headrace.predict.calibration import MeasuredPlan
from headrace.predict.intervals import STEP, Width
from headrace.predict.page import format_prediction
from headrace.predict.prediction import NoInterval, Prediction, calibrated, predict
from headrace.probes.table import table

SMALL = """
name = "small"
[model]
dim = 128
layers = 2
heads = 4
vocab = 2048
[data]
sequence_length = 128
[batch]
tokens = 4096
[goal]
steps = 100
"""


def plan_of(*words: str) -> Plan:
    keys = [w for w in words if w[0] not in "+-"]
    return Plan.read(
        SMALL, catalogue(), overrides=keys, with_=[w[1:] for w in words if w[0] == "+"]
    )


def seen(*words: str, machine: Machine | None = None) -> Prediction:
    plan = plan_of(*words)
    return predict(plan, make_context(plan, torch.device("cpu")), machine or probed_cpu())


def test_a_step_is_the_sum_of_its_operations() -> None:
    plan = plan_of()
    ledger = make_ledger(plan, make_context(plan, torch.device("cpu")))
    flops = sum(
        2 * p.count * p.sizes[0] * p.sizes[1] * p.sizes[2]
        for p in ledger.work.values()
        if p.kind == "product"
    )
    moved = {
        n: p.count * (BEGIN_S + p.bytes / BYTES_PER_S)
        for n, p in ledger.work.items()
        if p.kind == "stream" and p.count and p.bytes
    }
    found = seen()
    assert found.time.parts_s["matrix products"] == pytest.approx(flops / FLOPS, rel=0.02)
    update_s = moved.pop("clip/optimizer") + moved.pop("update/optimizer")
    assert found.time.parts_s["the update"] == pytest.approx(update_s, rel=0.05)
    assert found.time.parts_s["memory traffic"] == pytest.approx(sum(moved.values()), rel=0.1)
    assert sum(found.time.parts_s.values()) == pytest.approx(found.time.step_s)
    assert not {"the pause between steps", "waiting for launches"} & set(found.time.parts_s)
    assert found.time.host_s == 0 and not found.time.waits_for_launches
    assert found.time.device_s == pytest.approx(found.time.step_s)


def test_what_a_compiler_fuses_goes_by_its_bytes() -> None:
    eager, compiled = seen(), seen("+torch_compile")
    assert (
        compiled.time.step_s
        and eager.time.step_s
        and compiled.time.step_s < 0.95 * eager.time.step_s
    )
    assert compiled.time.parts_s["matrix products"] == eager.time.parts_s["matrix products"]
    assert compiled.time.parts_s["memory traffic"] < 0.5 * eager.time.parts_s["memory traffic"]
    assert compiled.time.parts_s["the update"] == eager.time.parts_s["the update"]


def test_whole_steps_set_the_sum_right() -> None:
    plain = seen()
    assert plain.time.step_s
    small = {"dim": 128, "layers": 2, "heads": 4, "vocab": 2048, "rows": 32, "length": 128}
    config = plan_of("model.qk_norm=true")
    own = predict(config, make_context(config, torch.device("cpu")), probed_cpu())
    assert own.time.step_s
    usual = {"keeps": False, "threads": 2}
    slower = probed_cpu(
        MeasuredStep(**small, **usual, compiled=False, seconds=1.2 * own.time.step_s)
    )
    assert seen(machine=slower).time.step_s == pytest.approx(1.2 * plain.time.step_s)
    alone = seen("+torch_compile", machine=slower).time.step_s
    quick = MeasuredStep(**small, **usual, compiled=True, seconds=0.5 * own.time.step_s)
    quicker = replace(slower, steps=(*slower.steps, quick))
    assert seen(machine=quicker).time.step_s == pytest.approx(1.2 * plain.time.step_s)
    assert seen("+torch_compile", machine=quicker).time.step_s != pytest.approx(alone)


def test_half_precision_is_priced_by_its_own_probe() -> None:
    unknown = seen("model.precision=bf16")
    assert unknown.time.step_s is None and "products in bf16" in unknown.time.unknown
    machine = probed_cpu()
    square = 2 * 256**3
    timed = (
        MatmulRates("fp32", FLOPS, (MatmulPoint(256, 256, 256, square / FLOPS),)),
        MatmulRates("bf16", FLOPS, (MatmulPoint(256, 256, 256, 36 * square / FLOPS),)),
    )
    slow = seen("model.precision=bf16", machine=replace(machine, matmuls=timed))
    plain = seen()
    assert slow.time.parts_s["matrix products"] == pytest.approx(
        36 * plain.time.parts_s["matrix products"], rel=0.02
    )
    assert slow.time.parts_s["attention"] == pytest.approx(
        36 * plain.time.parts_s["attention"], rel=0.02
    )


@pytest.mark.parametrize("words", ["+bf16_autocast", "+bf16_parameters"])
def test_whole_steps_in_bf16_set_its_sum_right(words: str) -> None:
    """Without compiled ones a compiler gains in bf16 what it gains in fp32."""
    small = {"dim": 128, "layers": 2, "heads": 4, "vocab": 2048, "rows": 32, "length": 128}
    usual: dict[str, Any] = {"keeps": False, "threads": 2, "compiled": False}
    square = (MatmulPoint(256, 256, 256, 2 * 256**3 / FLOPS),)
    products = tuple(MatmulRates(p, FLOPS, square) for p in ("fp32", "bf16"))
    plain = MeasuredStep(**small, **usual, seconds=0.3)
    machine = replace(probed_cpu(plain), matmuls=products)
    half = words.removeprefix("+bf16_")
    slow = replace(machine, steps=(plain, replace(plain, half=half, seconds=0.6)))  # type: ignore[arg-type]
    slower = replace(machine, steps=(plain, replace(plain, half=half, seconds=1.2)))  # type: ignore[arg-type]

    def step_s(machine: Machine, *more: str) -> float:
        found = seen(words, *more, machine=machine).time.step_s
        assert found is not None
        return found

    assert step_s(slower) == pytest.approx(2 * step_s(slow))
    assert seen(machine=slower).time.step_s == seen(machine=machine).time.step_s
    compiled = [step_s(one, "+torch_compile") for one in (slow, slower)]
    assert compiled[1] == pytest.approx(2 * compiled[0])
    quick = replace(plain, half=half, compiled=True, seconds=0.1)  # type: ignore[arg-type]
    timed = step_s(replace(slow, steps=(*slow.steps, quick)), "+torch_compile")
    assert timed < compiled[0] and step_s(slow) == step_s(replace(slow, steps=slow.steps))


def test_micro_batches_and_chunks_change_what_they_change() -> None:
    whole, cut = seen(), seen("batch.micro_sequences=4")
    assert (
        cut.time.step_s and whole.time.step_s and cut.time.step_s > whole.time.step_s
    )  # more operations begin
    chunked = seen("+chunked_cross_entropy", "techniques.chunked_cross_entropy.chunk_tokens=1024")
    assert chunked.time.step_s and chunked.memory.peak_bytes < whole.memory.peak_bytes


def test_the_reader_is_told_where_it_goes_and_what_is_not_known() -> None:
    plan = plan_of()
    text = format_prediction(plan, seen())
    assert "rates measured by probes" in text and "matrix products" in text
    assert tells(text, "no interval", "measured steps", "CPU")


def test_measured_steps_move_the_prediction_of_others() -> None:
    plan = plan_of()
    context = make_context(plan, torch.device("cpu"))
    before = seen()
    assert before.time.step_s
    setting = calibrated(plan, context, probed_cpu(), MeasuredPlan(1.3 * before.time.step_s))
    after = predict(plan, context, probed_cpu(), setting)
    assert after.time.step_s == pytest.approx(1.3 * before.time.step_s)


def test_the_sweep_ranks_a_cpus_plans() -> None:
    plan = plan_of()
    found = sweep.sweep(
        plan, make_context(plan, torch.device("cpu")), probed_cpu(), catalogue(), depth=1
    )
    gains = {c.changes: found.gain(c) for c in found.ranked}
    assert (gains[("+torch_compile",)] or 0.0) > 0.05
    best_s, start_s = found.ranked[0].prediction.time.step_s, found.start.prediction.time.step_s
    assert best_s and start_s and best_s < start_s


def test_a_device_that_is_not_modelled_is_said(tiny_plan: Callable[..., Any]) -> None:
    plan = tiny_plan()
    context = replace(make_context(plan, torch.device("cpu")), device="mps")
    assert "not on mps" in predict(plan, context, probed_cpu()).time.unknown


def test_kept_memory_and_threads_are_priced_by_steps_that_had_them() -> None:
    small = {"dim": 128, "layers": 2, "heads": 4, "vocab": 2048, "rows": 32, "length": 128}
    usual: dict[str, Any] = {"compiled": False, "keeps": False, "threads": 2}
    unknown = seen("+kept_memory").time
    assert unknown.step_s is None and tells(unknown.unknown, "no steps", "memory")
    step = MeasuredStep(**small, **usual, seconds=0.3)
    machine = probed_cpu(
        step,
        replace(step, keeps=True, seconds=0.24),
        replace(step, threads=1, seconds=0.5),
    )
    plain, kept_on = seen(machine=machine).time.step_s, ("+kept_memory",)
    assert plain
    kept = seen("+kept_memory", machine=machine)
    assert kept.time.step_s == pytest.approx(plain - (0.3 - 0.24)), "the logits are as large"
    for few, saved_s in (("batch.tokens=2048", 0.0), ("batch.tokens=8192", 2 * 0.06)):
        before, after = (seen(*way, few, machine=machine).time.step_s for way in ((), kept_on))
        assert before and after == pytest.approx(before - saved_s), few
    chunked = ("+chunked_cross_entropy", "techniques.chunked_cross_entropy.chunk_tokens=512")
    before, after = (seen(*way, *chunked, machine=machine).time.step_s for way in ((), kept_on))
    assert before == after, "a chunk's logits are small"
    slow = replace(machine, steps=(replace(step, seconds=9.0), *machine.steps[1:]))
    before, after = (seen(*way, machine=slow).time.step_s for way in ((), kept_on))
    assert before and after == pytest.approx(0.5 * before), "at most half of a step"
    alone = seen("+cpu_threads", "techniques.cpu_threads.threads=1", machine=machine)
    assert alone.time.step_s == pytest.approx(plain * 0.5 / 0.3)
    other = replace(machine, processors=3)  # none of its own count was timed
    unknown = seen("+cpu_threads", "techniques.cpu_threads.threads=1", machine=other)
    assert unknown.time.step_s is None
    assert tells(unknown.time.unknown, "no steps", "1 threads", "1, 2")


def test_kept_memory_saves_what_single_tensors_of_a_block_take() -> None:
    """Each of two tensors of a residual is below 32 MiB, and queries, keys and values are one."""
    wide = ("model.dim=512", "model.vocab=64", "data.sequence_length=1024", "batch.tokens=12288")
    plan = plan_of(*wide)
    ledger = make_ledger(plan, make_context(plan, torch.device("cpu")))
    lines = {name: line.bytes / 2**20 for name, line in ledger.memory.items()}
    assert lines["0/residual"] == 2 * 24 and lines["0/qkv"] == 72 and lines["logits"] < 32
    assert lines["0/norm"] > 90 and lines["0/activation"] / 2 > 64
    single = 2 * (lines["0/qkv"] + lines["0/gate_up"] + lines["0/activation"])
    assert on_cpu._returned_bytes(ledger) == pytest.approx(single * 2**20)


def test_other_norms_and_activations_are_priced_by_their_own() -> None:
    machine = probed_cpu()
    named = {piece.name: piece for piece in machine.pieces}
    slow = tuple(StreamPoint(p.bytes, 10 * p.seconds) for p in named["norms/forward"].points)
    others = tuple(
        replace(named["norms/forward"], name=f"{what}/{way}", points=slow)
        for what in ("layer_norms", "plain_activation")
        for way in ("forward", "backward")
    )
    machine = replace(machine, pieces=(*machine.pieces, *others))
    gated = seen(machine=machine).time.parts_s["memory traffic"]
    keys = ("model.norm=layer_norm", "model.activation=gelu")
    assert seen(*keys, machine=machine).time.parts_s["memory traffic"] > 2 * gated


def test_a_width_of_a_cpu_is_told_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Width(0.9, 1.2, 40, "measured steps of a CPU lay")
    monkeypatch.setitem(STEP, "on_cpu", rows)
    found = seen()
    assert found.time.step_s and found.time.step_between.high == pytest.approx(
        1.2 * found.time.step_s
    )
    assert tells(format_prediction(plan_of(), found), "80%", 40, "measured steps", "CPU")
    products = tuple(
        MatmulRates(precision, FLOPS, (MatmulPoint(256, 256, 256, 1e-3),))
        for precision in ("fp32", "bf16")
    )
    half = seen("model.precision=bf16", machine=replace(probed_cpu(), matmuls=products))
    assert (
        half.time.step_s
        and half.time.no_interval is NoInterval.FEW
        and half.time.step_between is None
    )


def test_the_probes_table_has_its_steps() -> None:
    step = MeasuredStep(128, 2, 4, 2048, 32, 128, True, False, 2, 0.25)
    other = replace(step, threads=1, compiled=False)
    rows = {what: reached for what, reached in table(probed_cpu(step, other))}
    sizes = ("step", "2 layers", 128, "32 rows", 128)
    (fast,) = (what for what in rows if tells(what, *sizes, "2 threads", "compiled"))
    (slow,) = (what for what in rows if tells(what, *sizes, "1 thread"))
    assert rows[fast] == "250 ms" and "compiled" not in slow
