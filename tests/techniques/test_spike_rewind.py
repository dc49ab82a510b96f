"""Faults that are planted into runs: masked, undone, told, and repeated to the bit on a resume."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same_run, losses, metrics, report
from torch import nn
from typer.testing import CliRunner

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.kept_states import KeptStates
from headrace.assemble.nonfinite import Where, first_nonfinite
from headrace.assemble.sockets import Build
from headrace.cli.app import app
from headrace.core.errors import Diverged
from headrace.costs.footprint import KEPT_STATES
from headrace.data.loader import Micro
from headrace.optim.stability import Band
from headrace.plan.plan import Plan
from headrace.techniques.stability.spike_rewind import SpikeRewind, SpikeWatch
from headrace.train import state
from headrace.train import train as trainer

FUNCTIONS = Path(__file__).with_name("spike_rewind_ranks.py")
Fault = Callable[[Build, list[Micro]], None]
Train = Callable[..., Path]
ON = (
    "techniques.spike_rewind.window=16",
    "techniques.spike_rewind.every=4",
    "checkpoint.every_steps=8",
    "eval.every_steps=16",
    "goal.steps=32",
    "schedule.kind=constant",
    "guard=false",
)


def matrix(build: Build) -> torch.Tensor:
    return build.model.get_parameter("blocks.0.mixer.qkv.weight").data.view(-1)


def flip(build: Build, micros: list[Micro]) -> None:
    """Change the highest bit of a weight's exponent: it becomes some 1e37."""
    matrix(build)[:1].view(torch.int32).bitwise_xor_(1 << 30)


def plant_nan(build: Build, micros: list[Micro]) -> None:
    matrix(build)[5] = float("nan")


def repeat_a_token(build: Build, micros: list[Micro]) -> None:
    """Poison the batch at a huge rate: one token, whose next is another."""
    for micro in micros:
        micro.ids_BT.fill_(7)
        micro.targets_BT.fill_(9)


def too_long(build: Build, micros: list[Micro]) -> None:
    """Let this step's update be a thousand times as long."""
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= 1000


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what plants a fault before the forward pass of steps of all later runs."""
    whole = trainer.step

    def planted(fault: Fault, *steps: int) -> None:
        def step(build: Build, micros: list[Micro], index: int, inspect: Any = None) -> Any:
            def begin(build: Build) -> None:
                if index + 1 in steps:
                    fault(build, micros)

            build.before_step.append(begin)
            try:
                return whole(build, micros, index, inspect)
            finally:
                build.before_step.remove(begin)

        monkeypatch.setattr(trainer, "step", step)

    return planted


@pytest.mark.parametrize(
    ("fault", "first", "undone"),
    [(flip, 21, True), (plant_nan, 16, True), (too_long, 22, True), (repeat_a_token, 21, False)],
)
def test_a_fault_is_undone(
    train: Train, plant: Callable[..., None], fault: Fault, first: int, undone: bool
) -> None:
    """The loss comes back into its band, and the report says from where to where."""
    plant(fault, 21 if fault is too_long else first)
    run = train(*ON)
    (spike,) = report(run)["spikes"]
    rows = metrics(run)
    masked = [row["step"] for row in rows if row.get("masked")]
    assert report(run)["status"] == "done" and report(run)["skipped_steps"] == len(masked)
    assert spike["step"] == masked[0] == first and spike["masked"] == len(masked)
    assert spike["recovered"] == masked[-1] + 1
    limit = spike["loss_limit"]
    assert all(row["loss"] <= limit for row in rows[masked[-1] :])
    assert rows[-1]["loss"] < rows[first - 2]["loss"] + 0.1, "it goes on learning"
    assert [row["step"] for row in rows] == list(range(1, 33)), "the clock is never set back"
    sound = max(step for step in range(0, first - 1, 4) if step <= first - 2)
    assert spike["rewound_to"] == ([sound] if undone else [])
    wild = fault in (flip, plant_nan)
    assert ("blocks.0.mixer.qkv.weight" in spike["source"]) == wild
    page = (run / "report.html").read_text() if (run / "report.html").exists() else ""
    assert not page or "Spikes" in page
    numbers = report(run)["techniques"]["spike_rewind"]["numbers"]
    assert numbers["rewinds"] == undone and numbers["masked"] == len(masked)
    assert numbers["kept_bytes"] > 0


@pytest.mark.parametrize("beside", [(), ("techniques.sophia.every=1",)])
def test_a_masked_update_leaves_everything_as_it_was(
    make_tiny: Callable[..., Build], beside: tuple[str, ...]
) -> None:
    """Weights and optimizer are the same to the bit, and the band has not taken the step in."""
    build = make_tiny("techniques.spike_rewind.window=8", "optimizer.lr=1e-5", *beside)
    for index in range(9):
        trainer.step(build, build.loader.step(index).micros, index)
    before = {name: piece.local.clone() for name, piece in state.tensors(build).items()}
    engine = build.engine
    build.engine = lambda *given: 3 * engine(*given)
    numbers = trainer.step(build, build.loader.step(9).micros, 9)
    assert bool(torch.isfinite(numbers).all()) and float(numbers[2]) == 0
    assert sum(name.startswith("optimizer/") for name in before) > 10
    after = {name: piece.local for name, piece in state.tensors(build).items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_rewind_is_repeated_to_the_bit(
    train: Train, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after a rewind, and later, a resumed run ends as one that was not."""
    plant(too_long, 21)
    whole = train(*ON, "name=whole")
    assert report(whole)["spikes"][0]["rewound_to"] == [20]
    step, ends = trainer.step, [25, 28]

    class Killed(BaseException):
        """Stands for kill -9: nothing is saved after it."""

    def dies(build: Build, micros: Any, index: int, inspect: Any = None) -> Any:
        if ends and index + 1 == ends[0]:
            ends.pop(0)
            raise Killed
        return step(build, micros, index, inspect)

    monkeypatch.setattr(trainer, "step", dies)
    with pytest.raises(Killed):
        train(*ON, "name=killed")
    with pytest.raises(Killed):
        train(*ON, "name=killed", resume=True)
    killed = train(*ON, "name=killed", resume=True)
    assert_same_run(whole, killed)
    assert report(whole)["spikes"] == report(killed)["spikes"]


def test_no_checkpoint_holds_what_was_refused(train: Train, plant: Callable[..., None]) -> None:
    """A step that is refused right before a checkpoint is undone before that is written."""
    plant(too_long, 21)
    often = ("checkpoint.every_steps=2", "techniques.spike_rewind.every=2", "goal.steps=26")
    whole = train(*ON, *often, "name=whole")
    (spike,) = report(whole)["spikes"]
    assert (spike["step"], spike["masked"], spike["rewound_to"]) == (22, 1, [20])
    train(*ON, *often, "name=cut", "goal.steps=22")
    cut = train(*ON, *often, "name=cut", resume=True)
    assert torch.equal(losses(whole), losses(cut))
    assert report(cut)["spikes"] == [spike]


def test_it_gives_up_with_one_error(
    train: Train, plant: Callable[..., None], tmp_path: Path
) -> None:
    """Data that stays bad is no spike: after the states that are kept there is one error."""
    plant(repeat_a_token, *range(20, 100))
    with pytest.raises(Diverged) as told:
        train(
            *ON, "techniques.spike_rewind.skip=3", "goal.steps=60", f"directory={tmp_path}/given_up"
        )
    message = told.value.message
    assert "step 20" in message and "going back to the states after steps" in message
    assert "checkpoints" in str(told.value.remedy) or "--checkpoint" in str(told.value.remedy)
    assert "techniques.spike_rewind.sigmas=12" in str(told.value.remedy)
    plant(repeat_a_token)  # the data is mended: the command goes on from before the fault
    command, _, _ = told.value.remedy.text.partition(" (or ")
    ended = CliRunner().invoke(app, shlex.split(command)[1:])
    assert ended.exit_code == 0, ended.output
    assert "--checkpoint step-16" in command


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_is_left_alone(train: Train, seed: int) -> None:
    run = train(*ON, f"seed={seed}", "goal.steps=24", "eval.every_steps=24", f"name=h{seed}")
    assert report(run)["spikes"] == [] and report(run)["skipped_steps"] == 0


def test_ranks_decide_together(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    """A weight that flips on one rank of two, whole and in slices, sends both back."""
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, FUNCTIONS, "both_go_back", **data)


# --- its parts -------------------------------------------------------------------------------


def test_a_band_by_hand() -> None:
    """Mean and deviation of the window; what stands out is not taken in; the oldest leaves."""
    band = Band(torch.device("cpu"), window=4, sigmas=2.0, warmup=2)

    def stands_out(loss: float, norm: float = 1.0) -> bool:
        pair = torch.tensor(loss), torch.tensor(norm)
        out = band.stands_out(*pair)
        band.take(*pair, ~out)
        return bool(out)

    assert not stands_out(3.0) and not stands_out(100.0), "nothing stands out before the warmup"
    assert stands_out(float("nan")) and stands_out(1.0, float("inf"))
    assert [stands_out(x) for x in (3.0, 3.0)] == [False, False]
    assert not stands_out(5.0) and not stands_out(4.0), "they push out 3 and 100"
    mean, deviation = 3.75, (0.75**2 * 2 + 1.25**2 + 0.25**2) ** 0.5 / 2
    limit = mean + 2 * deviation
    assert stands_out(limit + 0.01) and not stands_out(limit - 0.01)
    assert float(band.limits[0]) == pytest.approx(limit, rel=1e-5)
    assert stands_out(4.0, 4.01) and not stands_out(4.0, 3.99), "without spread, 1.5 of the mean"
    assert not stands_out(0.0, 0.0) and float(band.count) == 8, "no target: not taken in"


def test_the_newest_sound_state_stays(make_tiny: Callable[..., Build]) -> None:
    """Room is made by the earliest other state; a return is exact, and forgets what came after."""
    build = make_tiny()
    kept = KeptStates(2, "spike_rewind")
    weight = next(build.model.parameters())
    for step in range(4):
        with torch.no_grad():
            weight.fill_(step)
        kept.take(build, step, sound=1)
    assert [state.step for state in kept.states] == [1, 3]
    kept.restore(build, kept.states[0])
    assert bool((weight == 1).all()) and [state.step for state in kept.states] == [1]


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "ademamix", "lion", "muon", "schedule_free", "sophia"],
)
def test_a_return_to_the_start_begins_every_optimizer_anew(
    optimizer: str, make_tiny: Callable[..., Build]
) -> None:
    """Three steps, a return, and the same steps again: states are a new run's, to the bit."""
    keys = ["schedule.kind=constant", f"techniques.{optimizer}={{}}"]
    keys += ["techniques.muon.normalize_rows=true"] if optimizer == "muon" else []
    build = make_tiny(*keys)
    kept = KeptStates(1, "nobody")
    kept.take(build, 0, sound=0)
    first, again = [], []
    for numbers in (first, again):
        for index in range(3):
            numbers.append(trainer.step(build, build.loader.step(index).micros, index))
        kept.restore(build, kept.states[0])
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


def watched(build: Build, *refused: int, **knobs: int) -> SpikeWatch:
    """What a watch did in 40 steps, the refused ones of which left the band."""
    watch = SpikeWatch(SpikeRewind(**knobs), build, every=1)
    for step in range(1, 41):
        build.now["step"] = step - 1
        watch.before_step(build)
        if step in refused:
            watch.flagged[step] = 9.0, 9.0
    return watch


def test_how_many_steps_and_rewinds_it_takes(make_tiny: Callable[..., Build]) -> None:
    """`patience` steps in a row lead back; `most` rewinds `within` so many steps are the last."""
    build = make_tiny("goal.steps=999", "eval.every_steps=999", "checkpoint.every_steps=0")
    two, later = (10, 11), (20, 21)
    assert watched(build, *two, patience=2).rewinds == [11]
    assert watched(build, *two, patience=3).rewinds == []
    assert watched(build, *two, 12, patience=3).rewinds == [12]
    both = watched(build, *two, *later, patience=2, most=2)
    assert both.rewinds == [11, 21] and not both.hopeless
    last = watched(build, *two, *later, patience=2, most=1)
    assert last.rewinds == [11] and last.hopeless
    apart = watched(build, *two, *later, patience=2, most=1, within=10)
    assert apart.rewinds == [21] and not apart.hopeless


def test_what_is_held_is_predicted(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    build = make_tiny("techniques.spike_rewind.every=2", "checkpoint.every_steps=0")
    for index in range(5):
        trainer.step(build, batch(build), index)
    watch = build.notes["spike_rewind"]
    measured = sum(state.nbytes for state in watch.copies.states)
    predicted = build.predicted(build.plan).sizes[KEPT_STATES]
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("saves", "every", "doubted"),
    [
        *((0, 50, False), (1, 50, False), (4, 4, False), (13, 13, False), (100, 50, False)),
        *((60, 30, False), (122, 61, False), (771, 257, True), (773, 773, True), (3027, 3, True)),
    ],
)
def test_states_are_kept_about_as_often_as_is_usual(
    tiny_plan: Callable[..., Plan], saves: int, every: int, doubted: bool
) -> None:
    """A number that nothing near 50 divides is doubted, and what is advised is not."""
    plan = tiny_plan("techniques.spike_rewind={}", f"checkpoint.every_steps={saves}")
    technique = plan.techniques["spike_rewind"]
    doubt = technique.doubt(plan)
    assert (doubt is not None) is doubted
    if doubt is not None:
        assert str(every) in doubt.reason and str(saves) in doubt.reason
        plan = tiny_plan("techniques.spike_rewind={}", doubt.remedy.only_override or "")
        assert technique.doubt(plan) is None
        return
    work = make_ledger(plan, make_context(plan, torch.device("cpu"))).work
    assert work["spike_rewind/copy"].count == pytest.approx(1 / every)


# --- what made the first number that is not finite -------------------------------------------


@pytest.fixture
def built(make_tiny: Callable[..., Build]) -> Iterator[Build]:
    build = make_tiny()
    yield build
    build.loader.close()


def test_the_first_module_is_named(built: Build) -> None:
    """Name a NaN in an activation, one in a gradient, and one in a weight, each by its place."""
    build, module = built, built.model.get_submodule("blocks.1.mlp")
    assert first_nonfinite(build, 0) is None, "a step that is finite has no source"
    before = build.loader.state()

    def spoil(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(torch.arange(output.size(-1)) == 3, float("inf"))

    hook = module.register_forward_hook(spoil)
    source = first_nonfinite(build, 0)
    hook.remove()
    assert source is not None and source.where is Where.MODULE
    assert (source.name, source.dtype) == ("blocks.1.mlp", "float32")
    assert source.kind == type(module).__name__
    assert 0 < source.largest < 100 and "blocks.1.mlp" in source.sentence

    weight = build.model.get_parameter("blocks.1.mixer.qkv.weight")
    hook = weight.register_hook(lambda grad: grad * float("nan"))
    source = first_nonfinite(build, 0)
    hook.remove()
    assert source is not None and source.where is Where.GRADIENT
    assert source.name == "blocks.1.mixer.qkv.weight"

    with torch.no_grad():
        weight[0, 0] = float("nan")
    source = first_nonfinite(build, 0)
    assert source is not None and source.where is Where.WEIGHT
    assert source.name == "blocks.1.mixer.qkv.weight" and 0 < source.largest < 100
    assert build.loader.state() == before
    assert all(p.grad is None for p in build.model.parameters())


def test_the_error_of_a_run_names_it(
    train: Train, tmp_path: Path, plant: Callable[..., None]
) -> None:
    """The plain trainer's error, by a compiled model too, has the module's name."""
    modules: list[Any] = []

    def spoil(build: Build, micros: list[Micro]) -> None:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * float("nan") if build.now["step"] == 2 else output

        modules.append(build.model.get_submodule("blocks.0.mlp").register_forward_hook(hook))

    plant(spoil, 1)
    with pytest.raises(Diverged, match=r"blocks\.0\.mlp") as told:
        train("guard=false")
    assert "step 3" in told.value.message
    assert "blocks.0.mlp" in report(tmp_path / "runs" / "tiny")["message"]
    row = json.loads((tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()[-1])
    assert row["masked"] == 1
