"""Open a run that has ended: its plan, its numbers, and what its model says."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from headrace.cli.catalogue import catalogue
from headrace.core.inline import inline_page
from headrace.doctor.observation import read_rows
from headrace.export.opened import open_any
from headrace.inference.load import read_recorded_plan, resolve_run
from headrace.inference.sample import generate_text
from headrace.plan.plan import Plan
from headrace.report.single import write_report
from headrace.train.checkpoint import steps_in
from headrace.train.evaluate import Validation, evaluate, finite
from headrace.train.run_folder import RunFolder


@dataclass(frozen=True)
class OpenedRun:
    """Hold a run by its folder. Everything is read when it is asked for.

    Args:
        folder: the folder of the run, as runs/NAME.
    """

    folder: Path

    @cached_property
    def plan(self) -> Plan:
        """Return the plan that the run was started with."""
        return read_recorded_plan(self.folder, catalogue())

    @property
    def report(self) -> dict[str, Any]:
        """Return the object of report.json.

        Raises:
            ConfigError: the run has not ended.
            RunError: the file is damaged.
        """
        return RunFolder(self.folder).read_report()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one a step, also of a run that goes on.

        Raises:
            RunError: the file is damaged.
        """
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints that are complete, the oldest first."""
        return [f"step-{step}" for step in steps_in(self.folder / "checkpoints")]

    def evaluate(self, *, tokens: int | None = None, checkpoint: str | None = None) -> Validation:
        """Return the loss on the run's validation text, as `headrace eval` does.

        Args:
            tokens: at most so many, spread evenly over the text; all without it.
            checkpoint: "step-N", "latest" or "best"; without it the best, or else the latest.

        Raises:
            ConfigError: there is no such checkpoint, or the text has changed.
            RunError: the checkpoint is damaged.
        """
        opened = open_any(self.folder, catalogue(), checkpoint=checkpoint, with_data=True)
        return opened.compute(lambda: finite(evaluate(opened.build, tokens)))

    def sample(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        checkpoint: str | None = None,
    ) -> str:
        """Return the text that the model continues a prompt with, as `headrace sample` does.

        Args:
            prompt: the beginning of a document.
            tokens: most tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: how many of the likeliest tokens are drawn from; 0 is all.
            top_p: share of the probability that is drawn from, above 0 and at most 1.
            seed: of the draws.
            checkpoint: "step-N", "latest" or "best"; without it the best, or else the latest.

        Raises:
            ConfigError: there is no such checkpoint.
            RunError: the checkpoint is damaged.
        """
        opened = open_any(self.folder, catalogue(), checkpoint=checkpoint)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return opened.compute(lambda: generate_text(opened.build, prompt, new_tokens=tokens, **how))

    def model(self, checkpoint: str | None = None) -> nn.Module:
        """Return the trained model on this machine's device, uncompiled.

        Args:
            checkpoint: "step-N", "latest" or "best"; without it the best, or else the latest.

        Raises:
            ConfigError: there is no such checkpoint.
            RunError: the checkpoint is damaged.
        """
        return open_any(self.folder, catalogue(), checkpoint=checkpoint).build.model

    def write_page(self, output: Path | None = None) -> Path:
        """Write the page about the run, as `headrace report` does, and return its path.

        Args:
            output: where it goes; report.html in the run's folder without it.

        Raises:
            ConfigError, RunError: the run has not ended, or the page cannot be written.
        """
        return write_report(self.folder, output)

    def _repr_html_(self) -> str:
        page = self.folder / "report.html"
        if not page.is_file():
            page = self.write_page()
        return inline_page(page.read_text())


def open_run(name: str | Path) -> OpenedRun:
    """Open a run by its folder, or by its name under `runs`.

    Args:
        name: as "demo" or "runs/demo".

    Raises:
        ConfigError: there is no such run; the message names the nearest.
    """
    return OpenedRun(resolve_run(Path(name)))
