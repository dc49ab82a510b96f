"""A time model that meets the measured steps of one plan, to predict others by.

A machine's rates leave a systematic rest: a clock that falls under load, kernels slower beside
others. Twenty measured steps of one plan tell it. Each phase gets a factor, the same for every plan
afterwards; the pause between two steps and the wait for data keep their length, for they belong to
none. A plan whose kernels differ wholly from the measured one's has another rest: left out.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from headrace.core.command import again_without, plan_again
from headrace.core.errors import ConfigError
from headrace.core.files import parse_json
from headrace.costs.step import StepTime
from headrace.costs.work import Phase, Work

ENOUGH = 20
"""Steps whose median counts."""
PHASES: Mapping[Phase, str] = {
    "forward": "forward", "recompute": "backward", "backward": "backward", "optimizer": "optimizer",
}  # fmt: skip
"""phase of the model -> phase that a run measures"""
FAR = 3.0
"""A factor beyond it, or below its inverse, says that something else was measured."""


@dataclass(frozen=True)
class Measured:
    """Steady steps of one plan.

    Args:
        step_s: median.
        phases_s: medians of "forward", "backward", "optimizer" and what else was timed in a step;
            empty where only whole steps were.
        steps: how many.
    """

    step_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    steps: int = ENOUGH

    @classmethod
    def of_run(cls, folder: Path) -> "Measured":
        """The last steady steps of a run: of metrics.jsonl, or as report.json sums them up.

        Raises:
            ConfigError: it has no steady steps.
        """
        rows = [r for r in _rows(folder / "metrics.jsonl") if not r.get("compile_s")]
        rows = [r for r in rows[1:] if 0 < r.get("step_s", 0.0) < math.inf][-ENOUGH:]
        if len(rows) >= 3:
            phases = {
                p: median(r[f"{p}_s"] for r in rows)
                for p in ("input", *set(PHASES.values()))
                if all(f"{p}_s" in r for r in rows)
            }
            return cls(median(r["step_s"] for r in rows), phases, len(rows))
        return cls._of_report(folder)

    @classmethod
    def _of_report(cls, folder: Path) -> "Measured":
        file = folder / "report.json"
        try:
            report = parse_json(file.read_bytes())
            rate, steps = report["steady_tokens_per_s"], report["steps"]
            step_s = report["tokens"] / steps / rate
            spent = {p: report["phase_s"][p] / steps for p in ("input", *set(PHASES.values()))}
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            raise ConfigError(
                f"{folder} has no steady steps to calibrate by: 3 at least, beside those that "
                "compile", plan_again("train", "goal.steps=30"),
            ) from None  # fmt: skip
        scale = step_s / sum(spent.values())  # the sums have steps in them that are not steady
        return cls(step_s, {p: scale * s for p, s in spent.items()}, steps)


@dataclass(frozen=True)
class Calibration:
    """Factors by which a model's phases are multiplied.

    Args:
        factors: phase -> factor.
        waits_s: of a step, for data.
        plan: whose steps were measured.
        steps: how many.
        workload: that plan's, as `intervals.workload` tells it.
        host: by which the host's time is; its steps tell it where they are foreseen to wait for
            launches, and nothing of the device.
    """

    factors: Mapping[Phase, float]
    waits_s: float
    plan: str
    steps: int
    workload: Mapping[str, Work] = field(default_factory=dict)
    host: float | None = None

    @classmethod
    def of(cls, time: StepTime, measured: Measured, plan: str) -> "Calibration":
        """What makes `time` meet what was measured of the same plan.

        Args:
            time: of the plan by rates alone.
            measured: of it.
            plan: its name.

        Raises:
            ConfigError: they are so far apart that something else was measured.
        """
        waits_s = max(0.0, measured.phases_s.get("input", 0.0) - time.edge_s)
        left_s = measured.step_s - waits_s - time.edge_s
        slower_s = time.step_s - time.edge_s
        whole = left_s / slower_s
        host = whole if time.by_host else None
        factors = dict.fromkeys(PHASES, 1.0 if time.by_host else whole)
        told = {name: measured.phases_s.get(name, 0.0) for name in PHASES.values()}
        if all(told.values()) and host is None:
            for phase, name in PHASES.items():
                model_s = sum(s for (p, _), s in time.device_s.items() if PHASES[p] == name)
                spent_s = left_s * told[name] / sum(told.values())
                factors[phase] = spent_s / model_s if model_s else whole
        if not all(1 / FAR < f < FAR for f in (whole, *factors.values())):
            raise ConfigError(
                f"a step of {plan} took {measured.step_s:.4g} s, and its model says "
                f"{time.step_s:.4g} s: too far apart to be the same plan on the same device",
                again_without("--after", verb="plan demo"),
            )
        return cls(factors, waits_s, plan, measured.steps, host=host)

    def tells(self, time: StepTime) -> bool:
        """Whether its steps say anything of such a one."""
        return time.by_host or self.host is None

    def applied(self, time: StepTime) -> StepTime:
        """Another plan's time, or the same one's, without waits."""
        device_s = {  # a device alone tells nothing of what is sent to others
            (phase, kind): s if kind == "collective" else self.factors[phase] * s
            for (phase, kind), s in time.device_s.items()
        }
        host_s = time.host_s if self.host is None else self.host * time.host_s
        return replace(time, device_s=device_s, host_s=host_s)

    def step_s(self, time: StepTime) -> float:
        """Of a step, with waits as long as the measured ones."""
        return self.applied(time).step_s + self.waits_s


def check_device(run: Path, device: str, name: str) -> None:
    """Steps tell of the device that they ran on.

    Raises:
        ConfigError: a run's were measured on another one than `name`, of which plans are asked.
    """
    try:
        told = parse_json((run / "environment.json").read_bytes())
        ran, its = told["device"], told["device_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # a run that nothing is known of
    if ran != device or (ran == "cuda" and its != name):
        raise ConfigError(
            f"{run} ran on {its}, and its steps tell nothing of {name}",
            again_without("--after", verb="plan demo"),
        )


def _rows(file: Path) -> list[dict[str, float]]:
    """The numbers of a run's rows; a line that is being written, or was cut short, is none."""
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(parse_json(line))
    return [
        {key: value for key, value in row.items() if isinstance(value, (int, float))}
        for row in rows
        if isinstance(row, dict)
    ]
