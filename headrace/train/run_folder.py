"""Read and write the folder of a run, without losing what an earlier run left.

`runs/NAME/` holds plan.toml (and .plan.toml, an unedited copy of the plan that was run),
environment.json, lifetimes.json, data.json (which data it is), metrics.jsonl (one row a step),
checkpoints/, pretrained/ (small files of the folder that it started from), and at the end
report.json, findings.json and report.html. Where NAME is taken, the folder is NAME-2, NAME-3 and
so on; `--resume` continues the newest of them. A launch gives its run a name of its own, which is
neither numbered nor another's. Files are written under another name and then renamed, so that a
kill leaves either the old or the new file. A lock keeps two processes out of one folder; the system
releases it however a process ends.
"""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EDQUOT, EIO, ENOSPC, EROFS, ESTALE
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from headrace.core.command import rerun, rerun_train, train_command
from headrace.core.errors import ConfigError, RunError, at_a_limit
from headrace.core.files import (
    RECORDED,
    hold_lock,
    parse_json,
    parse_object,
    printable,
    publish,
    shell,
    sync_path,
    write_whole,
)
from headrace.data.chat.record import TEMPLATE_FILE
from headrace.data.prepared import Prepared
from headrace.model.companions import KEPT_IN
from headrace.plan.plan import Plan
from headrace.train.checkpoint import Checkpoints, check_space
from headrace.train.identity import WROTE
from headrace.train.lifetimes import Lifetimes

LOST = (
    "closed by peer",
    "reset by peer",
    "was likely closed",
    "Broken pipe",
    "NCCL error",
    "NCCL communicator was aborted",
)
"""Parts of the messages by which gloo, a store and NCCL report that a connected process is gone."""


class RankLost(RunError):
    """A collective failed because another rank has ended."""


class RunFolder:
    """A run folder holds the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.lifetimes = Lifetimes(path, [])

    @staticmethod
    def find(plan: Plan, folder: Path | None = None) -> "RunFolder":
        """Return the run to resume: `folder`, or the newest run of the plan's name.

        Raises:
            ConfigError: there is no such run.
        """
        root = Path(plan.directory)
        taken = {1: folder} if folder else _taken(plan)
        # An empty folder, left by a kill while it was made, has nothing to resume.
        taken = {n: path for n, path in taken.items() if any(path.iterdir())} or taken
        if not taken:
            raise ConfigError(
                f"there is no run {plan.name!r} in {root} to resume", "leave out --resume"
            )
        return RunFolder(taken[max(taken)])

    @staticmethod
    def create(plan: Plan) -> "RunFolder":
        """Create and return a new folder for `plan`.

        Raises:
            ConfigError: the folder cannot be made.
        """
        root = Path(plan.directory)
        number = max(_taken(plan), default=0) + 1
        while True:
            path = root / (plan.name if number == 1 else f"{plan.name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1  # another process was faster
            except OSError as error:
                raise ConfigError(
                    f"runs cannot be kept in {root}: {error}",
                    "directory=FOLDER that can be written",
                ) from None
            else:
                sync_path(root)
                return RunFolder(path)

    def fork(self, plan: Plan, checkpoint: Path) -> "RunFolder":
        """Return a new folder that begins at a checkpoint of this run; this run is not changed."""
        step = checkpoint.resolve().name
        names = ("metrics.jsonl", "data.json", "tokenizer.json", TEMPLATE_FILE)
        files = [path for name in names if (path := self.path / name).is_file()]
        need = sum(path.stat().st_size for path in (*files, *checkpoint.iterdir()))
        index = (checkpoint / "checkpoint.json").read_bytes()
        parent = {"run": str(self.path), "step": int(step.removeprefix("step-"))}
        parent["sha256"] = hashlib.sha256(index).hexdigest()
        remove_partial(Path(plan.directory))
        made = RunFolder.create(plan)
        aside = RunFolder(made.path.with_name(f".{made.path.name}.partial"))
        intact, go_on = f"{self.path} stays as it is", rerun(verb="train PLAN --resume")
        try:
            aside.path.mkdir()
            aside.lock()  # so that no process removes it as the remains of a kill
            check_space(made.path.parent, need, f"a new run from {step}", intact, go_on)
            shutil.copytree(checkpoint, aside.checkpoints / step)
            for path in files:
                shutil.copyfile(path, aside.path / path.name)
            if (companions := self.path / KEPT_IN).is_dir():
                shutil.copytree(companions, aside.path / KEPT_IN)
            named = plan.replaced(name=made.path.name)
            kept = Checkpoints(aside.checkpoints, rank=0, ranks=1, keep_last=1)
            before = json.loads(index)
            wrote = {WROTE: before.get(WROTE, before["plan"])}
            kept.amend(parent["step"], {"plan": named.dump(), **wrote})
            aside.write_plan(named)
            aside.write("environment", {"parent": parent})
            aside.unlock()
            publish(aside.path, made.path)
        except BaseException as error:
            shutil.rmtree(aside.path, ignore_errors=True)
            with suppress(OSError):
                made.path.rmdir()
            if not isinstance(error, OSError):
                raise
            first = error.args[0][0][2] if isinstance(error, shutil.Error) else error
            raise RunError(
                f"a new run from {step} cannot be written: {first}; {intact}",
                f"free some space, then {go_on}; or {go_on} directory=FOLDER that can be written",
            ) from None
        return made

    def drop_unbegun(self) -> None:
        """Remove a fork in which no training began, as where its checkpoint cannot be read."""
        known = self.read("environment") or {}
        if "parent" in known and "starts" not in known:
            shutil.rmtree(self.path)

    @property
    def parent(self) -> dict[str, Any] | None:
        """Return the run and the step that this run was forked from; None where it is no fork."""
        known = (self.read("environment") or {}).get("parent")
        return known if isinstance(known, dict) else None

    def lock(self) -> None:
        """Lock the folder against other processes until `unlock`, or until this process ends.

        Raises:
            ConfigError: another process is training this run, or its file system has no locks.
        """
        try:
            self._lock = hold_lock(self.path / ".lock", wait=False, key="directory")
        except Timeout:
            raise ConfigError(
                f"another process is training {self.path}",
                f"{rerun_train(self.path, 'name=NEW')} for a new run, or wait until it ends",
            ) from None

    def unlock(self) -> None:
        """Release the lock, so that other processes can use the folder."""
        self._lock.release()

    def start(
        self,
        plan: Plan,
        prepared: Prepared,
        device: torch.device,
        command: list[str],
        age_s: float = 0.0,
    ) -> int:
        """Write the resolved plan, the data's record, the tokenizer and the environment.

        An earlier report gets the status "running". Return how often the run was started before.

        Args:
            plan: the run's.
            prepared: its data.
            device: where it runs.
            command: what was typed.
            age_s: the seconds since this process began.
        """
        known = self.read("environment") or {}
        starts = known.get("starts", 0)
        parent = {"parent": known["parent"]} if "parent" in known else {}
        before = starts if isinstance(starts, int) else 0
        self.lifetimes = Lifetimes.begin(self.path, self._status() if before else None, age_s)
        with suppress(RunError):  # a damaged report is written anew at the end
            if report := self.read("report"):
                self.write("report", report | {"status": "running"})
        self.write_plan(plan.replaced(name=self.path.name))
        prepared.tokenizer.save(self.path / "tokenizer.json")
        if prepared.chat is not None:
            prepared.chat.save(self.path)
        self.write("data", prepared.record())
        details = environment(device, command)
        self.write("environment", {**details, **parent, "starts": before + 1})
        return before

    def _status(self) -> str:
        """Return how the last processes of the run ended, by their report."""
        with suppress(RunError):  # a damaged report was not written to its end
            return str((self.read("report") or {}).get("status", "running"))
        return "running"

    def write_plan(self, plan: Plan) -> None:
        """Write plan.toml, and a copy of it that users do not edit."""
        for name in (RECORDED, "plan.toml"):
            write_whole(self.path / name, plan.to_toml())

    def write(self, name: str, value: Any) -> None:
        """Write NAME.json; numbers that are not finite become null."""
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda word: None)
        write_whole(self.path / f"{name}.json", json.dumps(plain, indent=1))

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the object of NAME.json; None where the file does not exist.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / f"{name}.json"
        if not path.exists():
            return None
        try:
            return parse_object(path.read_bytes())
        except (ValueError, OSError) as error:
            what = f"it {error}" if isinstance(error, ValueError) else f"{error.strerror}"
            raise RunError(f"{path} is damaged: {what}", self.mend(name)) from None

    def mend(self, name: str) -> str:
        """Return the command that renames a damaged NAME.json, and writes a report anew."""
        path = self.path / f"{name}.json"
        aside = f"mv {shell(path)} {shell(f'{path}.damaged')}"
        return f"{aside}; {train_command(self.path, '--resume')}" if name == "report" else aside

    def read_data(self) -> dict[str, Any] | None:
        """Return data.json, the record of the run's data; None where an older run has none.

        Raises:
            RunError: the file is damaged.
        """
        record = self.read("data")
        if record is None:
            return None
        names, digests = ("directory", "absolute"), record.get("fingerprint")
        texts = [record.get(name) for name in names]
        texts += digests.values() if isinstance(digests, dict) and digests else [None]
        if not all(isinstance(text, str) for text in texts):
            path = self.path / "data.json"
            raise RunError(
                f"{path} is damaged: it names no folder of shards, or no digest of them",
                f"{self.mend('data')}, and the data is prepared as plan.toml says",
            )
        return record

    def read_report(self) -> dict[str, Any]:
        """Return the object of report.json.

        Raises:
            ConfigError: the run has not ended yet.
            RunError: the file is damaged.
        """
        report = self.read("report")
        if report is None or report.get("status") == "running":
            what = "has no report.json" if report is None else "was resumed"
            raise ConfigError(
                f"{self.path} {what}: the run has not ended",
                train_command(self.path, "--resume"),
            )
        return report

    def cut_metrics(self, steps: int) -> float:
        """Keep the metrics rows of the first `steps` steps; later steps are trained again.

        Return the seconds that the run had taken at its last row, removed rows included.
        """
        path = self.path / "metrics.jsonl"
        kept, lost, wall_s, kept_s = [], 0, 0.0, 0.0
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        for line in lines:
            try:
                row = parse_json(line)
                early, wall_s = row["step"] <= steps, max(wall_s, row["wall_s"])
            except (ValueError, KeyError, TypeError):
                continue  # a kill truncated this line
            if early:
                kept.append(line + "\n")
                kept_s = wall_s
            else:
                lost += 1
        write_whole(path, "".join(kept))
        self.lifetimes.lost(lost, wall_s - kept_s)
        return wall_s


def metrics_line(row: Mapping[str, Any]) -> str:
    """Return a row of metrics.jsonl as a line; numbers that are not finite become null."""
    finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def remove_partial(root: Path) -> None:
    """Remove the folders of forks that a kill left half copied; no run uses them."""
    for partial in root.glob(".*.partial"):
        try:
            lock = hold_lock(partial / ".lock", wait=False, key="directory")
        except (Timeout, OSError):
            continue  # another process copies it now, or has just ended
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()
        with suppress(OSError):  # the folder is not empty
            partial.with_name(partial.name[1:].removesuffix(".partial")).rmdir()


@contextmanager
def telling_of_lost_ranks() -> Iterator[None]:
    """Convert the error of a lost rank into a RunError in words, before the run's folder exists."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST):
            raise _lost(error, rerun(verb="train PLAN")) from error
        raise


def _lost(error: RuntimeError, command: str) -> RankLost:
    sentence = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # without the C++ source
    return RankLost(
        "another rank ended, and says itself why; this one waited for it in vain "
        f"({sentence.splitlines()[0][:200]})",
        f"{command}, once that is mended",
    )


def in_words(error: BaseException | None, folder: Path) -> BaseException | None:
    """Return an error of a run in words for its user: a full disk, a limit or a lost rank."""
    if error is not None and (limit := at_a_limit(error)) is not None:
        return limit
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
        return _lost(error, train_command(folder, "--resume"))
    codes = (ENOSPC, EDQUOT, EIO, EROFS, ESTALE)
    if not isinstance(error, OSError) or error.errno not in codes:
        return error
    return RunError(
        f"{folder} cannot be written: {error}; the last complete checkpoint is intact",
        f"free some space, then {train_command(folder, '--resume')}",
    )


def _taken(plan: Plan) -> dict[int, Path]:
    """Return the folders of runs that have the plan's name, by their number.

    Of a launch it is the folder of that very name alone: others of the name are other launches.
    """
    folders = _numbered(Path(plan.directory), plan.name)
    launched = os.environ.get("HEADRACE_RUN") == plan.name
    return {n: path for n, path in folders.items() if n == 1 or not launched}


def _numbered(root: Path, name: str) -> dict[int, Path]:
    """Return the folders NAME (number 1), NAME-2, NAME-3, ... by their number."""
    folders = {}
    for path in root.glob(f"{name}*"):
        match = re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name)
        if match and path.is_dir():
            folders[int(match[1] or 1)] = path
    return folders


def environment(device: torch.device, command: list[str]) -> dict[str, Any]:
    """Return the environment of a run: hardware, versions and commit."""
    from headrace import __version__

    cuda = device.type == "cuda"
    return {
        "headrace": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "devices": torch.cuda.device_count() if cuda else 1,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "command": " ".join(command),
    }


def cpu_name() -> str:
    """Return the model of this processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _commit() -> str | None:
    """Return the commit of the checkout that the package runs from, read once per process.

    None where there is no checkout, or git cannot be run.
    """
    here = Path(__file__).resolve().parent
    try:
        process = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None if process.returncode == 0 else None


def command_line() -> list[str]:
    """Return the command that repeats this run, as words."""
    return ["headrace", *map(printable, sys.argv[1:])]
