"""Read a run's folder into typed values, or say in one message why it is not a run.

`report.json` is the contract between the trainer and everything that looks at runs. Keys that the
design promises are required; numbers may be null, and a NaN or infinity in the file counts as null.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from headrace.core.command import rerun, train_command
from headrace.core.errors import ConfigError, nearest
from headrace.core.files import parse_object, recorded_plan, shell
from headrace.observe import REPORT_FORMAT
from headrace.report.metrics import read_metrics, read_text


def _finite(value: object) -> object:
    """Return None for a number that is not finite: it was not measured."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = Annotated[int | None, BeforeValidator(_finite)]


class Table(BaseModel):
    """Read a table of report.json; keys that this version does not know are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class GoalRecord(Table):
    """Hold what was asked, whether and when it was reached, and what ended the run."""

    asked: dict[str, Number]
    reached: bool | None
    step: Count = None
    wall_s: Number = None
    tokens: Count = None
    ended_by: str | None = None


class Utilization(Table):
    """Hold model FLOPs over the device's peak, with the peak's source and the formula."""

    value: Number
    peak_flops: Number = None
    peak_source: str | None = None
    formula: str | None = None
    model_flops_per_token: Number = None


class PeakMemory(Table):
    """Hold peak bytes and the method that measured them."""

    allocated: Number
    reserved: Number
    predicted: Number
    method: str | None = None


class MemoryLine(Table):
    """Hold one named line of the ledger at the peak."""

    name: str
    bytes: Number


class InputWait(Table):
    """Hold how long steps waited for data."""

    p50_s: Number = None
    p99_s: Number = None
    stalled_steps: Count = None


class PairsRecord(Table):
    """Hold how held-out preference pairs are ranked; nothing where there are none."""

    pairs: Number = None
    chosen_likelier: Number = None
    ranked_right: Number = None
    reward_margin: Number = None
    pair_loss: Number = None


class ValidationRecord(PairsRecord):
    """Hold one evaluation on held-out text."""

    step: int
    tokens: int
    wall_s: Number
    loss_nats: Number
    bits_per_byte: Number
    share: Number = None


class DoubtRecord(Table):
    """Hold why the plan, or the loss, may not be what its user means, and what would be."""

    kind: str = ""
    reason: str = Field(validation_alias=AliasChoices("reason", "sentence"))
    remedy: str = ""


class SourceRecord(Table):
    """Hold what one source gave to the run, or to one stage of its mixture."""

    source: str
    stage: Count = None
    tokens: Count = None
    share: Number = None
    epochs: Number = None


class MixRecord(Table):
    """Hold how much of each source was read."""

    sources: tuple[SourceRecord, ...] = ()
    stages: tuple[SourceRecord, ...] = ()
    repeated_often: tuple[str, ...] = ()


class Texts(Table):
    """Hold what is trained on and what is held out, and how many targets an evaluation counts."""

    train_bytes: Count = None
    train_documents: Count = None
    held_out_bytes: Count = None
    held_out_documents: Count = None
    held_out_share: Number = None
    cut_documents: Count = None
    targets: Count = None
    doubts: tuple[DoubtRecord, ...] = ()
    mixture: MixRecord | None = None


class CleanedText(Table):
    """Hold what a cleaner took out of the text, with pairs of what fell and what it fell for."""

    documents: Count = None
    bytes: Count = None
    dropped_documents: Count = None
    dropped_bytes: Count = None
    cut_documents: Count = None
    examples: tuple[tuple[str, str], ...] = ()


class TechniqueRecord(Table):
    """Hold a technique of the plan and the evidence that it was in force."""

    active: bool | None
    detail: str = ""
    numbers: dict[str, Number] = {}
    line: str = ""


class Attended(Table):
    """Hold who computed attention; a technique that did has evidence of its own instead."""

    kernels: tuple[str, ...] = ()
    detail: str = ""


class FirstStep(Table):
    """Hold how far the first step was from the plain trainer's, or why that was not asked."""

    compared: bool
    why: str = ""
    without: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    loss_off: Number = None
    gradients: Count = None
    worst: str = ""
    off: Number = None
    band: Number = None


class SpikeRecord(Table):
    """Hold a run of steps whose update was masked, and what was done about it."""

    step: Count
    masked: Count = None
    loss: Number = None
    grad_norm: Number = None
    loss_limit: Number = None
    norm_limit: Number = None
    rewound_to: tuple[Count, ...] = ()
    recovered: Count = None
    source: str = ""


class BottleneckRecord(Table):
    """Hold the doctor's verdict, with the remedy to try first where one is known."""

    name: str = Field(validation_alias="station")
    share: Number = None
    sentence: str
    evidence: str = ""
    healthy: bool | None = None
    remedy: str | None = None
    gain: str | None = None
    unknown: str = ""


class SampleRecord(Table):
    """Hold text that the trained model wrote."""

    prompt: str
    text: str


class Omission(Table):
    """Hold what of the sources is no text to train on, for one reason."""

    reason: str
    words: str
    count: int
    examples: tuple[str, ...] = ()


class ParentRecord(Table):
    """Hold the run and the step that this run begins at."""

    run: str
    step: int


class DivergenceRecord(Table):
    """Hold whether the run diverged, with a sentence where it did."""

    diverged: bool
    sentence: str = ""


class GeneralRecord(Table):
    """Hold the loss on a general text before the first step and at the end."""

    before_nats: Number
    after_nats: Number


class UptimeRecord(Table):
    """Hold where the time of a run's processes went, in seconds."""

    total_s: Number = None
    start_s: Number = None
    lost_s: Number = None
    lost_steps: Count = None
    down_s: Number = None
    goodput: Number = None


class Report(Table):
    """Hold report.json."""

    format: Literal[1]
    name: str
    status: Literal["done", "failed", "interrupted", "running"]
    message: str | None = None
    goal: GoalRecord
    outcome: DivergenceRecord | None = None
    doubts: tuple[DoubtRecord, ...] = ()
    steps: Count = None
    tokens: Count
    wall_s: Number
    steady_tokens_per_s: Number
    model_flops_utilization: Utilization
    peak_memory_bytes: PeakMemory
    memory_lines: tuple[MemoryLine, ...] | None = None
    memory_measured: dict[str, Number] | None = None
    phase_s: dict[str, Number]
    wasted_token_fraction: Number
    input_wait: InputWait = InputWait()
    val: tuple[ValidationRecord, ...]
    before: PairsRecord | None = None
    general: GeneralRecord | None = None
    dollars: Number
    parent: ParentRecord | None = None
    restarts: Count
    resumes: Count = None
    uptime: UptimeRecord = UptimeRecord()
    skipped_steps: Count
    spikes: tuple[SpikeRecord, ...] = ()
    techniques: dict[str, TechniqueRecord]
    guard: FirstStep | None = None
    attention: Attended | None = None
    stream_sha256: str | None
    seed: Count
    parameters: Count = None
    bottleneck: BottleneckRecord | None = Field(None, validation_alias="narrowest")
    sample: SampleRecord | None = None
    command: str | None = None
    tokenizer: dict[str, Any] | None = None
    data: Texts | None = None
    left_out: tuple[Omission, ...] = ()
    cleaning: dict[str, CleanedText] = {}

    @property
    def evaluated(self) -> list[ValidationRecord]:
        """Return the evaluations that gave a number."""
        return [row for row in self.val if row.bits_per_byte is not None]

    @property
    def best_bits_per_byte(self) -> float | None:
        """Return the lowest validation loss in bits per byte."""
        return min((row.bits_per_byte or math.inf for row in self.evaluated), default=None)


@dataclass(frozen=True)
class RunFiles:
    """Hold the files of a run's folder, read and checked.

    Args:
        directory: the folder.
        report: report.json.
        metrics: one array per column of metrics.jsonl, NaN where a value is null, steps ascending.
        environment: environment.json, or empty when the folder has none.
        plan_toml: the resolved plan that ran, or empty when the folder has none.
        edited: whether plan.toml says otherwise by now.
    """

    directory: Path
    report: Report
    metrics: dict[str, NDArray[np.float64]]
    environment: dict[str, Any]
    plan_toml: str
    edited: bool = False

    @property
    def tokens_per_byte(self) -> float | None:
        """Return the tokens per byte of the validation text; turns nats per token into bits."""
        for row in reversed(self.report.evaluated):
            if row.loss_nats and row.bits_per_byte:
                return row.bits_per_byte * math.log(2) / row.loss_nats
        return None


def read_run(directory: Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        ConfigError: it is not a run (says what was found and which folder is one), or one of its
            files cannot be read (says which line or key).
    """
    directory = Path(directory)
    _check_is_run(directory)
    environment = directory / "environment.json"
    plan, shown = recorded_plan(directory), directory / "plan.toml"
    text = read_text(plan) if plan.exists() else ""
    return RunFiles(
        directory=directory,
        report=read_report(directory / "report.json"),
        metrics=read_metrics(directory / "metrics.jsonl"),
        environment=_read_object(environment) if environment.exists() else {},
        plan_toml=text,
        edited=shown.exists() and read_text(shown) != text,
    )


def _check_is_run(directory: Path) -> None:
    """Raise ConfigError unless the folder holds a report.json."""
    if (directory / "report.json").is_file():
        return
    if directory.is_file():
        raise ConfigError(
            f"{directory} is a file; a run is a folder that holds report.json",
            rerun((directory, directory.parent), verb="report"),
        )
    if not directory.exists():
        runs = [path.parent.name for path in directory.parent.glob("*/report.json")]
        near = nearest(directory.name, runs)
        listing = f"; the nearest run in {directory.parent} is {near}" if runs else ""
        example = directory.parent / (near.split(", ")[0] if runs else "NAME")
        command = rerun((directory, example), verb="report")
        raise ConfigError(f"{directory} does not exist{listing}", command)
    names = sorted(path.name for path in directory.iterdir())
    listing = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    message = f"{directory} is not a run: it has no report.json (found: {listing or 'nothing'})"
    beneath = _nearest_run(directory)
    if beneath:
        message += f"; the nearest run beneath it is {beneath}"
        raise ConfigError(message, rerun((directory, beneath), verb="report"))
    if "metrics.jsonl" in names:
        message += "; it has metrics.jsonl, so a run was started and has not ended"
        raise ConfigError(message, train_command(directory, "--resume"))
    raise ConfigError(message, "headrace report runs/NAME")


def _nearest_run(directory: Path) -> Path | None:
    """Return the first run beneath `directory`, shallow folders first, down to three levels."""
    for pattern in ("*/report.json", "*/*/report.json", "*/*/*/report.json"):
        if runs := sorted(directory.glob(pattern)):
            return runs[0].parent
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or raise ConfigError with the place of the fault."""
    text = read_text(path)
    mend = f"mv {shell(path)} {shell(f'{path}.damaged')}"
    if path.name == "report.json":
        mend += f"; {train_command(path.parent, '--resume')}"
    try:
        return parse_object(text)
    except ValueError as error:
        raise ConfigError(f"{path} {error}", mend) from None


def read_report(path: Path, *, ended: bool = True) -> Report:
    """Return what a report.json holds.

    Args:
        path: the file.
        ended: whether the report of a run that was resumed and goes on is refused.

    Raises:
        ConfigError: it is damaged; names the keys that are missing or wrong.
    """
    values = _read_object(path)
    if values.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        problem = f"{path} has format {values['format']!r}"
        message = f"{problem}; this Headrace reads format {REPORT_FORMAT}"
        aside = f"mv {shell(path)} {shell(f'{path}.newer')}"
        other = f"{aside}; {train_command(path.parent, '--resume')}"
        raise ConfigError(message, f"the version of Headrace that wrote it; or {other}")
    if ended and values.get("status") == "running":
        message = f"{path} is of a run that was resumed and has not ended"
        raise ConfigError(message, train_command(path.parent, "--resume"))
    try:
        return Report.model_validate(values)
    except ValidationError as error:
        faults = [(".".join(map(str, e["loc"])), e) for e in error.errors()]
    missing = [key for key, e in faults if e["type"] == "missing"]
    lines = [f"the keys {', '.join(missing)} are missing"] if missing else []
    lines += [
        f"{key} = {e['input']!r}: {e['msg'].lower()}" for key, e in faults if e["type"] != "missing"
    ]
    remedy = train_command(path.parent, "--resume")
    raise ConfigError(f"{path} is not a complete report: " + "; ".join(lines), remedy)
