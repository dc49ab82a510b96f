"""What the host takes to launch a step is foreseen: by kernels, calls and what Python sees."""

import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.build import predict
from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.ledger import Ledger
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.work import CHOSEN, COMPILED, CUSTOM, EAGER, RERUN, step_time
from headrace.planner.foresight import foresee

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
kernel_gaps = import_module("kernel_gaps")
H200 = Machine.assumed("NVIDIA H200")
LAYERS = 12
TRUNK = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"


def on_h200(plan: Plan) -> Any:
    """Where it would run."""
    return elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")


def ledger_of(*words: str) -> Ledger:
    """Of the 160m trunk with changes."""
    text = (ROOT / "benchmarks" / "plans" / "160m.toml").read_text()
    more = [w[1:] for w in words if w[0] == "+"]
    plan = Plan.read(
        text, catalogue(), overrides=[w for w in words if w[0] != "+"], with_=more,
        without=[w[1:] for w in TRUNK.split() if w[1:] not in more],
    )  # fmt: skip
    return predict(plan, on_h200(plan))


def launches(ledger: Ledger) -> float:
    """Of a micro-batch, in launches of an empty kernel."""
    host_s = step_time(ledger.work, H200, 2).host_s - step_time(ledger.work, H200, 1).host_s
    return host_s / H200.launch_s


def test_steps_that_waited_for_launches_take_as_long_as_foreseen() -> None:
    rows = [json.loads(line) for line in (ROOT / "results/kernels.jsonl").read_text().splitlines()]
    waited = [row for row in rows if "--host" in row["command"]]
    assert len(waited) >= 3
    for row in waited:
        words = shlex.split(row["command"])[2:]
        words = [w for w in words if w != "--host"]
        at = words.index("--longest")
        plan = kernel_gaps.plan_from(kernel_gaps.parser().parse_args(words[:at] + words[at + 2 :]))
        seen = foresee(plan, on_h200(plan), H200)
        assert seen.waits_for_launches and seen.step_s is not None
        assert 1e3 * seen.step_s == pytest.approx(row["metrics"]["step"]["value"], rel=0.025)


@pytest.mark.parametrize(
    ("name", "each"), [("full_checkpoint", RERUN), ("selective_checkpoint", CHOSEN)]
)
def test_python_sees_what_an_eager_block_saves_and_a_compiled_one_does_not(
    name: str, each: float
) -> None:
    """Beside it, what runs again is launched again."""
    trunk, on = launches(ledger_of()), launches(ledger_of(f"+{name}"))
    forward = sum(
        p.count * p.kernels * p.launch for n, p in ledger_of().work.items()
        if p.phase == "forward" and not n.startswith(("head", "loss", "embedding"))
    )  # fmt: skip
    again = on - trunk - LAYERS * each
    assert 0.5 * forward < again < forward
    every = f"techniques.{name}.every=2"
    half = launches(ledger_of(f"+{name}", every)) - trunk
    assert half == pytest.approx((on - trunk) / 2, rel=0.01)
    compiled = launches(ledger_of("+torch_compile"))
    more = launches(ledger_of(f"+{name}", "+torch_compile")) - compiled
    assert 0 < more < LAYERS * each / 2


def test_a_kernel_of_ours_is_launched_by_python_in_compiled_code_too() -> None:
    for more in ((), ("+torch_compile",)):
        before = ledger_of(*more)
        after = ledger_of("+fused_swiglu", *more)
        pieces = [after.work[f"activation/{way}"] for way in ("forward", "backward")]
        assert all(p.launch == CUSTOM and p.count == LAYERS for p in pieces)
        each = (2 + 4) * EAGER if not more else 2 * COMPILED
        gained = LAYERS * (2 * CUSTOM - each)
        assert launches(after) - launches(before) == pytest.approx(gained)


def test_a_norm_takes_the_addition_in() -> None:
    """One kernel forward and one backward for each norm, and none for the additions."""
    for more in ((), ("+torch_compile",)):
        fused = ledger_of("+fused_rms_norm", *more).work
        assert {fused[f"residual/{way}"].launch for way in ("forward", "backward")} == {0.0}
        assert fused["norms/forward"].launch == CUSTOM
