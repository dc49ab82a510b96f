"""The tuner on a machine that is made up: what is planted is found, kept, reverted and told."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, RunError, Stopped
from headrace.costs.machine import Machine as Rates
from headrace.plan.changes import changed, difference
from headrace.plan.plan import Plan
from headrace.predict.candidates import Asking, PredictionFailed
from headrace.predict.sweep import sweep
from headrace.tuner import command, paired_blocks, proposals
from headrace.tuner.judge import Rules
from headrace.tuner.pairs import measure_with
from headrace.tuner.path import PAGE, PATH, PLAN, TRIALS, Tuned
from headrace.tuner.pool import Pool
from headrace.tuner.readings import Reading
from headrace.tuner.store import Store
from headrace.tuner.target import FEWEST
from headrace.tuner.tune import tune
from headrace.tuner.worker import Worker

FAST, SLOW, OTHER = "fused_rope", "fused_swiglu", "fused_rms_norm"
KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")
Change = Callable[..., Plan]


def go(machine: Any, plan: Plan, *names: str, minutes: float = 60, **how: Any) -> Tuned:
    """Tune on the made-up machine, with techniques by name as single changes."""
    sources = how.pop("sources", None) or machine.sources([], names=names)
    return tune(
        plan,
        how.pop("aim", "time"),
        minutes,
        sources,
        machine.measure,
        CUDA,
        clock=machine.clock,
        **how,
    )


def test_what_is_faster_is_kept_and_what_is_slower_is_reverted(
    Machine: Any, plan: Plan, change: Change
) -> None:
    machine = Machine({FAST: 0.8, SLOW: 1.3})
    tuned = go(machine, plan, SLOW, FAST)
    assert [s.verdict for s in tuned.path] == ["reverted", "kept", "reverted"]
    assert list(tuned.plan.techniques) == [FAST] and tuned.changes == (f"+{FAST}",)
    row = tuned.path[1]
    assert row.ratio is not None and row.ratio.value == pytest.approx(1.25)
    assert (row.stage, row.steps) == ("accept", 56)  # 54, in blocks of whole steps
    lost = tuned.path[0]
    assert (lost.stage, lost.steps) == ("screen", 12)  # what shows no gain is not measured on
    assert lost.seconds < row.seconds < 2 * lost.seconds  # built once
    assert tuned.seconds == pytest.approx(machine.now_s)
    assert tuned.break_even == pytest.approx(machine.now_s / (0.1001 - 0.08008), rel=1e-2)


def test_single_changes_of_the_new_best_come_next_and_the_whole_way_is_measured(
    Machine: Any, plan: Plan, change: Change
) -> None:
    machine = Machine({FAST: 0.8, OTHER: 0.9})
    tuned = go(machine, plan, FAST, OTHER)
    assert set(tuned.plan.techniques) == {FAST, OTHER}
    first, last, _ = machine.asked[-1]
    assert (first, set(last.techniques)) == (plan, {FAST, OTHER})
    assert tuned.whole and tuned.ratio is not None
    assert tuned.ratio.value == pytest.approx(1 / 0.72, rel=1e-3)


def test_losses_that_differ_reject_what_should_only_run_otherwise(
    Machine: Any, plan: Plan, change: Change
) -> None:
    for off, verdict in ((0.0, "kept"), (0.0002, "kept"), (0.2, "reverted")):
        machine = Machine({FAST: 0.5}, losses={FAST: off})
        row = go(machine, plan, FAST).path[0]
        assert row.verdict == verdict, off
    assert row.loss == pytest.approx(0.2) and "same weights" in row.reason


def test_a_device_that_drifts_hides_no_gain(Machine: Any, plan: Plan, change: Change) -> None:
    """Neither a steady drift, by half from end to end, nor a block that is off as a whole."""
    for how in ({"drift": 0.02}, {"off": 1}):
        machine = Machine({FAST: 0.95}, **how)
        (row,) = go(machine, plan, FAST).path
        assert row.verdict == "kept" and len(machine.asked) == 1, how
        assert row.ratio is not None and row.ratio.value == pytest.approx(1 / 0.95, rel=0.01)


def test_a_reading_of_a_device_that_drifted_and_decides_nothing_corrects_no_prediction(
    Machine: Any, plan: Plan, change: Change
) -> None:
    machine = Machine({FAST: 0.997, OTHER: 0.8}, drift=0.02)
    one, both = change(plan, f"+{FAST}"), change(plan, f"+{FAST}", f"+{OTHER}")
    whole = [machine.proposal(one, 0.15), machine.proposal(both, 0.16)]
    rows = go(machine, plan, sources=machine.sources(whole, start_s=0.2)).path
    assert [row.verdict for row in rows[:2]] == ["reverted", "kept"]
    assert rows[0].reason.endswith("and the device was not as fast at the end as at the beginning")
    assert [row.predicted for row in rows[:2]] == [0.2 / 0.15, 0.2 / 0.16]


def test_the_minutes_are_honoured(Machine: Any, plan: Plan, change: Change) -> None:
    names = (FAST, SLOW, OTHER, "activation_offload", "chunked_mlp")
    machine = Machine({FAST: 0.8, SLOW: 1.1, OTHER: 1.1}, build_s=20.0)
    tuned = go(machine, plan, *names, minutes=2)
    assert machine.now_s <= 120 and tuned.up and tuned.left
    assert tuned.path[0].verdict == "kept" and len(machine.asked) == 2
    machine = Machine({FAST: 0.8}, build_s=200.0)  # the first reading is cut off
    tuned = go(machine, plan, *names, minutes=2)
    assert machine.now_s <= 120 and tuned.path[0].verdict == "not tried" and tuned.plan == plan


def test_fewer_steps_than_wanted_are_told(Machine: Any, plan: Plan, change: Change) -> None:
    machine = Machine({FAST: 0.5}, base_s=1.0, build_s=25.0)
    (row,) = go(machine, plan, FAST, minutes=2).path
    assert row.verdict == "kept" and row.stage == "accept" and 6 <= row.steps < 54
    assert f"on {row.steps} steps, where 54 are wanted" in row.reason


def test_a_gain_on_too_few_steps_is_not_kept_until_there_is_time(
    Machine: Any, plan: Plan, change: Change, tmp_path: Path
) -> None:
    """Check that the same command with the minutes it names measures again, and keeps it."""
    file = tmp_path / TRIALS
    for minutes, build_s, steps in ((2.0, 42.0, 2), (1.5, 19.5, 6)):
        machine = Machine({FAST: 0.5}, base_s=1.0, build_s=build_s)
        store = Store(file, {}, machine.clock)
        tuned = go(machine, plan, FAST, minutes=minutes, store=store)
        (row,) = tuned.path
        assert (row.verdict, row.stage, row.steps) == ("not tried", "screen", steps)
        assert row.ratio is not None and tuned.plan == plan and not tuned.kept
        told = f"better on {steps} steps, and 12 are the least to keep it: --minutes "
        assert row.reason.startswith(told) and row.reason.endswith("the same command goes on")
        assert "long enough" in tuned.sentence() and tuned.untried == (f"+{FAST}",)
        minutes = int(row.reason.removeprefix(told).split(",")[0])
        assert 2 <= minutes <= 3
        store = Store(file, {}, machine.clock)
        (row,) = go(machine, plan, FAST, minutes=minutes, store=store).path
        assert row.verdict == "kept" and row.steps >= 12
        file.unlink()


def test_a_plan_that_cannot_run_is_replaced_on_few_steps(
    Machine: Any, plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({}, bytes={FAST: 0.5}, base_s=1.0, build_s=42.0, room_bytes=0.9e6)
    monkeypatch.setattr(paired_blocks, "time", SimpleNamespace(time=machine.clock))
    machine.measure = measure_with(machine)
    (row,) = go(machine, plan, FAST, minutes=2).path
    assert row.verdict == "kept" and "cannot run" in row.reason and row.steps < 12


def test_slow_steps_leave_time_for_other_plans(
    Machine: Any, plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six minutes, builds of 40 s, steps of 3 and 2 s; together, and one after the other."""
    names = (FAST, SLOW, OTHER, "chunked_mlp")
    for apart in (False, True):
        machine = Machine({FAST: 0.67, SLOW: 1.1, OTHER: 0.98}, base_s=3.0, build_s=40.0)
        monkeypatch.setattr(paired_blocks, "time", SimpleNamespace(time=machine.clock))
        if apart:
            machine.bytes, machine.room_bytes = {}, 1.5e6
            machine.measure = measure_with(machine)
        tuned = go(machine, plan, *names, minutes=6)
        tried = [step for step in tuned.path if step.ratio is not None]
        assert tried[0].verdict == "kept" and tried[0].steps >= 12 and len(tried) >= 2
        assert machine.now_s <= 360


def test_predictions_are_corrected_by_what_was_measured(
    Machine: Any, plan: Plan, change: Change
) -> None:
    """SLOW is said to help; once it is measured, what holds it too stands behind what does not."""
    machine = Machine({FAST: 0.9, SLOW: 2.0})
    said = {(SLOW,): 0.7, (FAST, SLOW): 0.75, (FAST,): 0.9}
    proposals = [
        machine.proposal(change(plan, *(f"+{n}" for n in names)), s) for names, s in said.items()
    ]
    tuned = go(machine, plan, sources=machine.sources(proposals, start_s=1.0))
    order = [tuple(sorted(second.techniques)) for _, second, _ in machine.asked]
    assert list(dict.fromkeys(order)) == [(SLOW,), (FAST,)]  # and both together never
    assert list(tuned.plan.techniques) == [FAST]
    assert tuned.path[1].predicted == pytest.approx(1 / 0.9, rel=1e-2)


def test_memory_that_is_not_there_refuses(Machine: Any, plan: Plan, change: Change) -> None:
    machine = Machine({}, bytes={FAST: 2.0, SLOW: 3.0}, room_bytes=1.5e6)
    proposals = [machine.proposal(change(plan, f"+{n}"), None) for n in (FAST, SLOW)]
    proposals.append(machine.proposal(change(plan, f"+{OTHER}"), None, fits="no"))
    tuned = go(machine, plan, sources=machine.sources(proposals))
    assert [s.verdict for s in tuned.path] == ["refused"] * 3 and len(machine.asked) == 1
    assert "ran out of memory" in tuned.path[1].reason and "predicted" in tuned.path[2].reason
    machine = Machine({}, bytes={FAST: 1.45}, room_bytes=1.46e6)  # too near to be safe
    (row,) = go(machine, plan, FAST).path
    assert row.verdict == "refused" and "no room" in row.reason


def test_memory_is_worth_its_share_of_the_time(Machine: Any, plan: Plan, change: Change) -> None:
    machine = Machine({FAST: 1.05, SLOW: 1.9}, bytes={FAST: 0.8, SLOW: 0.7})
    tuned = go(machine, plan, SLOW, FAST, aim="memory")
    assert list(tuned.plan.techniques) == [FAST] and tuned.memory == pytest.approx(0.8)
    assert [s.verdict for s in tuned.path] == ["reverted", "kept", "reverted"]
    assert "1.900 of the time" in tuned.path[0].reason


# --- where no time is predicted ---------------------------------------------------------------


def test_the_real_order_of_a_cpu_begins_with_a_needless_checkpoint(
    Machine: Any, plan: Plan, change: Change
) -> None:
    """The ledger's guess leads; what buys memory alone is never measured; what compiles is late.

    Once the clock has cut that off, all that compiles comes last.
    """
    slow = change(
        plan,
        "+full_checkpoint",
        "batch.micro_sequences=1",
        "batch.tokens=1024",
        "model.dim=128",
        "model.ffn=384",
        "data.sequence_length=128",
    )
    context = make_context(slow, choose_device(slow))
    found = proposals.sources("time", context, Rates.assumed("cpu"), catalogue())
    start, others = found.whole(slow)
    assert start.prediction.time.step_s is None
    pool = Pool(slow, start, guess_s=found.guess_s)
    pool.add([*others, *found.single(slow)], whole=False)
    taken = []
    while (one := pool.take()) is not None:
        taken.append(difference(slow, one.plan))
        if "+torch_compile" in taken[-1]:
            pool.note_cut_off(one)
    assert taken[0] == ("-full_checkpoint",) and ("batch.micro_sequences=8",) in taken[:3]
    compiling = [i for i, words in enumerate(taken) if "+torch_compile" in words]
    assert compiling[0] < len(taken) - len(compiling) and compiling[-1] == len(taken) - 1
    flat = {word for words in taken for word in words}
    assert not flat & {"+chunked_mlp", "+chunked_cross_entropy", "+dynamic_batch"}
    assert "+chunked_mlp" in {one.change[0] for one in pool.waiting.values()}


def test_a_prediction_that_fails_costs_its_own_change_and_is_told(
    Machine: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, ledger: Any) -> Any:
        return {}["line that is gone"]

    monkeypatch.setattr(KNOWN.techniques["full_checkpoint"], "predict", broken)
    context = make_context(plan, choose_device(plan))
    found = proposals.sources("time", context, Rates.assumed("cpu"), KNOWN)
    machine = Machine({})
    tuned = tune(plan, "time", 60, found, machine.measure, CUDA, clock=machine.clock)
    (row,) = [step for step in tuned.path if "+full_checkpoint" in step.changes]
    assert row.verdict == "refused" and "its prediction failed: KeyError" in row.reason
    assert "test_tune.py" in row.reason and len(machine.asked) > 3
    with pytest.raises(PredictionFailed):
        Asking(plan, context, Rates.assumed("cpu"), KNOWN).answer(plan, ("+full_checkpoint",))
    ranked = sweep(plan, context, Rates.assumed("cpu"), KNOWN)
    assert any("its prediction failed" in why for why in ranked.refused)


def test_judging_that_fails_and_a_process_that_cannot_be_sent_a_plan_are_refusals(
    Machine: Any, plan: Plan
) -> None:
    machine = Machine({FAST: 0.5})
    whole = machine.measure

    def measure(first: Plan, second: Plan, **how: Any) -> Reading:
        reading = whole(first, second, **how)
        if OTHER in second.techniques:
            reading.seconds = []
        return reading

    machine.measure = measure
    tuned = go(machine, plan, OTHER, FAST)
    assert [s.verdict for s in tuned.path] == ["refused", "kept", "refused"]
    assert tuned.path[0].reason.startswith("judging it failed")
    with Worker() as worker:
        found = worker.ask(lambda: Reading(), limit_s=60.0)  # which pickle refuses
    assert found.refused and found.poisoned


# --- changes of learning ---------------------------------------------------------------------


def test_learning_is_compared_by_seeds_to_a_target_or_refused(
    Machine: Any, plan: Plan, change: Change
) -> None:
    machine, trained = Machine({}), []
    better, worse = change(plan, "+z_loss"), change(plan, "+muon")

    def train(run: Plan, limit_s: float) -> Reading:
        trained.append(run)
        factor = 0.7 if "z_loss" in run.techniques else 1.3 if "muon" in run.techniques else 1.0
        return Reading(seconds=[(10 + 0.1 * run.seed) * factor])

    sources = machine.sources([])
    both = [machine.proposal(p, None) for p in (worse, better)]
    sources = type(sources)(sources.whole, sources.single, lambda p: both)
    tuned = go(machine, plan, sources=sources, aim="money", train=train)
    assert tuned.path[0].verdict == "refused" and "goal.bits_per_byte" in tuned.path[0].reason
    assert not trained
    aimed = plan.replaced(goal=plan.goal.model_copy(update={"bits_per_byte": 2.0}))
    tuned = go(machine, aimed, sources=sources, aim="quality", train=train)
    assert [s.verdict for s in tuned.path] == ["reverted", "kept"]
    assert len([r for r in trained if "muon" in r.techniques]) == 1  # clearly lost
    assert {r.seed for r in trained} == {*range(FEWEST)}
    assert len([r for r in trained if not r.techniques]) == FEWEST  # the base once for each seed


def test_what_learning_kept_is_not_undone_by_what_comes_after(Machine: Any, plan: Plan) -> None:
    """Twice the rate is kept, twice that too; then nothing goes back to the first."""
    machine, rate = Machine({}), plan.optimizer.lr
    aimed = plan.replaced(goal=plan.goal.model_copy(update={"bits_per_byte": 2.0}))
    sources = machine.sources([])

    def learning(best: Plan) -> list[Any]:
        words = (f"optimizer.lr={best.optimizer.lr * factor}" for factor in (2, 0.5))
        return [machine.proposal(changed(best, [word], KNOWN), None) for word in words]

    def train(run: Plan, limit_s: float) -> Reading:
        return Reading(seconds=[(10 + run.seed) * (1 + abs(run.optimizer.lr / rate - 4))])

    sources = type(sources)(sources.whole, sources.single, learning)
    tuned = go(machine, aimed, sources=sources, aim="quality", train=train)
    assert tuned.plan.optimizer.lr == pytest.approx(4 * rate)
    assert [s.verdict for s in tuned.path] == ["kept", "kept", "reverted"]


# --- the folder ------------------------------------------------------------------------------


def run_command(machine: Any, plan: Plan, patch: pytest.MonkeyPatch) -> Tuned:
    """Run the verb `tune` on made-up readings."""
    patch.setattr(command, "sources", lambda *given: machine.sources([], names=(FAST, SLOW)))
    patch.setattr(command, "measure_with", lambda worker: machine.measure)
    context = make_context(plan, choose_device(plan))
    return command.tune_command(
        plan, catalogue=catalogue(), context=context, machine=Rates.assumed("cpu")
    )


def test_an_interruption_keeps_the_files_and_a_second_call_measures_nothing_twice(
    Machine: Any, plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({FAST: 0.5, SLOW: 1.5}, interrupt_at=2)
    folder = command.folder_of(plan)
    with pytest.raises(Stopped) as ended:
        run_command(machine, plan, monkeypatch)
    assert ended.value.exit_code == 130 and len(machine.asked) == 2
    kept = Plan.read((folder / PLAN).read_text(), catalogue())
    assert list(kept.techniques) == [FAST] and kept.name == "tiny-tuned"
    assert json.loads((folder / PATH).read_text())["interrupted"]
    with (folder / TRIALS).open("a") as file:
        file.write('{"first": "cut sho')  # as a kill leaves it
    machine.interrupt_at, machine.asked = None, []
    tuned = run_command(machine, plan, monkeypatch)
    assert [difference(first, second) for first, second, _ in machine.asked] == [(f"+{SLOW}",)]
    assert [s.verdict for s in tuned.path] == ["kept", "reverted"]
    machine.asked = []
    assert run_command(machine, plan, monkeypatch).plan == tuned.plan
    assert not machine.asked
    page = (folder / PAGE).read_text()
    assert "<svg" in page and f"+{FAST}" in page and "<script" not in page
    assert command.format_end(tuned, folder).endswith(f"headrace train {folder / PLAN}")


def test_a_folder_that_cannot_be_written_costs_no_reading_and_tells_what_won(
    Machine: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, folder = Machine({FAST: 0.5}), command.folder_of(plan)
    for name in (TRIALS, PLAN):  # as no file can be
        (folder / name).mkdir(parents=True)
    with pytest.raises(RunError, match=r"2\.00 times as fast") as ended:
        run_command(machine, plan, monkeypatch)
    assert ended.value.remedy.text == f"headrace train PLAN --with {FAST}"


def test_another_machine_measures_again(
    Machine: Any, plan: Plan, change: Change, tmp_path: Path
) -> None:
    machine, file = Machine({FAST: 0.5}), tmp_path / TRIALS
    for device, new in (("one", 1), ("one", 0), ("another", 1)):
        machine.asked = []
        store = Store(file, {"device_name": device}, machine.clock)
        go(machine, plan, FAST, store=store)
        assert len(machine.asked) == new, device


def test_a_plan_that_cannot_be_tuned_says_why(plan: Plan) -> None:
    context = make_context(plan, choose_device(plan))
    how: Any = {"catalogue": catalogue(), "context": context, "machine": Rates.assumed("cpu")}
    with pytest.raises(ConfigError, match=r"target"):
        command.tune_command(plan, aim="quality", **how)
    for minutes in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"minutes"):
            command.tune_command(plan, minutes=minutes, **how)
    with pytest.raises(ConfigError, match=r"cannot be written") as told:
        command.tune_command(plan, folder=Path(__file__) / "in-a-file", **how)
    assert told.value.remedy.text.startswith("directory=")
