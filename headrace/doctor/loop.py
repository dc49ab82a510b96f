"""Define what is known of a loop that is not Headrace's, and a change of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.plan.symptoms import LoopChange


@dataclass(frozen=True)
class Loop:
    """Hold what is known of a loop; without a report, as for a trace alone, next to nothing.

    Args:
        report: what `headrace.watch` saved.
    """

    report: Mapping[str, Any]

    def of(self, table: str, name: str) -> Any:
        """Return a fact in a table of the report; None where it was not read."""
        facts = self.report.get(table)
        return facts.get(name) if isinstance(facts, Mapping) else None

    @property
    def trainer(self) -> bool:
        """Return whether a Hugging Face Trainer runs it."""
        return self.report.get("trainer") is not None

    @property
    def cuda(self) -> bool:
        """Return whether it trains on a GPU; a trace that can be judged was made on one."""
        return self.report.get("device", "cuda") == "cuda"

    @property
    def workers(self) -> int | None:
        """Return how many processes read; None where the loader is none of torch's, or unknown."""
        return self.of("loader", "num_workers")

    @property
    def half(self) -> bool:
        """Return whether its matmuls are known not to be of fp32."""
        mixed = self.report.get("autocast") or self.of("trainer", "bf16")
        narrow = self.report.get("dtype") in ("bfloat16", "float16")
        return bool(mixed or narrow or self.of("trainer", "fp16"))

    @property
    def compiled(self) -> bool:
        """Return whether its model is known to be compiled."""
        made = self.of("compiler", "graphs") or self.report.get("compiled")
        return bool(made or self.of("trainer", "torch_compile"))

    @property
    def lr(self) -> float | None:
        """Return the highest learning rate of the steps that are kept."""
        rates = [row["lr"] for row in self.report.get("rows") or () if row.get("lr")]
        return max(rates, default=None)


def _nothing_left(share: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Change:
    """Hold a change of a loop that helps with a finding.

    Args:
        words: the change, in a loop of one's own.
        what: what it does.
        costs: what it costs.
        trainer: the change in the words of a Trainer, where they are others.
        same: the change by its name; techniques that do it in Headrace have it among their
            `loop_changes`.
        symptom: without such a name, the word of the techniques that do it.
        keys: keys of a plan that do it.
        equality: what it does to the gradients: "exact", "approximate" or "learning".
        share: the share that is forecast, in place of the finding's.
        part: what it helps with, where that is not all of the finding, and no share says.
        left: share of a step that stays at least, by the share of the finding.
    """

    words: str
    what: str
    costs: str
    trainer: str = ""
    same: LoopChange | None = None
    symptom: str = ""
    keys: tuple[str, ...] = ()
    equality: str = "exact"
    share: float | None = None
    part: str = ""
    left: Callable[[float], float] = _nothing_left
