"""A run's folder: what is written where, and nothing that an earlier run left is lost.

`runs/NAME/` holds plan.toml, environment.json, metrics.jsonl (one row a step), checkpoints/, and in
the end report.json, findings.json and report.html. A name that is taken becomes NAME-2, NAME-3 and
so on; `--resume` continues the newest of them.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.core.plan import Plan
from headrace.data.tokenizer import Tokenizer


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @staticmethod
    def create(plan: Plan, *, resume: bool, made: str | None = None) -> "RunFolder":
        """The folder for `plan`: a fresh one, or the newest of its name to resume.

        Args:
            plan: its `name` and `directory` say where.
            resume: continue what is there.
            made: the folder that rank 0 already chose, when there are several ranks.

        Raises:
            ConfigError: nothing of that name is there to resume.
        """
        if made is not None:
            return RunFolder(Path(made))
        root, base = Path(plan.directory), re.sub(r"-\d+$", "", plan.name)
        taken = _numbered(root, base)
        if resume:
            exact = root / plan.name
            if plan.name != base and exact.is_dir():
                return RunFolder(exact)
            if not taken:
                raise ConfigError(
                    f"there is no run {base!r} in {root} to resume", "leave out --resume"
                )
            return RunFolder(taken[max(taken)])
        name = base if not taken else f"{base}-{max(taken) + 1}"
        folder = RunFolder(root / name)
        folder.path.mkdir(parents=True)
        return folder

    def start(
        self, plan: Plan, tokenizer: Tokenizer, device: torch.device, command: list[str]
    ) -> None:
        """Write the resolved plan, the tokenizer and the environment."""
        named = plan.replaced(name=self.path.name)
        (self.path / "plan.toml").write_text(named.to_toml())
        tokenizer.save(self.path / "tokenizer.json")
        self.write("environment", environment(device, command))

    def write(self, name: str, value: Any) -> None:
        """Write NAME.json, never half of it."""
        aside = self.path / f".{name}.json"
        aside.write_text(json.dumps(value, indent=1, allow_nan=False, default=str))
        os.replace(aside, self.path / f"{name}.json")

    def read(self, name: str) -> Any:
        """NAME.json, or None when it is not there."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def read_report(self) -> dict[str, Any]:
        """report.json.

        Raises:
            ConfigError: the run has not ended yet.
        """
        report = self.read("report")
        if report is None:
            raise ConfigError(
                f"{self.path} has no report.json: the run has not ended",
                f"headrace train {self.path / 'plan.toml'} --resume",
            )
        return report

    def cut_metrics(self, steps: int) -> None:
        """Keep the rows of the first `steps` steps: what came later is trained again."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a kill cut short
            if row["step"] <= steps:
                kept.append(line + "\n")
        aside = path.with_name(".metrics.jsonl")
        aside.write_text("".join(kept))
        os.replace(aside, path)


def _numbered(root: Path, base: str) -> dict[int, Path]:
    found = {}
    for path in root.glob(f"{base}*"):
        match = re.fullmatch(rf"{re.escape(base)}(?:-(\d+))?", path.name)
        if match and path.is_dir():
            found[int(match[1] or 1)] = path
    return found


def environment(device: torch.device, command: list[str]) -> dict[str, Any]:
    """Where a run happens: hardware, versions, commit."""
    from headrace import __version__

    cuda = device.type == "cuda"
    return {
        "headrace": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "devices": torch.cuda.device_count() if cuda else 1,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "command": " ".join(command),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The package's own commit when it runs from a checkout."""
    here = Path(__file__).resolve().parent
    try:
        told = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None if told.returncode == 0 else None


def command_line() -> list[str]:
    """The command that repeats this run."""
    return ["headrace", *sys.argv[1:]]
