"""Measure what each technique of a plan is worth: left out, put in alone, and beside another one.

Three measurements are made, each of a plan beside its base in blocks A B B A (pairs.py):

- left_out: the plan without one technique, beside the plan;
- added: the plan's knobs of one technique, beside the plan without any;
- pair: two techniques, beside the plan without any; interplay.py says whether their gains add up.

The first is what a technique is worth where it stands, the second what it is worth to a newcomer.
The two differ where techniques remove the same waste. Every measurement becomes a row of a file as
soon as it is made, in the form of results/techniques.jsonl. What has a row there of the same plans,
device, commit and size is not measured anew, so that an ablation that was ended goes on. What
cannot run has a row with the reason. No measurement begins for which half of what the longest took
so far is not left of the time that is given; those that are left are named.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import check_supported, choose_device, make_context, on_one_process
from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, RefusalKind, RunError
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.train.interrupts import AsCtrlC
from headrace.train.run_folder import command_line, environment
from headrace.tuner.ablation import Ablation, AblationTrial, TrialNumbers, trials_of
from headrace.tuner.brief_training import train_steps
from headrace.tuner.command import locked
from headrace.tuner.effects import effect_of
from headrace.tuner.interplay import ADDED, LEFT_OUT, PAIR
from headrace.tuner.judge import Compared, Rules, compare
from headrace.tuner.pairs import Measure, SampleSize, measure_with
from headrace.tuner.path import LOG
from headrace.tuner.readings import Reading
from headrace.tuner.store import fingerprint, kept_kind
from headrace.tuner.worker import Worker

FILE = "ablation.jsonl"
"""Name of the file of rows, in the folder that is given."""
SIZE = SampleSize(warm=3, steps=5, rounds=2)
"""Sample of each pair: 20 steps of each plan in four blocks, for intervals of three degrees of
freedom."""
TRANSIENT = (RefusalKind.TIME, RefusalKind.PROCESS, RefusalKind.BASELINE)
"""Kinds of reasons that another call may not meet."""
SIDE_LIMIT_S = 600.0
"""Longest measurement of one pair of plans, in seconds."""
ROOM = 0.85
"""Share of the device's memory that two plans may take by their predictions to share one
process."""
BASES = {LEFT_OUT: "recipe", ADDED: "trunk", PAIR: "trunk"}


def folder_of(plan: Plan) -> Path:
    """Return where a plan's ablation is kept, from one call to the next."""
    return Path(plan.directory) / f"{plan.name}-ablation"


def ablate_command(
    plan: Plan,
    *,
    catalogue: Catalogue,
    pairs: bool = False,
    minutes: float = math.inf,
    loss_steps: int = 0,
    folder: Path | None = None,
    progress: Progress | None = None,
    size: SampleSize = SIZE,
    changes: Sequence[str] = (),
    in_process: bool = False,
) -> Ablation:
    """Measure what each technique of a plan is worth; rows go to FOLDER/ablation.jsonl.

    Args:
        plan: with the techniques.
        catalogue: techniques and families.
        pairs: two techniques at a time, too.
        minutes: on the clock, at most; what is left is told.
        loss_steps: also train each plan for so many steps, and compare the losses; 0 does not.
        folder: in the place of `folder_of`, as the folder of the run that the plan is of.
        progress: told how far it is.
        size: how much of each plan is measured.
        changes: of the plan's own file, by which a reader of the rows knows it.
        in_process: start no process, to debug.

    Raises:
        ConfigError: the plan has no techniques, or more than one rank; no time is given; or the
            folder cannot be written, or another process measures for it; or its techniques do not
            go together.
        RunError: the file cannot be written any more.
        UnsupportedError: its device is not here, or the plan as a whole cannot run on it.
    """
    ends_s, progress = time.monotonic() + 60 * minutes, progress or Progress()
    if plan.mesh.ranks > 1:
        raise ConfigError(
            f"an ablation measures one device, and the plan has {plan.mesh.ranks} ranks",
            f"{on_one_process(plan)}, for what techniques are worth on one",
        )
    if not minutes >= 0:
        raise ConfigError(f"{minutes} minutes are no time to measure in", "--minutes 30")
    context = make_context(plan, choose_device(plan))
    check_supported(list(plan.techniques.values()), context)  # as a run of it would be refused
    trials = trials_of(plan, catalogue, pairs)
    if not all(trial.refused for trial in trials):
        prepare(plan, progress=progress.task)
    rules = Rules(device=context.device, precision=context.precision)
    folder = folder or folder_of(plan)
    ablation = Ablation(plan.name, tuple(plan.techniques), folder / FILE, rules.margin)
    other = rerun_with("--out", "FOLDER", verb="ablate PLAN")
    files = locked(folder, "--out FOLDER that can be written", other)
    try:
        # What the worker's process says goes to a file: this one's output may be one document.
        with AsCtrlC() as signals, Worker(here=in_process, log=folder / LOG) as worker:
            learn = partial(worker.ask, train_steps, steps=loss_steps)
            Bench(
                ablation,
                measure_with(worker),
                rules,
                _facts(plan, loss_steps, changes),
                size=size,
                ends_s=ends_s,
                learn=learn if loss_steps else None,
                progress=progress,
            ).run(trials)
            if ablation.interrupted:
                ablation.exit_code = signals.exit_code
    finally:
        files.unlock()
    return ablation


def _facts(plan: Plan, loss_steps: int, changes: Sequence[str]) -> TrialNumbers:
    """Return what all rows of an ablation share."""
    device = choose_device(plan)
    about = environment(device, command_line())
    cpu = f"{about['cpu']}, {about['cores']} cores"
    return {
        "date": date.today().isoformat(),
        "commit": about["commit"],
        "command": about["command"],
        "hardware": about["device_name"] if device.type == "cuda" else cpu,
        "torch": about["torch"],
        "recipe_sha256": fingerprint(plan),
        "loss_steps": loss_steps,
        "overrides": [*changes],
    }


def _together(one: Plan, two: Plan) -> bool:
    """Return whether both fit on the device at once, as they are predicted."""
    device = choose_device(one)
    if device.type != "cuda":
        return True
    most = sum(make_ledger(plan, make_context(plan, device)).peak()[1] for plan in (one, two))
    return most < ROOM * torch.cuda.get_device_properties(device).total_memory


# --- measuring -------------------------------------------------------------------------------


class RecordingMeasure:
    """Wrap a measure and keep its last reading, for the techniques' evidence."""

    def __init__(self, measure: Measure) -> None:
        self.measure, self.last = measure, Reading()

    def __call__(
        self, first: Plan, second: Plan, *, size: SampleSize, together: bool, limit_s: float
    ) -> Reading:
        """Measure, and keep the reading."""
        self.last = self.measure(first, second, size=size, together=together, limit_s=limit_s)
        return self.last

    def evidence(self, names: Iterable[str]) -> dict[str, str]:
        """Return the evidence of these techniques by the plan that has them."""
        other = self.last.beside.evidence if self.last.beside else {}
        evidence = {**other, **self.last.evidence}
        return {name: evidence[name] for name in names if name in evidence}


class Bench:
    """Measure trials one after the other and write their rows."""

    def __init__(
        self,
        ablation: Ablation,
        measure: Measure,
        rules: Rules,
        facts: TrialNumbers,
        *,
        size: SampleSize,
        ends_s: float,
        learn: Callable[..., Reading] | None,
        progress: Progress,
    ) -> None:
        self.ablation, self.heard, self.rules, self.facts = (
            ablation,
            RecordingMeasure(measure),
            rules,
            facts,
        )
        self.size, self.ends_s, self.learn, self.progress = size, ends_s, learn, progress
        self.longest_s = 0.0
        self._losses: dict[str, Reading] = {}

    def run(self, trials: Sequence[AblationTrial]) -> None:
        """Run all of them, but those that have a row and those that time is too brief for."""
        known, waiting = dict(self._known()), []
        for trial in trials:
            row = known.get(self._key(trial))
            if row is None and trial.refused:
                row = self._row(trial, Compared("refused", trial.refused))
                self._append(row)
            if row is None:
                waiting.append(trial)
            else:
                self.ablation.rows[trial.kind, trial.names] = row
        if waiting:
            self.progress.note(f"{len(waiting)} to measure; the first is: {waiting[0].title}")
        try:
            for done, trial in enumerate(waiting):
                self.progress.task("ablation", done, len(waiting))
                if time.monotonic() + self.longest_s / 2 > self.ends_s or not self.measure(trial):
                    self.ablation.left.append(trial.title)
            self.progress.task("ablation", len(waiting), len(waiting))
        except KeyboardInterrupt:
            measured = self.ablation.rows
            self.ablation.left = [t.title for t in waiting if (t.kind, t.names) not in measured]
            self.ablation.interrupted = True

    @property
    def limit_s(self) -> float:
        """Return the seconds that a measurement may take that begins now."""
        return min(SIDE_LIMIT_S, max(self.ends_s - time.monotonic(), 0.0))

    def measure(self, trial: AblationTrial) -> bool:
        """Measure one row; return False when time was up."""
        began_s = time.monotonic()
        assert trial.base is not None and trial.side is not None, "a refused one has its row"
        compared = compare(
            trial.base,
            trial.side,
            self.heard,
            self.rules,
            size=self.size,
            together=_together(trial.base, trial.side),
            limit_s=self.limit_s,
        )
        if compared.verdict == "cut":
            return False
        row = self._row(trial, compared)
        self._append(row)
        self.ablation.rows[trial.kind, trial.names] = row
        spent_s = time.monotonic() - began_s
        self.longest_s = max(self.longest_s, spent_s)
        result = (
            f"{compared.ratio.value:.3f} times its base's speed"
            if compared.ratio
            else row["refused"]
        )
        self.progress.note(f"{trial.title}: {result} ({spent_s:.0f} s)")
        return True

    def _row(self, trial: AblationTrial, compared: Compared) -> TrialNumbers:
        """Return the receipt of one measurement."""
        side, base, overrides = trial.side, trial.base, self.facts["overrides"]
        if trial.kind != LEFT_OUT:  # the trunk has no techniques that a word could change
            overrides = [word for word in overrides if word[0] not in "+-"]
        row: TrialNumbers = {
            **self.facts,
            "overrides": overrides,
            "measurement": trial.kind,
            "technique": "+".join(trial.names),
            "knobs": "",
            "base": BASES[trial.kind],
            "left_out": trial.kind == LEFT_OUT,
            "shape": self.ablation.name,
            "n": compared.ratio.n if compared.ratio else 0,
            "steps": compared.steps,
            "seeds": [side.seed] if side else [],
            "techniques": sorted(side.techniques) if side else [],
            "plan_sha256": _print(side),
            "baseline_sha256": _print(base),
        }
        if compared.ratio is None:
            return {
                **row,
                "refused": compared.reason,
                "refusal": compared.refusal,
                "metrics": {},
            }
        assert side is not None and base is not None, "they were timed"
        row |= {
            "evidence": self.heard.evidence(trial.names),
            "drifted": compared.drifted,
            "changes": effect_of(base, side),
            "different": compared.reason if compared.verdict == "different" else "",
        }
        metrics = {
            "speed_ratio": _spread(
                compared.ratio.value, "x", compared.ratio.low, compared.ratio.high
            )
        }
        if compared.after_s:
            metrics["tokens_per_s"] = _spread(side.batch.tokens / compared.after_s, "tokens/s")
        if compared.memory is not None:
            metrics["memory_ratio"] = _spread(compared.memory, "x")
        if compared.peak_bytes is not None:
            metrics["peak_memory"] = _spread(compared.peak_bytes, "bytes")
        if self.learn is not None and trial.kind != PAIR:
            row |= self._learned(base, side, metrics)
        return {**row, "metrics": metrics}

    def _learned(self, base: Plan, side: Plan, metrics: dict[str, Any]) -> TrialNumbers:
        """Return why the losses were not compared; the difference becomes a metric of the row."""
        assert self.learn is not None, "it was asked for"
        for plan in (base, side):
            if fingerprint(plan) not in self._losses:
                self._losses[fingerprint(plan)] = self.learn(plan, limit_s=self.limit_s)
        one, two = (self._losses[fingerprint(plan)] for plan in (base, side))
        for reading in (one, two):
            if reading.refused:
                return {"loss_refused": reading.refused, "loss_refusal": reading.refusal}
        off = _end(two.losses) - _end(one.losses)
        if math.isfinite(off):
            metrics["loss_difference"] = _spread(off, "nats")
        return {}

    def _append(self, row: TrialNumbers) -> None:
        path = self.ablation.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                    file.write(b"\n")  # the last line was cut short
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}; what stands there is kept",
                "--out FOLDER, or the same command when there is room",
            ) from None

    def _key(self, trial: AblationTrial) -> tuple[Any, ...]:
        """Return what two measurements of the same have in common."""
        return self._key_of(
            {
                **self.facts,
                "measurement": trial.kind,
                "technique": "+".join(trial.names),
                "plan_sha256": _print(trial.side),
                "baseline_sha256": _print(trial.base),
                "steps": self.size.timed,
            }
        )

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        keys = (
            "measurement",
            "technique",
            "recipe_sha256",
            "plan_sha256",
            "baseline_sha256",
            "hardware",
            "torch",
            "commit",
            "loss_steps",
        )
        return (*(row.get(key) for key in keys), row.get("steps") or self.size.timed)

    def _known(self) -> Iterator[tuple[tuple[Any, ...], TrialNumbers]]:
        """Yield the rows of the file that need not be measured anew, by their keys."""
        file = self.ablation.file
        text = file.read_text(errors="replace") if file.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict) or "measurement" not in row:
                continue
            refusals = (
                kept_kind(row.get("refused"), row.get("refusal")),
                kept_kind(row.get("loss_refused"), row.get("loss_refusal")),
            )
            if not any(kind in TRANSIENT for kind in refusals):
                yield self._key_of(row), row


def _end(losses: Sequence[float]) -> float:
    """Return the mean of the last tenth."""
    return fmean(losses[-max(1, len(losses) // 10) :])


def _print(plan: Plan | None) -> str:
    return "" if plan is None else fingerprint(plan)


def _spread(
    value: float, unit: str, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    ends = {
        "value": value,
        "low": value if low is None else low,
        "high": value if high is None else high,
    }
    return {**{k: v if math.isfinite(v) else value for k, v in ends.items()}, "unit": unit}
