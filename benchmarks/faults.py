"""Examine the doctor: train runs with one planted fault and healthy runs, and record each verdict.

    python benchmarks/faults.py --workloads cpu_dense cpu_packed --faults slow_loader spikes
    python benchmarks/faults.py --healthy 20

The official examination, from a checkout whose JUDGE files are committed, so that every row names
the commit of its thresholds, and on a host whose GPUs do nothing else. `--missing results` goes on
where an earlier call ended. Cases of one workload share its healthy runs and what was compiled.

    export OMP_NUM_THREADS=1                                 # on a CPU, two cores or more
    CUDA_VISIBLE_DEVICES= python benchmarks/faults.py --missing results
    CUDA_VISIBLE_DEVICES= python benchmarks/faults.py --healthy 16

    headrace probe                                           # once for each kind of GPU
    exam() { CUDA_VISIBLE_DEVICES=$1 python benchmarks/faults.py --results gpu$1 "${@:2}"; }
    both() { exam $1 --missing gpu$1 --workloads "${@:2}"
             exam $1 --healthy 8 --workloads "${@:2}"; }
    both 0 gpu_30m gpu_600m_muon & both 1 gpu_160m gpu_90m_deep &
    both 2 gpu_160m_accumulated gpu_400m_long & both 3 gpu_1b & wait
    cat gpu?/doctor.jsonl >> results/doctor.jsonl

112 healthy runs of seven workloads on a CPU and 77 on a GPU: 8 variants of each, and those that
faults are held against. On an H200 a case takes 13 to 20 s, more with larger steps.

Each run is `headrace.train.train.run` in a process of its own, then `headrace doctor` reads its
folder and its first finding is the verdict. A fault is planted from outside (faults_planted.py) at
the severity that is asked for; the row has the severity that was reached, against a healthy run of
the same workload in the same call. That run has a row too, as a healthy one, unless it has two
ranks, which share cores and wait for each other. `counts` says what severity is a share of: of the
step's time; of all steps' time, where few have the fault; of the tokens; of the progress, which is
the share of the healthy run's steps that the faulty one is behind at its end; of the steps that had
the fault, all of them where it ended the run; of the device's memory; of the step in which ranks
wait for a stage. A run that fails of its fault is judged by what it left. A fault that cannot be
planted on a device is printed, without a row; a run that left nothing has a refused one. Rows of
UNSEEN_FAULTS and of UNSEEN workloads are marked: these were written beside the thresholds and never
run to set them.

With `--keep` what a run left stays beside the rows, and `--again` judges it anew, at no device
time: rows of other thresholds on the same runs. What is held out is run once these are fixed.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import fault_foreign
import fault_kept
import receipts
import torch
from fault_hooks import Case
from fault_workloads import UNSEEN, VARIANTS, WORKLOADS, Workload, variants
from faults_planted import FAULTS, SEEN, UNSEEN_FAULTS, change_of, settings_of, train_case

from headrace.doctor.observation import WARM_STEPS, read_rows

SEVERITIES = (0.1, 0.2, 0.4)
CHILD_LIMIT_S = 300
JUDGE = tuple(
    f"headrace/doctor/{name}.py"
    for name in (
        *("rules", "across_ranks", "stages", "physics", "observation", "series", "recipe", "run"),
        "trace/limits",
    )
)
"""Files that define the doctor's thresholds, and compute what is compared with them."""
SMOOTH = 5
"""Steps over which losses are averaged before runs are compared."""


@dataclass
class Ran:
    """Hold what a run left when it ended.

    Args:
        folder: the run's; of a loop that is not ours, the file that its watch saved.
        facts: what the fault reports of itself.
        error: why it ended early, "" when it did not.
        rows: metrics.jsonl.
        report: report.json.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step, with recompilations spread over all steps."""
        rows = self._undisturbed
        usual = median([r["step_s"] for r in rows if not r["compile_s"]] or [math.nan])
        recompiled = sum(r["step_s"] - usual for r in rows if r["compile_s"])
        return usual + max(0.0, recompiled) / max(1, len(rows))

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of a step, rare costs included."""
        return fmean([row["step_s"] for row in self._undisturbed] or [math.nan])

    @property
    def _undisturbed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows[WARM_STEPS:] if not row.get("traced")]

    @property
    def losses(self) -> list[float]:
        """Return each step's loss, averaged over `SMOOTH` steps; infinite if one is no number."""
        raw = [math.inf if r["loss"] is None else r["loss"] for r in self.rows]
        return [fmean(raw[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(raw))]


def severity_of(counts: str, ran: Ran, healthy: Ran) -> float | None:
    """Return the share of a step that the fault took; None when the run is too brief to show it."""
    if counts == "time":
        share = 1 - healthy.step_s / ran.step_s
    elif counts == "stalls":
        share = 1 - healthy.mean_s / ran.mean_s
    elif counts == "steps" and ran.error:
        share = 1.0
    elif counts == "tokens":
        share = ran.report["wasted_token_fraction"]
    elif counts == "progress":
        if ran.error or not math.isfinite(ended := (ran.losses or [math.nan])[-1]):
            return 1.0
        behind = next((i for i, loss in enumerate(healthy.losses) if loss <= ended), None)
        share = 0.0 if behind is None else 1 - (behind + 1) / len(healthy.losses)
    else:
        share = ran.facts.get("share", math.nan)
    return max(0.0, share) if math.isfinite(share) else None


class Examination:
    """Run cases, ask the doctor about each, and write its rows."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.ends_s = time.monotonic() + args.limit_s
        self.count, self.right, self.judged = 0, 0, 0
        self.thresholds = thresholds()
        self.healthy: dict[tuple[Any, ...], Ran | str] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["faults_planted"])

    @property
    def out_of_time(self) -> bool:
        """Return whether no further case may begin."""
        return time.monotonic() > self.ends_s

    def run(self, workload: Workload, overrides: Sequence[str], **what: Any) -> Ran | str:
        """Train in a process of its own, or one a rank; return why, as text, if nothing is left."""
        self.count += 1
        name, ranks = f"case-{self.count}", what.get("ranks", 1)
        case = Case(
            workload.plan,
            (
                f"directory={self.work / 'runs'}",
                f"data.directory={self.work / 'data'}",
                f"name={name}",
                *([f"mesh.data={ranks}"] if ranks > 1 else []),
                *overrides,
                *self.args.set,
            ),
            **what,
        )
        answer_file, folder = self.work / f"{name}.json", self.work / "runs" / name
        watched = folder / fault_foreign.FILE
        if self.args.here:
            train_case(case, answer_file)
        elif why := self._children(case, answer_file):
            return why
        answer = json.loads(answer_file.read_text())
        if watched.is_file():
            report = json.loads(watched.read_text())
            return Ran(watched, answer["facts"], answer["error"], report["rows"], report)
        if not (folder / "report.json").is_file():
            return answer["error"] or "the run left no report"
        report = json.loads((folder / "report.json").read_text())
        rows = read_rows(folder / "metrics.jsonl")
        return Ran(folder, answer["facts"], answer["error"], rows, report)

    def _children(self, case: Case, answer_file: Path) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        worlds = [
            {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(case.ranks),
                "LOCAL_RANK": str(rank),
            }
            if case.ranks > 1
            else {}
            for rank in range(case.ranks)
        ]
        log = answer_file.with_suffix(".log")
        children = [
            self.context.Process(target=child, args=(case, answer_file, world, log))
            for world in worlds
        ]
        for process in children:
            process.start()
        ends_s = time.monotonic() + CHILD_LIMIT_S
        for process in children:
            process.join(max(0.0, ends_s - time.monotonic()))
        slow = [process for process in children if process.is_alive()]
        for process in slow:
            process.kill()
            process.join()
        if slow:
            return f"not done within {CHILD_LIMIT_S} s"
        if answer_file.is_file():
            return ""
        answered = log.read_text().strip().splitlines() if log.is_file() else []
        return f"the process failed: {answered[-1] if answered else children[0].exitcode}"

    def reference(
        self,
        workload: Workload,
        ranks: int = 1,
        setting: tuple[str, ...] = (),
        foreign: bool = False,
    ) -> Ran | str:
        """Return the healthy run to compare with: the fastest, since noise only slows."""
        key = (workload.name, ranks, setting, foreign)
        for _ in range(self.args.references if key not in self.healthy else 0):
            ran = self.run(workload, setting, ranks=ranks, foreign=foreign)
            before = self.healthy.get(key)
            if isinstance(ran, str):
                self.healthy.setdefault(key, ran)
                continue
            if not isinstance(before, Ran) or ran.step_s < before.step_s:
                self.healthy[key] = ran
            if ranks == 1:
                about = {"setting": list(setting), "foreign": foreign}
                self.write("healthy", workload, ran, **about)
        return self.healthy[key]

    def fault(self, name: str, severity: float, workload: Workload) -> None:
        """Run with one fault, ask the doctor, write a row."""
        fault = FAULTS[name]
        if workload.device not in fault.devices:
            print(f"{name} in {workload.name}: no row: {fault.why_not}", flush=True)
            return
        if name in SEEN and workload.name in UNSEEN:
            print(f"{name} in {workload.name}: no row: its rule has seen such a run", flush=True)
            return
        setting = settings_of(fault, workload.device)
        healthy = self.reference(workload, fault.ranks, setting, fault.foreign)
        about = {
            "fault": name,
            "wanted": severity,
            "counts": fault.counts,
            "held_out": name in self.args.held_out or workload.name in self.args.held_out,
            "expected": fault.expected,
            "ranks": fault.ranks,
            "setting": list(setting),
        }
        if isinstance(healthy, str):
            self.refuse(workload, f"its healthy run failed: {healthy}", **about)
            return
        plan = Case(workload.plan, ()).plan()
        ran = self.run(
            workload,
            [*setting, *change_of(fault, severity, plan)],
            fault=name,
            severity=severity,
            step_s=healthy.step_s,
            ranks=fault.ranks,
            foreign=fault.foreign,
        )
        if isinstance(ran, str):
            self.refuse(workload, ran, **about)
            return
        measured_share = severity_of(fault.counts, ran, healthy)
        times = {"healthy_step_s": healthy.step_s, "step_s": ran.step_s}
        self.write("fault", workload, ran, severity=measured_share, **about, **times)

    def seed(self, workload: Workload, seed: int) -> None:
        """Run one healthy run; each seed has a variant of the workload."""
        if self.out_of_time:
            return
        known = variants(workload.device)
        variant = known[seed % len(known)]
        given = [f"seed={seed}", *VARIANTS[variant]]
        ran = self.run(workload, given, resumed=variant == "resumed")
        if isinstance(ran, Ran) and not ran.error:
            self.write("healthy", workload, ran, variant=variant)
        else:
            why = ran if isinstance(ran, str) else ran.error
            print(f"{variant} in {workload.name}: no row: {why}", flush=True)

    def refuse(self, workload: Workload, why: str, **about: Any) -> None:
        """Write a row for a run that left nothing."""
        receipts.append(
            "doctor",
            {},
            results=self.args.results,
            measurement="fault",
            workload=workload.name,
            severity=None,
            verdict=None,
            abstained=True,
            thresholds=self.thresholds,
            refused=why,
            **about,
        )
        print(f"{about['fault']} in {workload.name}: refused: {why}", flush=True)

    def write(self, measurement: str, workload: Workload, ran: Ran, **about: Any) -> None:
        """Ask the doctor, and write its verdict as a row."""
        answer = fault_kept.verdict_of(ran.folder)
        if self.args.keep:
            answer["kept"] = fault_kept.keep(ran.folder, self.args.results)
        receipts.append(
            "doctor",
            {},
            results=self.args.results,
            measurement=measurement,
            workload=workload.name,
            **answer,
            thresholds=self.thresholds,
            ended=ran.error,
            planted=ran.facts,
            steps=len(ran.rows),
            seeds=[ran.report.get("seed")],
            **about,
        )
        verdict = answer["verdict"]
        label = f"healthy {about.get('variant', '')}".strip()
        if measurement == "fault":
            self.judged += 1
            self.right += verdict == about["expected"]
            share = "?" if about["severity"] is None else f"{about['severity']:.2f}"
            label = f"{about['fault']} {about['wanted']:g} (reached {share})"
        print(f"{label} in {workload.name}: {verdict}", flush=True)


def child(case: Case, answer_file: Path, world: dict[str, str], log: Path) -> None:
    """Run one rank and write its errors to `log`; the first rank reports the rest."""
    os.environ.update(world)
    with log.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        mine = answer_file if world.get("RANK", "0") == "0" else answer_file.with_suffix(".other")
        train_case(case, mine)


def thresholds() -> str | None:
    """Return the commit that last changed the doctor's thresholds; None outside of a checkout."""
    git = ["git", "-C", str(receipts.ROOT)]
    last, open_ = (
        subprocess.run([*git, *words, "--", *JUDGE], capture_output=True, text=True, check=False)
        for words in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
    )
    sha = last.stdout.strip()
    return f"{sha} and changes" if sha and open_.stdout.strip() else sha or None


def done_before(folder: Path | None, now: str | None) -> set[tuple[str, float, str]]:
    """Return faults that have a row under these thresholds in another results folder."""
    file = folder / "doctor.jsonl" if folder else None
    lines = file.read_text().splitlines() if file and file.is_file() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {
        (r["fault"], r["wanted"], r["workload"])
        for r in rows
        if "fault" in r and "refused" not in r and r["thresholds"] == now
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, help="all without it")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, help="all of this device")
    parser.add_argument("--severities", nargs="+", type=float, default=list(SEVERITIES))
    parser.add_argument("--healthy", type=int, default=0, help="seeds of each healthy workload")
    parser.add_argument("--references", type=int, default=1, help="healthy runs to be held against")
    parser.add_argument(
        "--held-out",
        nargs="*",
        default=[*UNSEEN_FAULTS, *UNSEEN],
        help="faults and workloads that no threshold was set by",
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--missing", type=Path, help="a results folder: only what has no row there")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    parser.add_argument("--keep", action="store_true", help="runs stay, in RESULTS/runs")
    parser.add_argument("--again", type=Path, help="judge runs anew that were kept in this folder")
    parser.add_argument("--here", action="store_true", help="in this process, to debug")
    args = parser.parse_args()
    if unknown := set(args.held_out) - {*FAULTS, *WORKLOADS}:
        raise SystemExit(f"no fault and no workload: {', '.join(sorted(unknown))}")
    if args.again:
        right, of = fault_kept.rejudge(args.again, args.results, thresholds())
        print(f"{right} of {of} runs judged right")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = args.workloads or [n for n, w in WORKLOADS.items() if w.device == device]
    asked = args.faults if args.faults is not None else [] if args.healthy else list(FAULTS)
    with tempfile.TemporaryDirectory() as work:
        exam = Examination(args, Path(work))
        done = done_before(args.missing, exam.thresholds)
        for name in names:
            for seed in range(1, args.healthy + 1):
                exam.seed(WORKLOADS[name], seed + names.index(name))
            for fault, severity in ((f, s) for f in asked for s in args.severities):
                if (fault, severity, name) in done:
                    continue
                if exam.out_of_time:
                    print(f"left: {fault} {severity:g} in {name}", flush=True)
                    continue
                exam.fault(fault, severity, WORKLOADS[name])
        print(f"{exam.right} of {exam.judged} faults named right", flush=True)


if __name__ == "__main__":
    sys.exit(main())
