"""Compare the first step with the plain trainer's: right combinations pass, faults end the run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import house
import pytest
import torch
from house import Variant, toy

from headrace.assemble.sockets import Build, RunNotes
from headrace.core.errors import RunError
from headrace.plan.technique import Stage
from headrace.train.guard import First, compare, guard
from headrace.train.train import step


def first_step(*techniques: Any, **keys: Any) -> Build:
    """A build that has taken its first guarded step."""
    build = house.build_of(house.make_plan(*techniques, **keys))
    inspect = guard(build, step)
    micros = build.loader.step(0).micros
    build.loader.close()
    step(build, micros, 0, inspect)
    return build


RIGHT: tuple[tuple[str, ...], ...] = (
    ("selective_checkpoint", "chunked_cross_entropy", "document_packing"),
    ("torch_compile", "selective_checkpoint", "muon"),
    ("lora", "selective_checkpoint"),
    ("torch_compile", "chunked_cross_entropy", "z_loss"),
    ("fp16_loss_scaling", "chunked_cross_entropy"),
    ("mixture_of_experts", "selective_checkpoint", "sophia"),
)


@pytest.mark.parametrize(
    ("names", "micro_rows"),
    [
        pytest.param(
            names,
            rows,
            id=f"{'+'.join(names)}-{rows}",
            # A compiled step of several micro-batches is a compiled step, and one is enough.
            marks=[pytest.mark.slow] * ("torch_compile" in names and ("muon" in names or not rows)),
        )
        for names in RIGHT
        for rows in (0, 2)
    ],
)
def test_a_right_combination_passes(names: tuple[str, ...], micro_rows: int) -> None:
    techniques = [Variant(n, house.tiny_knobs(n, "cpu")).technique() for n in names]
    build = first_step(*techniques, micro_rows=micro_rows)
    told = build.run_notes.guard
    assert told["compared"] and told["gradients"] > 4
    assert told["off"] < 1e-3 and told["loss_off"] < 1e-4


ROUNDED: tuple[tuple[str, ...], ...] = (
    ("bf16_parameters",),
    ("float8_linear",),
    ("fp16_loss_scaling",),
    ("float8_linear", "chunked_cross_entropy", "z_loss"),
    ("bf16_parameters", "float8_linear", "torch_compile"),
)
"""What rounds more than the plain trainer does, alone and beside others."""


def rounded(names: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Techniques and keys of a plan whose weights do not magnify what is rounded."""
    precision = "fp16" if "fp16_loss_scaling" in names else "auto"
    techniques = [Variant(n, house.tiny_knobs(n, "cpu")).technique() for n in names]
    return techniques, {"precision": precision, "model": {"init_std": 0.02}}


@pytest.mark.parametrize(
    "names",
    [pytest.param(n, marks=[pytest.mark.slow] * ("torch_compile" in n)) for n in ROUNDED],
    ids="+".join,
)
def test_what_is_approximate_lies_within_its_band(names: tuple[str, ...]) -> None:
    techniques, keys = rounded(names)
    told = first_step(*techniques, **keys).run_notes.guard
    assert told["compared"] and told["gradients"] > 4
    assert told["kept"] == [n for n in names if n == "z_loss"]
    assert sorted(told["without"]) == sorted(n for n in names if n != "z_loss")
    assert 0 < told["off"] < told["band"] / 2


def scaled(build: Build) -> None:
    reduce = build.reduce

    def more(build: Build) -> None:
        reduce(build)
        for parameter in build.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.5)

    build.reduce = more


def shifted(build: Build) -> None:
    build.terms.append(lambda logits, targets, extras, vocabulary: logits.exp().sum() / 200)


@pytest.mark.parametrize(
    "names", [*ROUNDED[:3], pytest.param(ROUNDED[4], marks=pytest.mark.slow)], ids="+".join
)
@pytest.mark.parametrize("says", ["has norm", "first loss"])
def test_a_fault_beside_what_is_approximate_ends_the_run(names: tuple[str, ...], says: str) -> None:
    techniques, keys = rounded(names)
    if says == "has norm":
        bad = toy("bad", Stage.STEP, scaled, claims=("reduce",))
    else:
        bad = toy("bad", Stage.STEP, shifted, composes=("terms",))
    type(bad).equality, type(bad).band = "approximate", 0.05
    with pytest.raises(RunError, match=says) as told:
        first_step(*techniques, bad, **keys)
    assert all(f"{name}" in str(told.value) for name in (*names, "bad"))


def test_where_rounding_alone_goes_as_far_nothing_was_compared() -> None:
    """Take a model whose loss hangs on the last bits of its states, on both sides."""

    def chaos(build: Build) -> None:
        def wrap(f: Any, layer: int) -> Any:
            return lambda x, s: (
                f(x, s) * (1 + 0.9 * (1e9 * x.detach().double().mean()).sin().float())
            )

        build.wrap_blocks("chaos", wrap)

    learns = toy("chaos", Stage.MODEL, chaos, composes=("block_forward",))
    type(learns).equality = "learning"
    bad = toy("bad", Stage.STEP, scaled, claims=("reduce",))
    told = first_step(learns, bad).run_notes.guard
    assert told["compared"] is False and "rounding alone" in told["why"]


def test_the_plain_model_multiplies_fp32_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 is a flag of the process, which the run has set by then."""
    seen: list[str] = []

    def look(build: Build) -> None:
        def wrap(f: Any, layer: int) -> Any:
            def run(x: Any, s: Any) -> Any:
                seen.append(torch.get_float32_matmul_precision())
                return f(x, s)

            return run

        build.wrap_blocks("look", wrap)

    learns = toy("look", Stage.MODEL, look, composes=("block_forward",))
    type(learns).equality = "learning"
    torch.set_float32_matmul_precision("high")
    try:
        first_step(learns, Variant("full_checkpoint").technique())
    finally:
        torch.set_float32_matmul_precision("highest")
    plain = house.LAYERS * house.ROWS  # row by row
    assert seen[:plain] == ["highest"] * plain and set(seen[plain:]) == {"high"}


def test_a_step_that_overflows_fp16_ends_no_run() -> None:
    scale = Variant("fp16_loss_scaling", {"exponent": 24}).technique()
    told = first_step(scale, precision="fp16").run_notes.guard
    assert told["compared"] and told["gradients"] == 0 and told["worst"] == "the loss"


def test_an_owner_of_the_clip_that_frees_nothing_is_missed() -> None:
    def fault(build: Build) -> None:
        clip = build.clip
        build.clip = lambda build, limit: clip(build, limit)
        build.frozen.append(lambda name: name == "blocks.0.mlp_norm.weight")

    bad = toy("bad", Stage.FREEZE, fault, claims=("clip",), composes=("frozen",))
    with pytest.raises(RunError, match=r"blocks\.0\.mlp_norm\.weight has norm 0"):
        first_step(bad)


def test_gradients_that_an_update_has_freed_are_not_missed() -> None:
    build = first_step(Variant("optimizer_in_backward").technique())
    assert build.run_notes.guard["compared"] and build.run_notes.guard["gradients"] == 0


def frozen(build: Build) -> None:
    build.frozen.append(lambda name: name == "embed.weight")


def blind(build: Build) -> None:
    build.wrap_blocks("blind", lambda f, layer: lambda x, s: f(x.detach() if layer else x, s))


def louder(build: Build) -> None:
    build.terms.append(lambda logits, targets, extras, vocabulary: 0.01 * logits.square().sum())


def doubled(build: Build) -> None:
    reduce = build.reduce

    def twice(build: Build) -> None:
        reduce(build)
        for parameter in build.model.parameters():
            parameter.grad.mul_(2)  # type: ignore[union-attr]

    build.reduce = twice


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
@pytest.mark.parametrize(
    ("fault", "stage", "says"),
    [
        (frozen, Stage.FREEZE, "embed.weight has norm 0"),
        (blind, Stage.MODEL, "has norm"),
        (louder, Stage.STEP, "first loss"),
        (doubled, Stage.STEP, "has norm"),
    ],
)
def test_a_fault_ends_the_run_before_its_first_update(
    fault: Any, stage: Stage, says: str, clip_norm: float
) -> None:
    sockets = {frozen: ("frozen",), blind: ("block_forward",), louder: ("terms",)}
    claims = ("reduce",) if fault is doubled else ()
    bad = toy("bad", stage, fault, composes=sockets.get(fault, ()), claims=claims)
    build = house.build_of(house.make_plan(bad, optimizer={"clip_norm": clip_norm}))
    before = {n: p.detach().clone() for n, p in build.model.named_parameters()}
    inspect = guard(build, step)
    micros = build.loader.step(0).micros
    build.loader.close()
    with pytest.raises(RunError, match=says) as told:
        step(build, micros, 0, inspect)
    assert "without bad" in str(told.value) and "--without bad" in told.value.remedy.text
    for name, parameter in build.model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (First(2.0, 5.0, {"a": 3.0, "b": 4.0}), ""),
        (First(math.nan, 5.0, {"a": 3.0, "b": 4.0}), "first loss is nan"),
        (First(2.0, math.nan, {"a": 3.0, "b": math.nan}), "norm nan"),
        (First(2.0, 5.0, {"a": 3.0, "b": 4.0, "c": 1.0}), "gradient of c has norm 1, and 0"),
        (First(2.0, 5.0, {"a": 3.0, "b": 4.0, "c": 1e-6}), ""),
        (First(2.0, 3.0, {"a": 3.0}), "gradient of b has norm 0, and 4"),
    ],
)
def test_what_is_no_number_and_what_is_there_alone_is_apart(found: First, says: str) -> None:
    wanted = First(2.0, 5.0, {"a": 3.0, "b": 4.0})
    technique = SimpleNamespace(equality="exact", band=0.0, claims=("parts.head",), composes=())
    build: Any = SimpleNamespace(
        plan=SimpleNamespace(techniques={"one": technique}),
        run_notes=RunNotes(),
        optimizers={},
        note_line=print,
        context=SimpleNamespace(precision="fp32"),
        world=SimpleNamespace(any=bool),
    )
    again = lambda draw: "no memory"  # noqa: E731
    if not says:
        compare(build, found, wanted, again)
        return
    with pytest.raises(RunError, match=says):
        compare(build, found, wanted, again)


def test_says_why_nothing_was_compared() -> None:
    for technique in ((), (Variant("muon").technique(),), (Variant("bf16_autocast").technique(),)):
        told = first_step(*technique).run_notes.guard
        assert told["compared"] is False and "left out" in told["why"]
    off = first_step(Variant("selective_checkpoint").technique(), guard=False)
    assert off.run_notes.guard == {"compared": False, "why": "guard = false"}


def test_the_weights_are_those_of_an_unguarded_run() -> None:
    technique = Variant("selective_checkpoint").technique()
    builds = [first_step(technique, guard=asked) for asked in (True, False)]
    ours, theirs = (dict(b.model.named_parameters()) for b in builds)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_the_report_keeps_it_over_a_resume(tmp_path: Path, plan_file: Path, zygote: Any) -> None:
    short = ["--with", "full_checkpoint", "goal.steps=2", "schedule.steps=9", "name=g"]
    assert zygote.run(tmp_path, "train", str(plan_file), *short).code == 0
    plan = str(tmp_path / "runs" / "g" / "plan.toml")
    assert zygote.run(tmp_path, "train", plan, "--resume", "goal.steps=3").code == 0
    report = json.loads((tmp_path / "runs" / "g" / "report.json").read_text())
    assert report["steps"] == 3 and report["guard"]["compared"] is True
