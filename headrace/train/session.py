"""Keep a run's counters, metrics, evaluations, checkpoints and report between its steps.

Everything in this module happens before or after a step, never inside it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from torch import Tensor

from headrace.assemble.filled import LastLook, check_active, last_look, note_own_attention
from headrace.assemble.nonfinite import because, first_nonfinite, wild_weight
from headrace.assemble.sockets import Build
from headrace.core.command import train_command
from headrace.core.errors import ConfigError, Diverged, HeadraceError, RunError, Stopped
from headrace.core.progress import Progress
from headrace.costs.work import IDLE
from headrace.data.loader import StepBatch
from headrace.model.companions import keep_companions
from headrace.observe.compile_time import compile_seconds
from headrace.observe.gauges import Gauges
from headrace.observe.profiler import ProfilerWindows
from headrace.observe.ranks import OwnTimes
from headrace.observe.signals import Signals, TrackedMemory, peak_bytes
from headrace.plan.technique import Evidence
from headrace.train import state
from headrace.train.checkpoint import Checkpoints, RankGone, Saved
from headrace.train.evaluate import Validation, evaluate
from headrace.train.general import compared, general_text, read_general
from headrace.train.goal import Counters, ended_by, seconds_left
from headrace.train.identity import differences, format_changes
from headrace.train.interrupts import Interrupts
from headrace.train.memory_copies import MemoryCopies
from headrace.train.others import share_end
from headrace.train.run_folder import RunFolder, command_line, in_words, metrics_line
from headrace.train.start import Start
from headrace.train.summary import remember, summarize
from headrace.train.track import Trackers, open_trackers

MEASURED = (
    "steady_tokens_per_s", "model_flops_utilization", "peak_memory_bytes", "memory_measured",
    "input_wait", "techniques", "start_s", "signals", "spikes",
)  # fmt: skip
"""Keys of a report whose values only a process that trained can measure."""


class Session:
    """Begin, resume, record, evaluate, save and end a run around its steps."""

    def __init__(self, build: Build, folder: RunFolder, progress: Progress, start: Start) -> None:
        plan, world = build.plan, build.world
        self.build, self.folder, self.progress, self.start = build, folder, progress, start
        self.first = world.rank == 0
        if self.first:
            folder.lock()
        torch.manual_seed(plan.seed + world.rank)
        self.counters = Counters()
        self.signals = Signals(build.device, [*build.measured])
        build.phases = self.signals
        self.windows = ProfilerWindows(
            folder.path / "traces", build.device, every_steps=plan.trace.every_steps,
            steps=plan.trace.steps, rank=world.rank, warn=progress.note,
        )  # fmt: skip
        self.gauges = Gauges(build.device)
        self.checkpoints = Checkpoints(
            folder.checkpoints, rank=world.rank, ranks=world.ranks,
            keep_last=plan.checkpoint.keep_last, log=progress.log,
        )  # fmt: skip
        self.copies = MemoryCopies(build, folder.path)
        self.counted = False  # whether the newest complete step counted a target
        self.evidence: dict[str, Evidence] | None = None
        self.last: LastLook | None = None
        self.memory: dict[str, int] | None = None
        self.operations: dict[str, Any] | None = None
        self.own_times = OwnTimes()
        self.between: dict[str, Any] = {"ranks": None, "stages": None}
        self.rates: list[float] = []
        self.waits_s: list[float] = []
        self.steps_here = 0
        self._compiled_s = compile_seconds()
        self._wall_before_s = 0.0
        self._started_s = time.perf_counter()
        self._rows: list[dict[str, Any]] = []
        self._begun = False
        self._stop: Interrupts | None = None
        self._saved_step: int | None = None
        self.resumed: dict[str, Any] | None = None
        self._metrics: TextIO | None = None
        self._trackers = Trackers([], progress.note)

    def __enter__(self) -> "Session":
        begun = self.checkpoints.steps() or (self.folder.path / "plan.toml").exists()
        if self.first and not begun:
            self._begin_at(Counters())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.build.loader.close()
        self.windows.close()
        self.gauges.close()
        ended = in_words(error, self.folder.path)
        try:
            self.checkpoints.wait()
        except RunError as failed:
            ended = failed if ended is None or isinstance(failed, RankGone) else ended
        ended = share_end(self.build.world, self.checkpoints, ended)
        if self._begun and isinstance(ended, HeadraceError) and not isinstance(ended, Stopped):
            if self._stop is not None:
                self._stop.deafen()
            with suppress(OSError, MemoryError):  # the disk may be what failed first
                self.counters.wall_s = self._wall_s()
                self._flush_rows()
                self._write_report("failed", str(ended), type(ended).__name__)
                ended.run = self.folder.path if self.first else None
        if self.first:
            self._close()
        if ended is not None and ended is not error:
            raise ended from error

    def _close(self) -> None:
        if self._metrics is not None:
            with suppress(OSError):  # the disk may be full; complete rows have been flushed
                self._metrics.close()
        self._trackers.close()
        self.folder.unlock()
        self.folder.drop_unbegun()

    def restore(self, which: str | None) -> None:
        """Continue from a checkpoint, or from the beginning where none was saved yet.

        Nothing of the run is changed until everything has been compared and read.

        Raises:
            ConfigError, RunError: see `state.restore` and `Saved`.
        """
        path = self.folder.checkpoints / which if which else self.copies.newest_of(self.checkpoints)
        if path is None:
            self.progress.note(f"{self.folder.path} has no checkpoint yet: starting again")
            if not self._begun:
                self._begin_at(Counters())
            return
        if not path.is_dir():
            names = [f"step-{n}" for n in self.checkpoints.steps()]
            raise ConfigError(
                f"{self.folder.checkpoints} has no {which}; it has {', '.join(names) or 'none'}",
                f"--checkpoint {names[-1]}" if names else "leave out --checkpoint",
            )
        saved = Saved(path)
        changed = differences(saved, self.build.plan)
        try:
            counters = Counters(**state.restore(self.build, saved))
        except (KeyError, TypeError, AttributeError) as error:
            raise saved.damaged(f"what it says of the run is none ({error!r})") from None
        self._saved_step = counters.step if path.parent == self.folder.checkpoints else None
        self._begin_at(counters)
        self.resumed = {"checkpoint": str(saved.path), "changed": changed}
        changes = f" with {format_changes(changed)}" if changed else ""
        self.progress.note(f"resumed {saved.path}{changes}")

    def _begin_at(self, counters: Counters) -> None:
        self.counters = counters
        self._wall_before_s = counters.wall_s
        self.copies.begin_at(counters.step)
        self.signals.totals_s.update(counters.phase_s)
        if counters.stream:
            self.build.loader.load_state(counters.stream)
        if self.first:
            build, plan = self.build, self.build.plan
            if plan.model.pretrained and not counters.step:
                first = Path(plan.model.pretrained)
                keep_companions(first, self.folder.path, self.progress.note)
            given = plan, build.prepared, build.device, command_line(), self.start.age_s
            counters.restarts = self.folder.start(*given)
            spent_s = self.folder.cut_metrics(counters.step)  # lost steps cost time too
            self._wall_before_s = max(self._wall_before_s, spent_s) + self.folder.lifetimes.paid_s()
            self._metrics = (self.folder.path / "metrics.jsonl").open("a")
            self._trackers = Trackers(
                open_trackers(plan, self.folder.path, counters.step), self.progress.note
            )
        self._begun = True

    def evaluate_before(self) -> None:
        """Evaluate what the run begins with, where the plan asks for it and no step was taken."""
        if not self.counters.step:
            self.counters.general = self._general()
        if self.build.plan.eval.before and not self.counters.step:
            self.counters.before = (score := self._score()).numbers
            self.progress.log(f"before the first step: {score.line}")

    def finish(self, stop: Interrupts) -> Path:
        """Save the run, write its report, and return its folder.

        Raises:
            Stopped: a signal ended the run.
        """
        self._take_rows(keep=0)
        self.windows.close()
        self.gauges.close()
        complete = self.counters.evaluated and ended_by(self.build.plan, self.counters) is not None
        # A signal may have reached only some ranks, and only the first rank's clock counts.
        answers = self.build.world.gather((stop.name, complete))
        stop.name = next((name for name, _ in answers if name), None)
        done = stop.name is None or answers[0][1]
        unseen = done and not self.counters.evaluated
        if unseen:
            self._evaluate()
        if done:
            self.counters.general = compared(self.counters.general, self._general(), self.progress)
        self._flush_rows()
        sizes = self.build.predicted(self.build.plan).sizes
        self.between = self.own_times.compared(
            self.build.world, self.build.model, sizes["micro_batches"], sizes.get(IDLE)
        )
        saves = self.build.plan.checkpoint.every_steps > 0
        if saves and (unseen or self._saved_step != self.counters.step):
            self._save()
        self.checkpoints.wait()
        if saves or done:
            self.copies.drop()
        stop.deafen()
        self.last = None if self.evidence is None else last_look(self.build, self.counted)
        if done:
            self._write_report("done", "")
            return self.folder.path
        self._write_report("interrupted", f"stopped by {stop.name}")
        raise Stopped(
            f"{stop.name} ended the run at step {self.counters.step}; "
            + ("checkpoint saved" if saves else "checkpoint.every_steps = 0 saved nothing"),
            train_command(self.folder.path, "--resume"),
            stop.exit_code,
        )

    def _end_while_compiling(self, name: str) -> tuple[str, str]:
        """Write the report of a run that a signal ends while it compiles; wait for no other rank.

        Return words for what is kept of the run, and the command that resumes it.
        """
        self.progress.close()
        with suppress(RunError):
            self.checkpoints.wait()
        self.report_alone("interrupted", f"stopped by {name} while it compiled")
        go_on = train_command(self.folder.path, "--resume")
        if not (steps := self.checkpoints.steps()):
            return f"of {self.folder.path} no checkpoint was saved yet", go_on
        lost = f"{self.counters.step - steps[-1]} steps after it are lost"
        return f"step-{steps[-1]} of {self.folder.path} is intact, {lost}", go_on

    def report_alone(self, status: str, message: str, error: str = "") -> None:
        """Write the report in another thread than the one that trains, which waits or compiles."""
        if self.first:
            self.counters.wall_s = self._wall_s()
            with suppress(OSError, RunError):
                self._write_report(status, message, error, alone=True)

    def _check_folder(self) -> None:
        """Refuse to train on where the run's folder is gone, or a save has failed.

        Raises:
            RunError: the folder, its metrics or its checkpoints were removed or moved; or the save.
        """
        run, saved = self.folder.path, self.folder.checkpoints
        whole = (run / "metrics.jsonl").exists()
        if self.first and not (whole and saved.is_dir()):
            lost = f"{saved} is no folder any more" if whole else f"{run} is gone, or its metrics"
            raise RunError(
                f"{lost}: it was removed or moved while the run trained step {self.counters.step}",
                f"put it back, then {train_command(run, '--resume')}",
            )
        self.checkpoints.wait(failed=True)

    def ended(self, stop: Interrupts) -> bool:
        """Return whether the goal or a signal ends the run; the answer is the same on every rank.

        Only the first rank's clock counts.
        """
        stop.hold(self._end_while_compiling)
        self._stop = stop
        self.counters.wall_s = self._wall_s()
        reached = self.first and ended_by(self.build.plan, self.counters) is not None
        return self.build.world.any(reached or stop.name is not None)

    def _left_s(self, step: int) -> float | None:
        """Return the seconds until the goal's steps, minutes or dollars end the run."""
        a_step_s = (time.perf_counter() - self._started_s) / max(1, self.steps_here)
        return seconds_left(self.build.plan, step, self._wall_s(), a_step_s)

    def _wall_s(self) -> float:
        return self._wall_before_s + time.perf_counter() - self._started_s

    def next_batch(self) -> StepBatch:
        """Return this rank's micro-batches of the next step."""
        self.signals.mark("input")
        with self.windows.named("next_batch"):
            batch = self.build.loader.step(self.counters.step)
        self.signals.mark("prepare")
        return batch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a step under the memory tracker where it is the second step on a CPU, uncompiled.

        The first step has no optimizer state yet, and the tracker supports only one process.
        """
        on_host = self.build.device.type == "cpu" and self.build.is_eager
        track = self.steps_here == 1 and on_host and self.build.world.ranks == 1
        kept = [t for one in self.build.state.values() for t in one.tensors().values()]
        known = [*self.build.optimizers.values(), *kept]
        tracker = TrackedMemory(self.build.model, known) if track else nullcontext()
        with tracker:
            yield
        if isinstance(tracker, TrackedMemory):
            self.memory = tracker.peak_bytes()
            self.operations = tracker.operations.report()

    def after_step(self, batch: StepBatch, numbers: Tensor) -> None:
        """Count a step, read complete rows, and evaluate and save when they are due."""
        plan, counters = self.build.plan, self.counters
        counters.tokens += plan.batches.at(counters.step)
        compiled_s = compile_seconds()
        compile_s = compiled_s - self._compiled_s
        facts = {
            "tokens": counters.tokens,
            "lr": plan.optimizer.lr * self.build.now["lr"],
            "compile_s": compile_s,
            "wait_s": batch.wait_s,
            "session": counters.restarts,
        }
        facts |= {"traced": 1} if self.windows.traced else {}
        self._compiled_s = compiled_s
        counters.step += 1
        self.steps_here += 1
        self.signals.end_step(counters.step, numbers, facts)
        self._check_folder()
        self._trace(steady=not compile_s)
        self._take_rows(keep=1)
        if self.evidence is None:
            self._take_rows(keep=0)
            if self.steps_here == 1:
                self.start.mark("first_step", compile_s=compile_s)
                self.folder.lifetimes.ready()
            if self.counted:  # else no gradient reached any technique
                self.evidence = check_active(self.build)
        if self.steps_here == 1:
            note_own_attention(self.build)
            self.gauges.start()
        if counters.step % plan.eval.every_steps == 0:
            self._take_rows(keep=0)
            self._evaluate()
        self._flush_rows()
        on_disk = plan.checkpoint.every_steps and counters.step % plan.checkpoint.every_steps == 0
        if on_disk or self.copies.is_due(counters.step):
            self._take_rows(keep=0)
            self._flush_rows()
            self._save(None if on_disk else self.copies)
        self._trace()

    def _trace(self, *, steady: bool | None = None) -> None:
        """Advance the profiler after a step; where `steady` is None, begin a due window."""
        plan, step, began_s = self.build.plan, self.counters.step, time.perf_counter()
        if not plan.trace.every_steps:
            return
        if steady is not None:
            self.windows.advance(step, steady=steady)
        else:
            often = (plan.eval.every_steps, plan.checkpoint.every_steps)
            self.windows.begin(min(every - step % every for every in often if every))
        self.signals.spent("trace", time.perf_counter() - began_s)

    def _take_rows(self, *, keep: int) -> None:
        for row in self.signals.drain(keep=keep):
            finite = row.pop("finite")
            tokens = self.build.plan.batches.at(row["step"] - 1)
            row["wasted_tokens"] = tokens - row.pop("targets")
            self.counted = row["wasted_tokens"] < tokens
            self.counters.wasted_tokens += row["wasted_tokens"]
            row["tokens_per_s"] = tokens / max(row["step_s"], 1e-9)
            row["wall_s"] = self._wall_s()
            if row["compile_s"] == 0 and self.steps_here > 1 and "traced" not in row:
                self.rates.append(row["tokens_per_s"])
            self.waits_s.append(row.pop("wait_s"))
            self.own_times.saw(row)
            self._rows.append(row)
            self.counters.saw(row["step"], row["loss"] if self.counted else None)
            if not finite:
                self.counters.skipped_steps += 1
                row["masked"] = 1
                try:
                    self.build.recover(self.build, row["step"], row)
                except Diverged as error:
                    message = error.message + because(first_nonfinite(self.build, row["step"] - 1))
                    texts = {"message": message, "other": error.remedy.text}
                    raise self._diverged(at=row["step"] - 1, **texts) from None

    def _diverged(self, **facts: Any) -> Diverged:
        """Return the error that ends a diverged run, with its remedy; see `state.diverged`."""
        self.checkpoints.wait()  # a failed save is reported first
        saved, path = self.checkpoints.steps(), self.folder.path
        return state.diverged(self.build, self.counters, saved, path, **facts)

    def _flush_rows(self) -> None:
        """Write complete rows to metrics.jsonl and the loggers, and show them."""
        rows, self._rows = self._rows, []
        for row in rows:
            self._trackers.log(row)
            self.progress.row(
                row, self.build.plan.goal_steps,
                memory_bytes=peak_bytes(self.build.device), left_s=self._left_s(row["step"]),
            )  # fmt: skip
        if rows and self._metrics is not None:
            self._metrics.writelines(metrics_line(row) for row in rows)
            self._metrics.flush()

    def _evaluate(self) -> None:
        counters, score = self.counters, self._score()
        when = {"step": counters.step, "tokens": counters.tokens, "wall_s": counters.wall_s}
        counters.val.append({**when, **score.numbers, "share": score.share})
        if self._rows and self._rows[-1]["step"] == counters.step:
            self._rows[-1] |= {f"val_{k}": v for k, v in score.numbers.items()}
        self._flush_rows()
        self.progress.log(f"step {counters.step}: {score.line}")

    def _general(self) -> dict[str, Any] | None:
        """Return the loss on the general text; None where none is named."""
        text = general_text(self.build)
        return None if text is None else read_general(text, self._score(text))

    def _score(self, text: Build | None = None) -> Validation:
        """Return the loss of the weights as they are, on the validation text or on another."""
        began_s, compiled_s = time.perf_counter(), compile_seconds()
        self.progress.task("validation", 0, None)
        score = evaluate(text or self.build, self.build.plan.eval.tokens)
        self.progress.task("validation", 1, 1)
        self._compiled_s = compile_seconds()
        self.signals.spent("compile", took_s := self._compiled_s - compiled_s)
        self.signals.spent("eval", time.perf_counter() - began_s - took_s)
        if not math.isfinite(score.loss_nats):
            at, why = self.counters.step, because(wild_weight(self.build))
            problem = f"the validation loss after step {at} is {score.loss_nats}{why}"
            raise self._diverged(at=at, message=problem)
        self.counters.wall_s = self._wall_s()
        return score

    def _save(self, copies: MemoryCopies | None = None) -> None:
        began_s, counters, build = time.perf_counter(), self.counters, self.build
        counters.stream = state.stream_of(build)
        remember(build, counters)
        counters.wall_s = self._wall_s()
        counters.phase_s = dict(self.signals.totals_s)
        values = state.values(build, counters.plain())
        scored = build.plan.checkpoint.keep_best and counters.evaluated
        values["score"] = counters.bits_per_byte if scored else None
        if copies is not None:
            copies.save(counters.step, state.tensors(build), values, build.change_hooks)
        elif self._saved_step == counters.step:
            self.checkpoints.amend(counters.step, values)
        else:
            self.checkpoints.save(counters.step, state.tensors(build), values, build.change_hooks)
        self._saved_step = self._saved_step if copies else counters.step
        self.signals.spent("checkpoint", time.perf_counter() - began_s)

    def _write_report(
        self, status: str, message: str, error: str = "", *, alone: bool = False
    ) -> None:
        counters = replace(self.counters, phase_s=dict(self.signals.totals_s))
        counters.stream = (
            counters.stream if status == "failed" or alone else state.stream_of(self.build)
        )
        remember(self.build, counters)
        report = summarize(
            self.build,
            counters,
            status=status,
            message=message,
            error=error,
            evidence=self.evidence or {},
            last=self.last,
            tracked=self.memory,
            rate=median(self.rates) if self.rates else None,
            waits_s=self.waits_s,
        )
        report["signals"] |= {
            "traces": self.windows.report(), "operations": self.operations,
            "gpu": self.gauges.report(), **self.between,
        }  # fmt: skip
        report["left_out"] = [one.to_dict() for one in self.build.prepared.left_out]
        report |= self.build.prepared.cleaning_fields
        if not self.first:
            return
        report |= {"parent": self.folder.parent, "resumed": self.resumed}
        report |= self.folder.lifetimes.account()
        if not self.steps_here and (before := self.folder.read("report")):
            report |= {key: before.get(key) for key in MEASURED}  # resumed at its end: still valid
        self.folder.write("report", report)
