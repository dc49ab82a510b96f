"""Time the steps of another trainer's loop, by signals that never wait."""

from collections.abc import Callable
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.observe.signals import Pending, Signals

WATCH = "headrace.watch(model, optimizer, loader)"
"""How a loop is watched, with the model and the torch.optim.Optimizer that steps."""
NUMBERS: tuple[str, ...] = ("loss", "grad_norm", "skipped", "targets", "padded")
"""Numbers that may stand on the device until their step is complete."""
MOST_MARKS = 8192
"""Moments without an optimizer step after which they are forgotten: nothing is being trained."""


class HookClock(Signals):
    """Time phases that hooks mark, with numbers that may be unknown."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.asynchronous = self.cuda

    def mark(self, phase: str) -> None:
        """Begin a phase now; an evaluation may be one."""
        if len(self._marks) >= MOST_MARKS:
            self._free += [moment for _, moment in self._marks]
            self._marks.clear()
        self._marks.append((phase, self._moment()))

    def dry(self) -> bool:
        """Return whether the device has done everything up to the last mark."""
        return bool(self._marks) and self._marks[-1][1].query()

    def rename(self, phase: str, other: str) -> None:
        """Take this step's marks of one phase for another's."""
        self._marks = [(other if p == phase else p, m) for p, m in self._marks]

    def rename_last(self, phase: str) -> None:
        """Take what has run since the last mark for another phase."""
        if self._marks:
            self._marks[-1] = (phase, self._marks[-1][1])

    @property
    def waiting(self) -> int:
        """Return how many steps were not complete at the last `drain`."""
        return len(self._pending)

    def _named(self, numbers: list[float]) -> dict[str, Any]:
        return dict(zip(NUMBERS, numbers, strict=True))

    def _row(self, pending: Pending) -> dict[str, Any]:
        """Return a row with the known numbers only; `host` holds what was added up on the host."""
        host, losses = pending.facts.pop("host"), pending.facts.pop("losses")
        row = super()._row(pending)
        for name in NUMBERS:
            if name in host:
                row[name] += host[name]
            else:
                del row[name]
        if "loss" in row:
            row["loss"] /= losses
        row["step_s"] -= row.get("eval_s", 0.0) + row.get("checkpoint_s", 0.0)
        row["input_s"] += row.get("transfer_s", 0.0)
        return row


class Hook:
    """A hook does nothing while torch.compile traces it, nor in a copy of its module."""

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        """Run it."""
        if not torch.compiler.is_compiling() and self.run is not None:
            self.run(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def autocast_of(device: torch.device) -> str | None:
    """Return the dtype of torch.autocast, if what runs now runs in it."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def with_hooks(optimizer: Any) -> Any:
    """Return torch's optimizer from inside of wrappers such as accelerate's.

    Raises:
        ConfigError: there is none.
    """
    inner = optimizer
    while "_optimizer_step_pre_hooks" not in getattr(inner, "__dict__", {}):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            message = f"headrace.watch cannot see the steps of a {type(optimizer).__name__}"
            raise ConfigError(f"{message}, which is no torch.optim.Optimizer", WATCH)
    return inner
