"""Read and check the rows of predictions, verdicts and outcomes in results/TOPIC.jsonl.

Every row stands that no later row retracts; only a retraction, which gives its reason, takes one
out. A row that a program wrote as refused measured nothing: it is counted, and not read.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from headrace.core.errors import ConfigError
from headrace.core.files import shell

DAY = r"^\d{4}-\d\d-\d\d$"
"""The pattern of a day in a row; such texts sort as the days do."""


def on_cpu(hardware: str | None) -> bool:
    """Return whether a row's hardware is a processor, named with its cores or threads."""
    return hardware is not None and hardware.endswith((" cores", " threads"))


class Row(BaseModel):
    """Check what a row must hold; further fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Fault(Row):
    """Hold the doctor's verdict on a run with a planted fault.

    `severity` is the measured share of the step that the fault took; `wanted` is the intended one.
    """

    measurement: Literal["fault"]
    fault: str
    severity: float | None = Field(ge=0)
    wanted: float | None = Field(default=None, ge=0)
    workload: str
    held_out: bool
    expected: str
    verdict: str | None
    abstained: bool
    hardware: str | None = None

    @property
    def level(self) -> float | None:
        """Return the severity that was asked for; measured ones are never twice the same."""
        return self.severity if self.wanted is None else self.wanted

    @property
    def right(self) -> bool:
        """Return whether the verdict is the expected one, and the doctor does not abstain."""
        return not self.abstained and self.verdict == self.expected


class Healthy(Row):
    """Hold the doctor's verdict on a run without a fault."""

    measurement: Literal["healthy"]
    workload: str
    verdict: str | None
    abstained: bool
    hardware: str | None = None


class Spread(Row):
    """Hold a value between a low and a high end."""

    low: float
    value: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.low} <= {self.value} <= {self.high} does not hold")
        return self


class Gain(Row):
    """Hold the forecast gain of a remedy: time before over after, less 1.

    `of` is what the forecast is for: a plan that nobody ran, or a run, whose step was measured.
    """

    remedy: str
    workload: str
    forecast: Spread
    of: Literal["plan", "run"] = "plan"
    baseline_sha256: str
    date: str = Field(pattern=DAY)

    def same(self, commit: str | None) -> tuple[Any, ...]:
        """Return the facts that the row of a forecast and the row of its outcome share."""
        return (self.of, self.workload, self.remedy, self.forecast, self.baseline_sha256, commit)


class RecordedGain(Gain):
    """Hold a forecast gain as the code of `commit` recorded it."""

    commit: str | None


class Forecast(Gain):
    """Hold a forecast gain of the code of `forecast_commit`, and the measured gain."""

    measured: float
    forecast_commit: str | None = Field(alias="said")

    @model_validator(mode="after")
    def _nonzero(self) -> Self:
        if self.measured == 0:
            raise ValueError("a measured gain of exactly 0 was not measured")
        return self


class OverheadMetrics(Row):
    """Hold the share of a step that watching costs, or of the time before it that is added."""

    overhead: Spread


class Overhead(Row):
    """Hold what watching a run costs it, or what a commit adds before its first step.

    `n` is the number of readings.
    """

    measurement: Literal["always_on", "with_bursts", "first_step"]
    metrics: OverheadMetrics
    shape: str | None = None
    hardware: str | None = None
    every_steps: float | None = None
    n: int = Field(default=0, ge=0)


Tier = Literal["no_gpu", "after_probes", "after_20_steps"]
"""The tier of a prediction: which measurements the planner had."""
FIRST = "held_out"
"""The list that a command without --list uses."""


class PlanRow(Row):
    """Hold the fields that a prediction and its outcome share."""

    id: str | int
    step_s: float | None = Field(default=None, gt=0)
    allocated_bytes: float | None = Field(default=None, gt=0)
    reserved_bytes: float | None = Field(default=None, gt=0)
    fits: bool | None = None
    command: str = ""
    hardware: str | None = None
    device: str | None = None

    @property
    def list_name(self) -> str:
        """Return the list that its command names, or FIRST; "not told" without a command."""
        named = re.search(r"--list[ =](\S+)", self.command)
        if named:
            return Path(named[1]).stem
        return FIRST if self.command else "not told"


class Prediction(PlanRow):
    """Hold what the planner predicted before a run."""

    kind: Literal["prediction"]
    tier: Tier
    predicted_for: str | None = None

    @property
    def for_cpu(self) -> bool:
        """Return whether it predicts a step on a CPU; those of a GPU are written on any machine."""
        return self.device == "cpu" or on_cpu(self.predicted_for)


class Outcome(PlanRow):
    """Hold an outcome. `fits` is null if it was not run; `risky` means near the capacity."""

    kind: Literal["outcome"]
    risky: bool

    @property
    def on_cpu(self) -> bool:
        """Return whether it ran on a CPU."""
        return self.device == "cpu" or on_cpu(self.hardware)


class Candidate(Row):
    """Hold one plan of a choice."""

    id: str | int
    predicted_s: float = Field(gt=0)
    measured_s: float = Field(gt=0)


class Pick(Row):
    """Hold a choice whose candidates were all measured, with the predictions of one tier."""

    workload: str
    tier: Tier | None = None
    candidates: list[Candidate] = Field(min_length=2)


class NamedRemedy(Row):
    """Hold a remedy that the doctor named: its words, and its forecast gain."""

    change: list[str] = Field(min_length=1)
    gain: Spread | None = None


class OfRun(Row):
    """Name the natural run that a row is about: its id is unique on its hardware."""

    id: str
    device: Literal["cuda", "cpu"]
    hardware: str
    date: str = Field(pattern=DAY)

    @property
    def key(self) -> tuple[str, str]:
        """Return the key that the row of the answer and that of the outcome share."""
        return self.id, self.hardware


class NaturalAnswer(OfRun):
    """Hold the doctor's answer about a natural run, before anything else was measured.

    `healthy` means that no remedy is forecast to gain more than a twentieth. `first` is the remedy
    that the doctor names first.
    """

    workload: str
    precision: str
    compiled: bool
    verdict: str | None
    healthy: bool
    first: NamedRemedy | None
    commit: str | None = None


class MeasuredChange(Row):
    """Hold a change of a natural run: its measured gain, or why it did not run."""

    change: list[str] = Field(min_length=1)
    gain: Spread | None = None
    refused: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.gain is None) == (self.refused is None):
            raise ValueError("a change has either a gain or why it was refused")
        return self


class NaturalOutcome(OfRun):
    """Hold the measured gain of each change of a natural run.

    `first_change` is the first remedy of the answer, and `answer_commit` the commit whose code gave
    the answer, where it is known. `left` are changes that were to be measured, and were not.
    """

    measured: list[MeasuredChange]
    first_change: list[str] | None
    left: list[list[str]] = []
    answer_commit: str | None = Field(default=None, alias="said")


class RepeatMetrics(Row):
    """Hold how forecasts of natural runs fared that were made after their outcomes."""

    coverage: Spread
    median_error: Spread


class RepeatedForecast(Row):
    """Hold what the code of a commit says of a device's natural runs, after they were measured.

    What it fits was fitted without the run's workload.
    """

    of: str
    n: int = Field(ge=1)
    commit: str
    metrics: RepeatMetrics


class Trial(Row):
    """Hold a change that went through the tuner's pair and judge.

    `for_loss` means that it was rejected for its loss or its gradients. `nats` is the loss after
    `steps` steps less that of the plan without it, where both were trained. A row with `nats`
    repeats the fields of its trial's row.
    """

    workload: str
    base: str = ""
    hardware: str
    change: list[str] = Field(min_length=1)
    equality: Literal["exact", "approximate", "learning"]
    verdict: Literal["kept", "lost", "rejected", "not shown", "cut"]
    for_loss: bool
    nats: float | None = None
    steps: int = Field(default=0, ge=0)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key that a trial and the row of its training share."""
        return self.workload, self.base, self.hardware, tuple(self.change)


class TunerMetrics(Row):
    """Hold a speed over that of the workload's best row, and the seconds of tuning."""

    ratio_to_best: Spread
    tuning: Spread | None = None


class Tuned(Row):
    """Hold where the tuner ended."""

    workload: str
    metrics: TunerMetrics
    date: str | None = None
    commit: str | None = None
    minutes: float | None = None
    hardware: str | None = None


T = TypeVar("T")


@dataclass(frozen=True)
class Standing(Generic[T]):
    """Hold the rows of a topic that stand.

    Args:
        rows: the checked rows, in the file's order.
        places: FILE:LINE of each row.
        refused: the number of further rows that a program wrote as refused.
    """

    rows: list[T]
    places: list[str]
    refused: int


@dataclass(frozen=True)
class Topic(Generic[T]):
    """Describe one file of rows and the shape of its rows."""

    name: str
    shape: TypeAdapter[T]

    def read(self, results: Path) -> Standing[T]:
        """Return the rows that stand; none when there is no file.

        Raises:
            ConfigError: a row is wrong, by file and line.
        """
        file = results / f"{self.name}.jsonl"
        stand = list(standing(file)) if file.is_file() else []
        measured = [(where, row) for where, row in stand if "refused" not in row]
        rows = [self._check(where, row) for where, row in measured]
        return Standing(rows, [where for where, _ in measured], len(stand) - len(measured))

    def history(self, results: Path) -> Iterator[tuple[T, str | None]]:
        """Yield each row in the file's order, with why it was retracted; None where it stands.

        Refused and invalid rows are left out; `read` raises an error for invalid ones that stand.
        """
        file = results / f"{self.name}.jsonl"
        for _, row, why in _rows_with_reasons(file) if file.is_file() else ():
            try:
                checked = self.shape.validate_python(row)
            except ValidationError:
                continue
            if "refused" not in row:
                yield checked, why

    def _check(self, where: str, row: dict[str, Any]) -> T:
        try:
            return self.shape.validate_python(row)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            raise broken(where, f"{at}: {first['msg']}" if at else first["msg"]) from None


DOCTOR: Topic[Fault | Healthy] = Topic(
    "doctor", TypeAdapter(Annotated[Fault | Healthy, Field(discriminator="measurement")])
)
FORECASTS = Topic("forecasts", TypeAdapter(Forecast))
RECORDED_FORECASTS = Topic("forecasts_said", TypeAdapter(RecordedGain))
OVERHEAD = Topic("overhead", TypeAdapter(Overhead))
PLANS: Topic[Prediction | Outcome] = Topic(
    "plans", TypeAdapter(Annotated[Prediction | Outcome, Field(discriminator="kind")])
)
PICKS = Topic("picks", TypeAdapter(Pick))
TUNER = Topic("tuner", TypeAdapter(Tuned))
NATURAL_ANSWERS = Topic("natural_said", TypeAdapter(NaturalAnswer))
NATURAL = Topic("natural", TypeAdapter(NaturalOutcome))
NATURAL_REPEATED = Topic("natural_again", TypeAdapter(RepeatedForecast))
TRIALS = Topic("tuner_trials", TypeAdapter(Trial))
NAMES = tuple(topic.name for topic in (DOCTOR, FORECASTS, OVERHEAD, PLANS, PICKS, TUNER, NATURAL))
"""Beginnings of the names of all topics that numbers are computed from."""


def standing(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield FILE:LINE and row, without retractions, retracted rows and points of a sweep."""
    for where, row, why in _rows_with_reasons(file):
        if why is None:
            yield where, row


def _rows_with_reasons(file: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield FILE:LINE, row and why it was retracted, without retractions and sweep points.

    Rows are numbered as retractions number them: from 1, blank lines left out.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    retracted: dict[int, str] = {}
    for line, text in enumerate(file.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        where = f"{file}:{line}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise unread(where, f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise unread(where, "not a JSON object")
        if "retracts" in row:
            if row["retracts"] not in range(1, len(rows) + 1):
                raise unread(where, f"retracts {row['retracts']!r}, which is no row before it")
            retracted[row["retracts"]] = str(row.get("reason") or "no reason given")
        rows.append((where, row))
    for number, (where, row) in enumerate(rows, 1):
        if "retracts" not in row and row.get("kind") != "tune":
            yield where, row, retracted.get(number)


def broken(where: str, what: str) -> ConfigError:
    """Return the error of a row that is wrong, whose remedy retracts it.

    Args:
        where: FILE:LINE of the row.
        what: what is wrong with it, which is the reason of the retraction.
    """
    file, _, line = where.rpartition(":")
    before = Path(file).read_bytes().splitlines()[: int(line)]
    number = sum(bool(text.strip()) for text in before)
    retracts = json.dumps({"retracts": number, "reason": what})
    return ConfigError(f"{where}: {what}", f"echo {shlex.quote(retracts)} >> {shell(file)}")


def unread(where: str, what: str) -> ConfigError:
    """Return the error of a line that is no row; its remedy takes the line out.

    Args:
        where: FILE:LINE.
        what: what is wrong with it.
    """
    file, _, line = where.rpartition(":")
    return ConfigError(f"{where}: {what}", f"sed -i {line}d {shell(file)}")
