"""Correct a model of step times by the measured steps of one plan, to predict other plans.

A machine's rates leave a systematic error: a clock that falls under load, kernels that are slower
beside others. Twenty measured steps of one plan show it. Each phase gets a factor, which is the
same for every plan afterwards. The pause between two steps and the data wait keep their length,
since they belong to no phase. A plan whose kernels differ wholly from those of the measured plan
has another error, which is left out.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from headrace.core.command import rerun_plan, rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import parse_json
from headrace.costs.step import StepTime
from headrace.costs.work import Phase, Work

ENOUGH = 20
"""Number of steady steps, the last ones of a run, of which the median is taken."""
PHASES: Mapping[Phase, str] = {
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""Phase of the model -> phase that a run measures."""
FAR = 3.0
"""Largest factor between measured and predicted time; its inverse is the smallest. A factor beyond
these means that something else was measured."""


@dataclass(frozen=True)
class MeasuredPlan:
    """Hold what the steady steps of one plan took.

    Args:
        step_s: median seconds of a step.
        phases_s: median seconds of "forward", "backward", "optimizer" and what else was timed in a
            step; empty where only whole steps were timed.
        steps: number of steps that were measured.
    """

    step_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    steps: int = ENOUGH

    @classmethod
    def of_run(cls, folder: Path) -> "MeasuredPlan":
        """Return what the last steady steps of a run took.

        The numbers come from the rows of metrics.jsonl, or from the sums in report.json where there
        are fewer than 3 steady rows.

        Raises:
            ConfigError: the run has no steady steps.
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
    def _of_report(cls, folder: Path) -> "MeasuredPlan":
        file = folder / "report.json"
        try:
            report = parse_json(file.read_bytes())
            rate, steps = report["steady_tokens_per_s"], report["steps"]
            step_s = report["tokens"] / steps / rate
            spent = {p: report["phase_s"][p] / steps for p in ("input", *set(PHASES.values()))}
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            raise ConfigError(
                f"{folder} has no steady steps to calibrate by: 3 at least, beside those that "
                "compile",
                rerun_plan("train", "goal.steps=30"),
            ) from None
        scale = step_s / sum(spent.values())  # the sums include steps that are not steady
        return cls(step_s, {p: scale * s for p, s in spent.items()}, steps)


@dataclass(frozen=True)
class Calibration:
    """Hold the factors that correct a model's phases, from measured steps of one plan.

    Args:
        factors: phase -> factor by which its device time is multiplied.
        waits_s: seconds that a step waits for data.
        plan: name of the plan whose steps were measured.
        steps: number of steps that were measured.
        workload: workload of that plan, as `intervals.workload` returns it.
        host: factor by which the host's time is multiplied. It is set where the measured steps are
            predicted to wait for launches; such steps show nothing about the device. Else it is
            None.
    """

    factors: Mapping[Phase, float]
    waits_s: float
    plan: str
    steps: int
    workload: Mapping[str, Work] = field(default_factory=dict)
    host: float | None = None

    @classmethod
    def of(cls, time: StepTime, measured: MeasuredPlan, plan: str) -> "Calibration":
        """Return the calibration with which `time` meets what was measured of the same plan.

        Args:
            time: the plan's step time by the machine's rates alone.
            measured: what steps of the plan took.
            plan: name of the plan.

        Raises:
            ConfigError: measured and predicted time are so far apart that something else was
                measured.
        """
        waits_s = max(0.0, measured.phases_s.get("input", 0.0) - time.edge_s)
        left_s = measured.step_s - waits_s - time.edge_s
        slower_s = time.step_s - time.edge_s
        whole = left_s / slower_s
        host = whole if time.by_host else None
        factors = dict.fromkeys(PHASES, 1.0 if time.by_host else whole)
        measured_s = {name: measured.phases_s.get(name, 0.0) for name in PHASES.values()}
        if all(measured_s.values()) and host is None:
            for phase, name in PHASES.items():
                model_s = sum(s for (p, _), s in time.device_s.items() if PHASES[p] == name)
                spent_s = left_s * measured_s[name] / sum(measured_s.values())
                factors[phase] = spent_s / model_s if model_s else whole
        if not all(1 / FAR < f < FAR for f in (whole, *factors.values())):
            raise ConfigError(
                f"a step of {plan} took {measured.step_s:.4g} s, and its model says "
                f"{time.step_s:.4g} s: too far apart to be the same plan on the same device",
                rerun_without("--after", verb="plan demo"),
            )
        return cls(factors, waits_s, plan, measured.steps, host=host)

    def applies_to(self, time: StepTime) -> bool:
        """Return whether the measured steps show anything about a step like this one.

        Measured steps that waited for launches show nothing about a step that does not.
        """
        return time.by_host or self.host is None

    def applied(self, time: StepTime) -> StepTime:
        """Return the time of this or another plan with the factors applied, without data waits."""
        device_s = {  # steps of one device show nothing of what is sent to others
            (phase, kind): s if kind == "collective" else self.factors[phase] * s
            for (phase, kind), s in time.device_s.items()
        }
        host_s = time.host_s if self.host is None else self.host * time.host_s
        return replace(time, device_s=device_s, host_s=host_s)

    def step_s(self, time: StepTime) -> float:
        """Return the seconds of a step, with a data wait as long as the measured one."""
        return self.applied(time).step_s + self.waits_s


def check_device(run: Path, device: str, name: str) -> None:
    """Refuse a run whose steps were measured on another device than the plans are for.

    A run whose environment.json cannot be read is accepted.

    Args:
        run: folder of the run.
        device: kind of the device that plans are predicted for, as "cuda".
        name: name of that device.

    Raises:
        ConfigError: the run's steps were measured on another device.
    """
    try:
        environment = parse_json((run / "environment.json").read_bytes())
        ran, its = environment["device"], environment["device_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the run's device is unavailable
    if ran != device or (ran == "cuda" and its != name):
        raise ConfigError(
            f"{run} ran on {its}, and its steps tell nothing of {name}",
            rerun_without("--after", verb="plan demo"),
        )


def _rows(file: Path) -> list[dict[str, float]]:
    """Return the numeric values of each row of a run's metrics.jsonl.

    A line that is still being written, or was truncated, is skipped.
    """
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
