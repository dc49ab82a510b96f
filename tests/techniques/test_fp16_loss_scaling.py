"""Test that the scale of the loss is exact, finds itself, is kept, and is patient."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from facts import in_order
from tiny import tensors

from headrace.assemble.sockets import Build
from headrace.core.errors import Diverged
from headrace.core.progress import Progress
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.techniques.precision.fp16_loss_scaling import LARGEST, Scale
from headrace.train import train as trainer
from headrace.train.checkpoint import Saved
from headrace.train.train import step

GOOD, BAD = torch.ones(()), torch.zeros(())
NAME = "fp16_loss_scaling"


def history(finite: str, *, start: float = 8.0, growth_steps: int = 3) -> list[float]:
    """Return the scale after each step of a word of g(ood) and b(ad)."""
    state, found = Scale(start, torch.device("cpu")), []
    for letter in finite:
        state.update(GOOD if letter == "g" else BAD, growth_steps)
        found.append(float(state.scale))
    return found


def test_the_scale_finds_itself() -> None:
    assert history("gggggg") == [8, 8, 16, 16, 16, 32]
    assert history("ggbggg") == [8, 8, 4, 4, 4, 8], "a bad step begins the count anew"
    assert history("bb") == [4, 2]
    assert history("b" * 9)[-1] == 1.0
    assert history("g" * 90)[-1] == LARGEST


@pytest.mark.parametrize("exponent", [0, 7, 24])
def test_losses_gradients_and_weights_are_the_baselines_bit_for_bit(
    exponent: int, make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    baseline = make_tiny("batch.micro_sequences=2")
    scaled = make_tiny("batch.micro_sequences=2", f"techniques.{NAME}.exponent={exponent}")
    for index in range(3):
        numbers = [step(build, batch(build), index) for build in (baseline, scaled)]
        assert torch.equal(*numbers)
    for one, two in zip(baseline.model.parameters(), scaled.model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.equal(one.grad, two.grad) and torch.equal(one, two)


def test_fp16_keeps_gradients_that_it_would_lose(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """The loss is made so small that fp16 rounds its gradients away; the scale brings them back."""
    right = make_tiny("optimizer.clip_norm=0")
    step(right, batch(right), 0)
    off = {}
    for exponent in (0, 20):
        build = make_tiny(
            f"techniques.{NAME}.exponent={exponent}",
            "model.precision=fp16",
            "optimizer.clip_norm=0",
        )
        plain = build.objective
        build.objective = lambda *args, plain=plain: plain(*args) * 2.0**-16
        step(build, batch(build), 0)
        name = "blocks.0.mlp.gate_up.weight"
        grad, wanted = (b.model.get_parameter(name).grad for b in (build, right))
        assert grad is not None and wanted is not None
        off[exponent] = float((grad * 2.0**16 - wanted).norm() / wanted.norm())
    assert off[20] < 0.02 < 0.2 < off[0], off


def test_a_bad_step_is_masked_and_halves(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(f"techniques.{NAME}.exponent=10")
    step(build, batch(build), 0)
    before = [p.detach().clone() for p in build.model.parameters()]
    plain = build.objective
    build.objective = lambda *args: plain(*args) * torch.inf
    numbers = step(build, batch(build), 1)
    assert numbers[2] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, build.model.parameters(), strict=True))
    assert float(build.notes[NAME].scale) == 2.0**9


def test_evidence_wants_a_scale_that_adapts(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(f"techniques.{NAME}.exponent=10")
    technique = build.plan.techniques[NAME]
    adapt = build.after_update.pop()
    step(build, batch(build), 0)
    assert not technique.active(build).active, "the loss is scaled by what never changes"
    build.after_update.append(adapt)
    step(build, batch(build), 1)
    assert technique.active(build).active


def test_patience_counts_steps_in_a_row(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(f"techniques.{NAME}.patience=3")
    row = {"loss": float("inf")}
    for index in (1, 2, 4, 5):
        build.recover(build, index, row)
    with pytest.raises(Diverged, match=in_order("3 steps", "step 6")) as told:
        build.recover(build, 6, row)
    assert ("model.precision=fp32", f"-{NAME}") in told.value.remedy.changes


def test_a_resumed_run_goes_on_with_the_same_scale(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(f"techniques.{NAME}.exponent=3", f"techniques.{NAME}.growth_steps=3")
    folder = trainer.run(plan).folder
    ends = [report_of(folder)]
    folder = trainer.run(plan, progress=Progress(), resume=True, checkpoint="step-8").folder
    ends.append(report_of(folder))
    assert ends[0] == ends[1]


def test_all_skipped_steps_are_counted_over_a_resume(train: Callable[..., Path]) -> None:
    """The run counts them all, in every checkpoint; the technique those in a row."""
    keys = (
        "model.precision=fp16",
        f"techniques.{NAME}.exponent=24",
        f"techniques.{NAME}.growth_steps=1",
        "eval.every_steps=100",
        "checkpoint.keep_last=3",
    )
    folder = train(*keys)
    text = (folder / "metrics.jsonl").read_text()
    bad = [row["step"] for row in map(json.loads, text.splitlines()) if row["grad_norm"] is None]
    assert bad[0] == 1 and 8 < bad[-1] < 12, "some before each checkpoint and after it"
    for resume in (False, True):
        if resume:
            folder = train(*keys, resume=True, checkpoint="step-4")
        for at in (4, 8, 12):
            saved = Saved(folder / "checkpoints" / f"step-{at}").values
            assert saved["counters"]["skipped_steps"] == sum(step <= at for step in bad)
            last = max(step for step in bad if step <= at)
            row = next(n for n in range(1, 99) if last - n not in bad)
            assert saved["techniques"][NAME] == {"skipped": row, "last_skipped": last}
        assert json.loads((folder / "report.json").read_text())["skipped_steps"] == len(bad)


def report_of(folder: Path) -> dict[str, float]:
    """Return the technique's tensors in the newest checkpoint."""
    found = tensors(folder / "checkpoints" / "latest")
    return {n: t.item() for n, t in found.items() if n.startswith(f"technique/{NAME}/")}
