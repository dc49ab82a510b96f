"""What the calls of `headrace.api` return, as objects that print and show themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.core.inline import inline_table, inline_text
from headrace.core.units import format_bytes, format_seconds
from headrace.doctor.advice import Advice
from headrace.doctor.findings import Finding
from headrace.doctor.loop_remedies import LoopRemedy
from headrace.doctor.remedies import PlanRemedy
from headrace.doctor.words import describe
from headrace.doctor.words.answer import findings_json, render_advice, render_gain
from headrace.plan.plan import Plan
from headrace.predict.page import format_prediction
from headrace.predict.prediction import (
    MemoryPrediction,
    Prediction,
    RatesUsed,
    RunPrediction,
    TimePrediction,
)


@dataclass(frozen=True)
class DiagnosedFinding:
    """Hold one finding of the doctor in words, with its remedies, the best first.

    Args:
        finding: the finding itself: its kind, its share and its facts.
        remedies: what may be done about it; none where nothing is known to help.
        commands: what applies each remedy, in the same order.
    """

    finding: Finding
    remedies: tuple[PlanRemedy | LoopRemedy, ...]
    commands: tuple[str, ...]

    @property
    def bottleneck(self) -> str:
        """Return its public name, as "input"."""
        return self.finding.bottleneck

    @property
    def share(self) -> float:
        """Return its share of the time, or of what its sentence names, from 0 to 1."""
        return self.finding.share

    @property
    def sentence(self) -> str:
        """Return what it says."""
        return describe(self.finding).sentence

    @property
    def evidence(self) -> str:
        """Return the measurements that it rests on."""
        return describe(self.finding).evidence

    def rows(self) -> list[tuple[str, str]]:
        """Return each remedy's command with its forecast gain."""
        gains = map(render_gain, self.remedies)
        return list(zip(self.commands, gains, strict=True))

    def __str__(self) -> str:
        lines = [f"{self.bottleneck}: {self.sentence}", f"  {self.evidence}"]
        return "\n".join([*lines, *(f"  {command}: {gain}" for command, gain in self.rows())])

    def _repr_html_(self) -> str:
        title = f"{self.bottleneck}: {self.sentence} ({self.evidence})"
        return inline_table(
            title, ("remedy", "forecast gain") if self.remedies else (), self.rows()
        )


@dataclass(frozen=True)
class Diagnosis:
    """Hold the doctor's answer: its findings, the gravest first. It is iterated over like a list.

    Args:
        advice: the whole answer, with what its forecasts rest on.
    """

    advice: Advice

    @property
    def findings(self) -> tuple[DiagnosedFinding, ...]:
        """Return the findings with their remedies, the gravest first."""
        return tuple(
            DiagnosedFinding(
                one.finding,
                tuple(one.remedies),
                tuple(self.advice.command(remedy) for remedy in one.remedies),
            )
            for one in self.advice.findings
        )

    @property
    def first(self) -> str | None:
        """Return the command of the remedy to try first; None where there is none."""
        remedy = self.advice.first
        return None if remedy is None else self.advice.command(remedy)

    @property
    def healthy(self) -> bool | None:
        """Return whether no remedy is forecast to gain much; None where no gain is forecast."""
        return self.advice.healthy

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the findings as JSON values, as `headrace doctor --json` prints them."""
        return findings_json(self.advice)

    def __len__(self) -> int:
        return len(self.advice.findings)

    def __iter__(self) -> Iterator[DiagnosedFinding]:
        return iter(self.findings)

    def __getitem__(self, place: int) -> DiagnosedFinding:
        return self.findings[place]

    def __str__(self) -> str:
        return render_advice(self.advice)

    def _repr_html_(self) -> str:
        rows = [
            (
                one.bottleneck,
                f"{one.share:.0%}",
                f"{one.sentence} ({one.evidence})",
                "; ".join(f"{command}: {gain}" for command, gain in one.rows()[:1]),
            )
            for one in self.findings
        ]
        return inline_table("The doctor", ("bottleneck", "share", "finding", "best remedy"), rows)


@dataclass(frozen=True)
class PlanForecast:
    """Hold a plan, and what is predicted of it.

    Args:
        plan: the plan.
        prediction: what it is predicted to need and to take.
    """

    plan: Plan
    prediction: Prediction

    @property
    def memory(self) -> MemoryPrediction:
        """Return the memory that it needs, in bytes, and whether it fits."""
        return self.prediction.memory

    @property
    def time(self) -> TimePrediction:
        """Return how long a step takes, in seconds, and where it goes."""
        return self.prediction.time

    @property
    def run(self) -> RunPrediction:
        """Return when the run ends, and what it costs."""
        return self.prediction.run

    @property
    def rates(self) -> RatesUsed:
        """Return the rates that the prediction rests on."""
        return self.prediction.rates

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values, as `headrace plan --json` prints them."""
        return self.prediction.to_dict()

    def __str__(self) -> str:
        return format_prediction(self.plan, self.prediction)

    def _repr_html_(self) -> str:
        whole = inline_text(f"{self.plan.name} on {self.rates.device}", str(self))
        largest = sorted(self.memory.owners.items(), key=lambda one: -one[1])
        memory = [(name, format_bytes(size)) for name, size in largest]
        shares = self.time.shares()
        parts = [
            (name, format_seconds(spent_s), f"{shares[name]:.0%}")
            for name, spent_s in self.time.parts_s.items()
            if name in shares
        ]
        tables = [inline_table("Memory at the peak", (), memory)]
        if parts:
            tables.append(inline_table("A step", (), parts))
        return "".join([whole, *tables])
