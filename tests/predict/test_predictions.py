"""Check that predictions equal those of a committed file, to the last digit.

Whoever restructures the cost model changes no number; whoever means to change some writes the file
anew, and the difference shows which plans it moved and how far:

    python tests/predict/test_predictions.py

The plans are every 25th of the committed lists (benchmarks/plans), each technique alone, layouts of
several ranks, and the same with measured steps. Rates are those of datasheets, of a probed H100
(results/machines), and of a CPU that is made up.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
from probed_cpu import probed_cpu

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.costs.machine import Machine
from headrace.costs.rates import MeasuredStep
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.calibration import MeasuredPlan
from headrace.predict.prediction import calibrated, predict

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("predictions.json")
sys.path.append(str(ROOT / "benchmarks"))
lists = import_module("lists")
PROBED_H100 = "results/machines/h100-2026-11-25.json"
CPU = "cpu"
EVERY = 25
"""One of so many plans of a list is predicted."""
TEXTS = ("rates_say", "no_interval", "until", "between_ranks")
"""Fields that hold sentences, which may be reworded."""
FETCHED = ("flash_attention_3", "float8_linear", "liger_kernels", "qlora", "adamw_8bit")
"""Techniques whose packages are not everywhere."""
BARE = "-torch_compile -fused_cross_entropy -fused_swiglu -cudnn_attention"
ALONE = f"{BARE} -bf16_parameters"
RANKS = {
    "mesh.data=2": ALONE,
    "mesh.data=8": BARE,
    "mesh.data=8 +fsdp": ALONE,
    "mesh.data=2 +fsdp": "-bf16_parameters -torch_compile",
    "mesh.tensor=4 +tensor_parallel": ALONE,
    "mesh.tensor=2 mesh.data=2 +tensor_parallel +fsdp": ALONE,
    "mesh.context=4 +context_parallel": ALONE,
    "mesh.pipeline=4 batch.micro_sequences=2 +pipeline_parallel": ALONE,
}
"""Changes that lay a plan out along the mesh, with what must go for them."""


@dataclass(frozen=True)
class Case:
    """Name one plan on one machine.

    Args:
        on: a device's name, a file of rates, or "cpu".
        base: a plan file of benchmarks/plans, or a plan of its lists.
        words: changes of it.
        measured_s: seconds of a step of the first plan of its list's choice, which calibrate; 0
            without.
    """

    on: str
    base: str
    words: str = ""
    measured_s: float = 0.0

    @property
    def name(self) -> str:
        steps = f" after steps of {self.measured_s} s" if self.measured_s else ""
        return f"{self.base} {self.words}".rstrip() + f" on {self.on}{steps}"

    @property
    def plan(self) -> Plan:
        listed = _listed().get(self.base)
        text = (
            (ROOT / f"benchmarks/plans/{self.base}.toml").read_text()
            if listed is None
            else listed.text
        )
        words = [*(listed.words if listed else ()), *self.words.split()]
        return parse(words).plan(text, catalogue())

    def predicted(self) -> dict[str, Any]:
        """Return every number and word of the prediction, without its sentences."""
        plan, machine = self.plan, _machine(self.on)
        calibration = None
        if self.measured_s:
            first = lists.firsts()[_listed()[self.base].choice].plan
            steps = MeasuredPlan(self.measured_s)
            calibration = calibrated(first, _place(first, machine), machine, steps)
        seen = predict(plan, _place(plan, machine), machine, calibration).to_dict()
        kept = {key: value for key, value in seen.items() if key not in TEXTS}
        kept["unknown"] = bool(kept["unknown"])
        kept["widening"] = kept["widening"]["times"]
        return json.loads(json.dumps(kept))


@cache
def _listed() -> dict[str, Any]:
    every = [*lists.configurations(), *lists.configurations([lists.LISTS[0].with_name("cpu.toml")])]
    return {one.id: one for one in every}


@cache
def _machine(on: str) -> Machine:
    if on != CPU:
        return Machine.read(ROOT / on) if "/" in on else Machine.assumed(on)
    steps = [
        MeasuredStep(128, 4, 4, 2048, 32, 128, compiled, keeps, threads, seconds)
        for compiled, keeps, threads, seconds in (
            (False, False, 2, 0.31),
            (True, False, 2, 0.24),
            (False, True, 2, 0.27),
            (False, False, 1, 0.52),
        )
    ]
    steps.append(MeasuredStep(256, 4, 4, 4096, 16, 128, False, False, 2, 0.83))
    return replace(probed_cpu(*steps), memory_bytes=8 * 2**30)


def _place(plan: Plan, machine: Machine) -> Context:
    here = make_context(plan, torch.device("cpu"))
    return here if machine.kind == "cpu" else elsewhere(here, machine.name)


def _cases() -> Iterator[Case]:
    """Yield every case that the file shall hold; some contradict themselves."""
    h200 = "NVIDIA H200"
    every = list(lists.configurations())
    for one in every[::EVERY]:
        yield Case(h200, one.id)
    for one in every[5 :: 3 * EVERY]:
        yield Case(PROBED_H100, one.id)
    for one in [c for c in every if c.choice][8 :: 2 * EVERY]:
        yield Case(h200, one.id, measured_s=_slower_s(lists.firsts()[one.choice], h200))
    yield Case(h200, "1b", "hardware.dollars_per_hour=3.5 goal.steps=20000")
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"):
        yield Case(device, "160m")
        yield Case(device, "160m", ALONE)
    for words, gone in RANKS.items():
        yield Case("NVIDIA H100 80GB HBM3", "160m", f"{words} {gone}")
    yield Case("NVIDIA H100 80GB HBM3", "1b", f"mesh.data=8 +fsdp +muon {ALONE}")
    yield Case("NVIDIA H100 80GB HBM3", "7b", "mesh.data=8 +fsdp -torch_compile -bf16_parameters")
    yield Case(h200, "160m", f"model.precision=fp32 {ALONE}")
    yield Case(h200, "160m", f"model.precision=fp32 {ALONE} +tf32")
    for name in ("cuda_graphs", "memory_budget", "full_checkpoint", "sliding_window"):
        yield Case(h200, "160m", f"+{name}")
    for one in list(lists.configurations([lists.LISTS[0].with_name("cpu.toml")]))[::6]:
        yield Case(CPU, one.id)
    yield Case(h200, "160m", f"optimizer.clip_norm=0 {ALONE} +optimizer_in_backward")
    yield Case(h200, "160m", f"{ALONE} +flex_attention +logit_soft_cap")
    yield Case(h200, "160m", f"batch.tokens=2048 {ALONE}")
    for name in sorted(set(catalogue().techniques) - set(FETCHED)):
        yield Case(h200, "160m", f"{ALONE} +{name}".replace(f"-{name} ", ""))


def _slower_s(listed: Any, on: str) -> float:
    """Return seconds as a run might measure them: 4% more than predicted."""
    plan, machine = listed.plan, _machine(on)
    return round(1.04 * (predict(plan, _place(plan, machine), machine).time.step_s or 0.0), 3)


def _write() -> None:
    """Predict every case, and keep those that can run."""
    rows = []
    for case in dict.fromkeys(_cases()):
        try:
            rows.append({**vars(case), "predicted": case.predicted()})
        except HeadraceError as error:
            print(f"left out: {case.name}: {error.message[:100]}")
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} predictions in {FILE}")


ROWS = json.loads(FILE.read_text()) if FILE.is_file() else []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['on']} {row['base']} {row['words']}")
def test_a_prediction_is_the_committed_one(row: dict[str, Any]) -> None:
    wanted = row["predicted"]
    case = Case(**{key: value for key, value in row.items() if key != "predicted"})
    made = case.predicted()
    assert made == wanted, case.name
    for key in ("owners", "parts_s"):
        assert [*made[key]] == [*wanted[key]], f"{case.name}: another order"


def test_the_file_has_plans_of_every_kind() -> None:
    seen = [row["predicted"] for row in ROWS]
    assert {p["tier"] for p in seen} == {"no_gpu", "after_probes", "after_20_steps"}
    assert {p["basis"] for p in seen} >= {"on_cpu", "same_workload"}
    assert {p["fits"] for p in seen} == {"yes", "tight", "no"}
    assert any("exposed communication" in p["parts_s"] for p in seen)
    assert any("waiting for launches" in p["parts_s"] for p in seen)


if __name__ == "__main__":
    _write()
