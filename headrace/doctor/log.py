"""Read what torchtitan, nanochat, litgpt, axolotl and other Trainers print, and observe their runs.

A log says when a step was logged, its loss, and at most its gradients' norm, its memory and its
share of the device's peak (MFU, by the trainer's own count). It does not say where a step's time
went: what binds the steps stays open until a trace is there, unless the share of the peak is high.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from headrace.core.errors import MemoryFull
from headrace.doctor.observation import WARM_STEPS, Observation
from headrace.doctor.use import Use

NUMBER = r"(?:[-+]?[\d.,]+(?:[eE][-+]?\d+)?|nan|-?inf)"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
LINE_CHARS = 1 << 14
"""Characters after which a line is cut: no trainer prints a longer one about a step."""
MOST_ROWS = 1 << 18
"""Logged steps that are kept; a log of more is judged by its first ones."""
WHOLE_SECONDS = 20.0
"""Seconds that lie between two times of a progress bar, which counts whole ones: 5% at most is
lost."""
GIB = 1 << 30
NO_PLAN = "a log does not say what the work of a step is"
FULL = "OutOfMemoryError:"
SOUGHT_LINES = 1 << 17
"""Lines before the first step: a file with more of them is no log."""


@dataclass(frozen=True)
class LogFormat:
    """Define how a trainer prints a step.

    Args:
        trainer: its name.
        step: what matches the text of a step; its groups are named as the fields of `LoggedStep`.
        traced: how its trace is made, in words.
        huggingface: whether remedies are words of `TrainingArguments`.
    """

    trainer: str
    step: re.Pattern[str]
    traced: str
    huggingface: bool = False


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("NUMBER", NUMBER))


WATCH = "headrace.watch(model, optimizer, loader, trace='traces') in its loop"
FORMATS = (
    LogFormat(
        "torchtitan",
        _pattern(
            r"(?P<moment>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}).{0,80}? - step: *(?P<step>\d+) +"
            r"loss: *(?P<loss>NUMBER)(?: +grad_norm: *(?P<grad_norm>NUMBER))?"
            r"(?: +memory: *(?P<gib>NUMBER)GiB\((?P<percent>NUMBER)%\))?"
            r"(?:.* (?:est_)?mfu: *(?P<mfu>NUMBER)%)?"
        ),
        "--profiling.enable_profiling of torchtitan",
    ),
    LogFormat(
        "nanochat",
        _pattern(
            r"^step (?P<step>\d+)(?:/\d+)? \(NUMBER%\) \| loss: (?P<loss>NUMBER) \|"
            r"(?: grad norm: (?P<grad_norm>NUMBER) \|)? lrm: NUMBER \| dt: (?P<ms>NUMBER)ms"
            r"(?:.*?mfu: (?P<mfu>NUMBER))?"
        ),
        WATCH,
    ),
    LogFormat(
        "litgpt",
        _pattern(
            r"Epoch \d+ \| iter \d+ step (?P<step>\d+) \| loss train: (?P<loss>NUMBER), +val: \S+ "
            r"\| iter time: (?P<ms>NUMBER) ms \(step\)"
        ),
        WATCH,
    ),
    LogFormat(
        "a Hugging Face Trainer",
        _pattern(
            r"\{'loss': '?(?P<loss>NUMBER)'?, (?:'grad_norm': '?(?P<grad_norm>NUMBER)'?, )?"
            r"'learning_rate': [^{}]*'epoch': "
        ),
        "trainer.add_callback(headrace.watch(trace='traces').callback())",
        huggingface=True,
    ),
)
BAR = re.compile(
    r"(?<!\d)(?P<step>\d{1,12})/\d{1,12} \[(?:(?P<h>\d{1,5}):)?(?P<m>\d\d):(?P<s>\d\d)<"
)
"""A progress bar of a Trainer, beside which it prints its losses."""
RESERVED = _pattern(r"'memory/device(?:_mem)?_reserved ?\((?i:gib)\)': '?(?P<gib>NUMBER)")


@dataclass(frozen=True)
class LoggedStep:
    """Hold what a log says of one step.

    Args:
        step: its number; 0 where it is not said.
        loss: in nats; nan where it was not finite.
        grad_norm: the gradients' norm.
        seconds: what the step took, where that is said.
        at_s: the moment at which it was logged, on the log's own clock.
        mfu: percent of the device's peak, by the trainer's count.
        gib: memory that the allocator holds.
        percent: the same, of the device's memory.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    seconds: float | None = None
    at_s: float | None = None
    mfu: float | None = None
    gib: float | None = None
    percent: float | None = None


@dataclass
class TrainerLog:
    """Hold the steps that a trainer logged, in order.

    Args:
        format: how it prints them.
        rows: the steps.
        full: the message of a memory that was full; "" without one.
    """

    format: LogFormat
    rows: list[LoggedStep] = field(default_factory=list)
    full: str = ""

    @property
    def step_s(self) -> list[float]:
        """Return the mean seconds of a step between each two times, without the first steps."""
        printed_s = [row.seconds for row in self.rows if row.seconds is not None]
        if printed_s:
            return printed_s[WARM_STEPS:]
        times = [(row.step, row.at_s) for row in self.rows if row.at_s is not None]
        least_s = WHOLE_SECONDS if self.format.huggingface else 0.0
        kept: list[tuple[int, float]] = []
        means: list[float] = []
        for step, at_s in times[WARM_STEPS - 1 :]:
            if kept and (step <= kept[-1][0] or at_s <= kept[-1][1]):
                kept = []  # it was started anew, or its clock was set
            if kept and at_s - kept[-1][1] < least_s:
                continue
            if kept:
                means.append((at_s - kept[-1][1]) / (step - kept[-1][0]))
            kept.append((step, at_s))
        return means

    def observe(self) -> Observation:
        """Return what the log lets anybody know of the run."""
        rows, step_s = self.rows, self.step_s
        peaks = [row.mfu / 100 for row in rows[WARM_STEPS:] if row.mfu and isfinite(row.mfu)]
        reserved = [row.gib * GIB for row in rows if row.gib]
        wholes = [row.gib * GIB / (row.percent / 100) for row in rows if row.gib and row.percent]
        norms = [row.grad_norm for row in rows if row.grad_norm is not None]
        device = "cuda" if reserved or peaks else ""
        loop: dict[str, Any] = {"device": device}
        if self.format.huggingface:
            loop["trainer"] = {}
        missing = (
            "where a step's time goes, waits for data, communication, and tokens without a target",
            f"a trace tells: {self.format.traced}, then headrace doctor TRACE",
        )
        return Observation(
            step_s=tuple(step_s),
            loss=tuple(row.loss for row in rows),
            grad_norm=tuple(norms) if len(norms) == len(rows) else None,
            reserved_bytes=max(reserved, default=None),
            capacity_bytes=median(wholes) if wholes else None,
            device=device,
            ended_by=MemoryFull.__name__ if self.full else "",
            message=self.full,
            not_logged=missing,
            logged_loop=loop,
            watched_steps=len(rows),
            use=Use(peak=median(peaks) if peaks else None, unknown=NO_PLAN),
        )


def read_log(file: Path) -> TrainerLog | None:
    """Return the steps that a trainer printed into a file; None where there are none.

    A step that several ranks print counts once.
    """
    log: TrainerLog | None = None
    at = (0, 0.0)
    full = ""
    for number, line in enumerate(_lines(file)):
        if log is None and number == SOUGHT_LINES:
            return None
        if (bar := BAR.search(line)) is not None:
            spent_s = 3600 * int(bar["h"] or 0) + 60 * int(bar["m"]) + int(bar["s"])
            at = (int(bar["step"]), float(spent_s))
        if (at_char := line.find(FULL)) >= 0:
            full = line[at_char:].strip()[:300]
        if "loss" not in line:
            continue
        formats = FORMATS if log is None else (log.format,)
        for form in formats:
            if (match := form.step.search(line)) is None:
                continue
            log = log or TrainerLog(form)
            row = _row(match, line, at if form.huggingface else None)
            same = log.rows and row.step and row.step == log.rows[-1].step
            if not same and len(log.rows) < MOST_ROWS:
                log.rows.append(row)
            break
    if log is not None:
        log.full = full
    return log


def is_log(file: Path) -> bool:
    """Return whether a trainer printed a step into a file; no more is read than up to it."""
    lines = (line for line in islice(_lines(file), SOUGHT_LINES) if "loss" in line)
    return any(form.step.search(line) for line in lines for form in FORMATS)


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file, those behind a carriage return too, without colours."""
    with file.open(errors="replace", newline=None) as opened:
        while text := opened.readline(LINE_CHARS):
            yield ESCAPES.sub("", text)


def _row(match: re.Match[str], line: str, bar: tuple[int, float] | None) -> LoggedStep:
    """Return what a line says of a step.

    Args:
        match: of its format.
        line: the whole line.
        bar: step and seconds of the progress bar before it, where the trainer prints one.
    """
    groups = {k: v for k, v in match.groupdict().items() if v is not None}
    values = {k: _number(v) for k, v in groups.items() if k not in ("moment", "step")}
    if bar is not None:
        memory = RESERVED.search(line)
        gib = _number(memory["gib"]) if memory else None
        return LoggedStep(
            bar[0], values["loss"], values.get("grad_norm"), None, bar[1] or None, gib=gib
        )
    moment = groups.get("moment")
    return LoggedStep(
        step=int(groups["step"][:18]),
        loss=values["loss"],
        grad_norm=values.get("grad_norm"),
        seconds=values["ms"] / 1000 if "ms" in values else None,
        at_s=_moment_s(moment) if moment else None,
        mfu=values.get("mfu"),
        gib=values.get("gib"),
        percent=values.get("percent"),
    )


def _number(text: str) -> float:
    """Return a number as a trainer prints it, 1,234.5 too; nan where it is none that is finite."""
    try:
        value = float(text.replace(",", "").strip("."))
    except ValueError:
        return nan
    return value if isfinite(value) else nan


def _moment_s(text: str) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except (ValueError, OverflowError):
        return None
