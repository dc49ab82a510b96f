"""Record who filled which socket, and check whether what was asked for is in force.

Neither trusts a technique's word: the sockets are compared before and after it, and its evidence is
read from the run. Attention that no technique filled is torch's own choice among several kernels,
and is therefore examined too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import COMPOSED, OWNED, Build
from headrace.core.errors import RunError
from headrace.core.remedy import mend
from headrace.model.attention import SelfAttention, kernels_of, operations_of
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import Evidence, Technique

PATIENT_STEPS = 32
"""How many steps a trial runs to reach one with targets, before it gives up."""


def fillers(build: Build) -> dict[str, Any]:
    """Return what every socket holds now, by name, as values that can be compared."""
    now: dict[str, Any] = {name: getattr(build, name) for name in OWNED}
    now |= {f"parts.{key}": value for key, value in vars(build.parts).items()}
    now |= {f"config.{key}": value for key, value in build.config}
    for name in COMPOSED:
        value = getattr(build, name)
        now[name] = value.copy() if isinstance(value, list | dict) else value
    now["layouts"] = {name: repr(layout) for name, layout in build.layouts.items()}
    return now


def record(build: Build, technique: Technique[Any], before: dict[str, Any]) -> None:
    """Note which sockets `technique` changed since `before`; an undeclared one is a bug."""
    after = fillers(build)
    touched = [n for n in after if after[n] is not before[n] and after[n] != before[n]]
    undeclared = set(touched) - set(technique.claims) - set(technique.composes)
    assert not undeclared, f"{technique.name()} touched undeclared sockets {sorted(undeclared)}"
    for name in touched:
        build.filled.setdefault(name, []).append(technique.name())


def check_active(build: Build) -> dict[str, Any]:
    """Return every technique's evidence, by name, after a step that counted a target.

    Raises:
        RunError: on some rank a technique is not in force, or no rank has evidence of it.
    """
    evidence_by_name = {}
    for technique in build.techniques:
        evidence = technique.active(build)
        states = build.world.gather((evidence.active, evidence.detail))
        wrong = [detail for active, detail in states if active is False]
        if wrong or all(active is None for active, _ in states):
            raise RunError(
                f"{technique.name()} was asked for and is not in force: {(wrong or states[0])[-1]}",
                mend(f"-{technique.name()}"),
            )
        evidence_by_name[technique.name()] = evidence
    return evidence_by_name


def evidence_after(
    build: Build, numbers: Sequence[float] | Tensor, *, last: bool = False
) -> dict[str, str] | None:
    """Return every technique's evidence in words, or None where the step counted no target.

    A step without targets gives no gradient to anything, so that a technique in force looks as if
    it were not.

    Args:
        build: the run.
        numbers: the step's numbers, as `train.step` returns them; reading waits for the device.
        last: whether this is the last time that the evidence is asked for.

    Raises:
        RunError: a technique is not in force, or the last step to show it counted no target.
    """
    if float(numbers[3]) > 0 or not build.techniques:
        return {name: proof.detail for name, proof in check_active(build).items()}
    if last:
        names = ", ".join(technique.name() for technique in build.techniques)
        raise RunError(
            f"no step counted a target so far, so that nothing shows whether {names} is in force",
            "data.sources=PATH of text whose first steps have targets",
        )
    return None


@dataclass(frozen=True)
class LastLook:
    """Hold what techniques show at a run's end.

    Args:
        lost: techniques that were in force and are not any more, by their evidence on any rank.
        unseen: techniques that showed nothing, as after a step without targets -> why.
        evidence: of the techniques that this rank sees in force, with what they counted so far.
        reached: of each technique that trains parts of its own, whether a gradient reached each.
    """

    lost: list[str]
    unseen: dict[str, str]
    evidence: Mapping[str, Evidence]
    reached: Mapping[str, Mapping[str, bool]]


def last_look(build: Build, counted: bool) -> LastLook:
    """Ask every technique again whether it is in force; an error there does not end the run.

    Args:
        build: the run, at its end.
        counted: whether its last step counted a target.
    """
    lost, unseen, seen, reached = [], {}, {}, {}
    for technique in build.techniques:
        try:
            evidence = technique.active(build)
            active: bool | str | None = evidence.active
            if active:
                seen[technique.name()] = evidence
            parts = dict(technique.reached(build))
        except Exception as error:
            active, parts = f"nobody could look: {error}", {}
        looks = build.world.gather((active, parts))
        answers = [active for active, _ in looks]
        names = [name for _, parts in looks for name in parts]
        if names:  # a rank may hold no row of a part that learned
            reached[technique.name()] = {
                name: any(parts.get(name) for _, parts in looks) for name in names
            }
        failed = [active for active in answers if isinstance(active, str)]
        missing = False in answers or all(active is None for active in answers)
        if missing and counted:
            lost.append(technique.name())
        elif missing:
            unseen[technique.name()] = "the last step counted no target"
        elif failed:
            unseen[technique.name()] = failed[0]
    return LastLook(lost, unseen, seen, reached)


def newest(build: Build) -> dict[str, str]:
    """Return evidence in words of each technique that is in force, with what it counted so far."""
    return {name: seen.detail for name, seen in last_look(build, True).evidence.items()}


def note_own_attention(build: Build) -> None:
    """Note and report, after one step, which kernels torch's own choice of attention launches.

    The model's backend is called again for each of its masks, in the first rank's shapes, precision
    and flags, outside of compiled code. A technique that fills attention has evidence of its own,
    and nothing is noted.
    """
    layers = [m.layer for m in build.model.modules() if isinstance(m, SelfAttention)]
    if "parts.attend" in build.filled or build.world.rank or not layers:
        return
    attend, on_gpu = build.model.attend, build.device.type == "cuda"
    operations: dict[str, None] = {}
    kernels: dict[str, None] = {}
    why = ""
    try:
        with build.autocast(), torch.enable_grad():
            for spec in dict.fromkeys(map(build.model.mask.of_layer, layers)):
                q, k, mask = _asked(build, spec)
                operations |= dict.fromkeys(operations_of(attend(q, k, k, mask)))
                if on_gpu:
                    kernels |= dict.fromkeys(kernels_of(attend, q, k, k, mask, only="CUDA"))
    except Exception as error:  # this check must not end a run
        why = f" ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
    launches = kernels if on_gpu else operations
    message = f"torch ran {', '.join(operations)}" if operations else "what torch ran was not seen"
    unseen = ", whose kernels were not seen" if operations and not launches else ""
    build.run_notes.own_attention = {"kernels": [*launches], "detail": message + unseen + why}
    build.note_line(f"attention: {message}{unseen}{why}")


def _asked(build: Build, spec: MaskSpec) -> tuple[Tensor, Tensor, Any]:
    """Return zeros as queries [B, T, H, K] and keys [B, T, G, K], and the backend's mask."""
    config, plan, device = build.config, build.plan, build.device
    B, T, ranks = plan.micro_rows, plan.data.sequence_length, build.world.size("tensor")
    half = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if half else torch.float32
    like = torch.zeros(B, T, 1, config.resolved_head_dim, device=device, dtype=dtype)
    q_BTHK, k_BTGK = (
        like.repeat(1, 1, max(1, heads // ranks), 1).requires_grad_()
        for heads in (config.heads, config.resolved_kv_heads)
    )
    places_BT = torch.arange(T, device=device).expand(B, T)
    rows = Rows(places_BT, torch.zeros_like(places_BT) if spec.document else None)
    return q_BTHK, k_BTGK, build.model.attend.prepare(spec, rows, T)
