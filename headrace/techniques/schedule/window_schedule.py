"""Begin with a small window of attention and widen it: near tokens are learned first.

Early on a model learns from near tokens. A window that starts small makes those steps cheaper with
a backend that skips what a mask forbids, and widens as far tokens begin to tell something. The
window is a pure function of the step: `start`, then twice as many tokens and so on while that is
below the window of `sliding_window`, then that window, in equal parts of the time until `until`.
There are few windows, because each is a mask that a compiler may compile anew. Evaluation always
has the whole window, and layers that `sliding_window` leaves without one stay so.

Beside `sequence_length_schedule` with the same `until`, windows widen as rows lengthen. Left out:
rows that ranks share, whose mask is divided once.
Source: github.com/KellerJordan/modded-nanogpt (window warmup).
"""

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.plan.until import doubled, end_step, unknown_end, unreached_end, value_at

WINDOWED = "sliding_window"
"""The technique whose window widens."""


class WindowSchedule(Technique[Build]):
    """Begin with a small window of attention and widen it: near tokens are learned first."""

    start: int = Field(default=128, ge=1, le=1 << 24)
    """Tokens that a token sees in the first step, itself included; tuner range 64 to 512."""
    until: float = Field(default=0.3, gt=0, le=10**15)
    """When the window is whole: at most 1 is a share of the schedule's steps, above it is a
    step."""

    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("values", "before_step", "after_update")
    equality: ClassVar = "learning"
    follows_horizon: ClassVar[bool] = True
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys="attention of small windows in the first steps, with flex_attention",
        costs=(
            "one more mask for each window, which compiled code may be compiled anew for",
            "the first steps see no far tokens",
        ),
        helps="long rows with flex_attention, where attention is a large share of the work",
        hurts="fine-tuning of a model that knows far tokens already",
        source="github.com/KellerJordan/modded-nanogpt",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a schedule by which no step of the run has the whole window."""
        ends = end_step(self.until, plan.horizon_steps)
        so = "no step trains with the window that is validated"
        return unreached_end(self, plan, ends, "makes the window whole", so)

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a window to widen, from a smaller one, until a step that is known."""
        plan, name = context.plan, self.name()
        if plan is None:
            return Supported()
        windowed: Any = plan.techniques.get(WINDOWED)
        if windowed is None:
            return Unsupported(
                f"there is no {WINDOWED} whose window it widens", mend(f"+{WINDOWED}")
            )
        if self.start >= windowed.window:
            if windowed.window < 2:
                return Unsupported(
                    f"a window of {windowed.window} tokens has none below it to start from",
                    mend(f"techniques.{WINDOWED}.window={max(2, plan.data.sequence_length // 4)}"),
                )
            return Unsupported(
                f"start = {self.start} tokens is no less than {WINDOWED}'s window of "
                f"{windowed.window}",
                mend(f"techniques.{name}.start={max(1, windowed.window // 4)}"),
            )
        if plan.mesh.context > 1:
            return Unsupported(
                f"a mask that mesh.context = {plan.mesh.context} ranks share is divided once",
                context.whole("context"),
            )
        if end_step(self.until, plan.horizon_steps) is None:
            return unknown_end(f"techniques.{name}.until", self.until)
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return what the whole window costs, which comes: the peak, and most of the steps."""
        return ledger

    def apply(self, build: Build) -> None:
        """Give each step its window, and evaluation the whole one."""
        whole, ends = build.mask.window, end_step(self.until, build.plan.horizon_steps)
        assert whole is not None and ends is not None
        windows = doubled(self.start, whole)

        def widen(build: Build) -> None:
            window = int(build.now["window"])
            build.model.mask = replace(build.model.mask, window=window)
            seen[window] = seen.get(window, 0) + 1

        def restore(build: Build, _: Tensor) -> None:
            build.model.mask = replace(build.model.mask, window=whole)

        seen: dict[int, int] = {}
        build.notes[self.name()] = seen
        build.values["window"] = lambda step: float(value_at(step, windows, ends))
        build.before_step.append(widen)
        build.after_update.append(restore)

    def active(self, build: Build) -> Evidence:
        """Report the windows of the steps that were trained, and look for the whole one now."""
        seen: dict[int, int] = build.notes[self.name()]
        now = build.now.get("window")
        return Evidence(
            active=now is not None
            and seen.get(int(now), 0) > 0
            and build.model.mask.window == build.mask.window,
            detail="trained with windows of " + (" and ".join(map(str, seen)) or "no") + " tokens",
            numbers={f"steps_of_{window}": count for window, count in seen.items()},
        )
