"""Find what would hold up a plan that was not run, by its prediction."""

from typing import Any

from headrace.assemble.build import make_ledger
from headrace.costs.machine import ANCHOR_MATMUL, Machine
from headrace.costs.work import Matmul
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.rules import UNUSED
from headrace.plan.plan import Plan
from headrace.plan.symptoms import saves_memory
from headrace.plan.technique import Context
from headrace.predict.prediction import IDLE, LAUNCHES, PART_NAMES, Prediction

TRAFFIC_SHARE = 0.4
"""Share of the step in memory traffic from which a plan is called bound by it. Chosen."""
HOST_SHARE = 0.05
"""Share of the step in which the device would wait for launches, from which that is named."""


def plan_findings(
    plan: Plan, context: Context, machine: Machine, prediction: Prediction
) -> list[Finding]:
    """Return slow precision, memory that is missing or unused, and what takes most of the step."""
    return [
        *_in_fp32(plan, context, machine),
        *_memory(plan, prediction),
        _slowest(prediction),
    ]


def _in_fp32(plan: Plan, context: Context, machine: Machine) -> list[Finding]:
    """Return that matmuls are of fp32 numbers, where a GPU has faster ones."""
    work = make_ledger(plan, context).work.values() if context.device == "cuda" else ()
    wide = any(isinstance(piece, Matmul) and piece.precision == "fp32" for piece in work)
    if not wide or not any(known.precision == "bf16" for known in machine.matmuls):
        return []
    wide_s, half_s = (machine.matmul_s(p, *ANCHOR_MATMUL) for p in ("fp32", "bf16"))
    return [Finding(Kind.PLAN_IN_FP32, 0.0, {"fp32_s": wide_s, "bf16_s": half_s}, "inferred")]


def _memory(plan: Plan, prediction: Prediction) -> list[Finding]:
    """Return that the plan does not fit, or that memory is free, or what fills most of it."""
    filled = prediction.memory.peak_bytes / prediction.memory.capacity_bytes
    owner = next(iter(prediction.memory.owners), "")
    facts: dict[str, Any] = {
        "peak_bytes": prediction.memory.peak_bytes,
        "capacity_bytes": prediction.memory.capacity_bytes,
        "owner": owner,
    }

    def finding(kind: Kind, share: float, **more: Any) -> list[Finding]:
        return [Finding(kind, share, facts | more, "inferred")]

    saving = tuple(name for name, t in plan.techniques.items() if saves_memory(t.symptoms))
    micro_batches = plan.rows_per_step // (plan.micro_rows * plan.mesh.data)
    findings: list[Finding] = []
    if prediction.memory.fits != "yes":
        findings += finding(Kind.PLAN_DOES_NOT_FIT, filled, fits=prediction.memory.fits)
    elif saving and filled < UNUSED:
        findings += finding(Kind.PLAN_SAVES_NEEDLESSLY, 1 - filled, names=saving)
    elif micro_batches > 1 and filled < UNUSED:
        sizes = {"micro_batches": micro_batches, "rows": plan.micro_rows}
        findings += finding(Kind.PLAN_MICRO_BATCHES, 1 - filled, **sizes)
    if prediction.time.step_s is None and prediction.memory.fits == "yes":
        part = prediction.memory.owners.get(owner, 0.0) / max(prediction.memory.peak_bytes, 1.0)
        findings += finding(Kind.PLAN_MEMORY, filled, owner_share=part)
    return findings


def _slowest(prediction: Prediction) -> Finding:
    """Return what would take most of the step."""
    if prediction.time.step_s is None:
        return Finding(Kind.PLAN_WITHOUT_TIME, 0.0, {"why": prediction.time.unknown}, "inferred")
    shares = prediction.time.shares()
    idle = shares.get(LAUNCHES, 0.0)
    if idle >= HOST_SHARE:
        return Finding(Kind.PLAN_LAUNCH, idle, {"step_s": prediction.time.step_s}, "inferred")
    facts: dict[str, Any] = {"shares": shares}
    traffic = shares.get(PART_NAMES["stream"], 0.0)
    if traffic >= TRAFFIC_SHARE:
        return Finding(Kind.PLAN_MOVES_BYTES, traffic, facts, "inferred")
    works = {name: share for name, share in shares.items() if name not in IDLE}
    name = max(works, key=lambda work: works[work])
    bottleneck = "memory bandwidth"
    if name in (PART_NAMES["product"], PART_NAMES["attention"]):
        bottleneck = "computation"
    elif name == PART_NAMES["collective"]:
        bottleneck = "interconnect"
    facts |= {"bottleneck": bottleneck, "part": name}
    return Finding(Kind.PLAN_STEP, works[name], facts, "inferred")
