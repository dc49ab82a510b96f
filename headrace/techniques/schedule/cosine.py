"""Let the learning rate fall along half a cosine from the warmup to the horizon.

It falls slowly at both ends and fastest in the middle. The whole curve depends on where it ends:
weights from its middle are not those of a shorter run, and a run that goes on past the horizon
stays at the last rate. `warmup_stable_decay` is for runs whose end is not known, and for several
lengths from one run. It rewrites `schedule.kind`, which is `cosine` by default.
Source: arXiv 1608.03983 (without restarts); that the horizon must be the run's length: arXiv
2203.15556, appendix B.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.scheduled import Falling
from headrace.plan.technique import Card


class Cosine(Falling):
    """Let the learning rate fall along half a cosine from the warmup to the horizon."""

    card: ClassVar[Card] = Card(
        buys="a lower loss at the horizon than a constant rate (arXiv 2405.18392, fig. 3)",
        costs="one run serves one length: its middle is no finished model (arXiv 2203.15556, "
        "appendix B)",
        helps="runs whose number of steps is known",
        hurts="runs that may go on, or whose horizon is not their length",
        source="arXiv 1608.03983; arXiv 2203.15556",
    )

    def curve(self) -> Mapping[str, Any]:
        """Return the kind, and the last share where one is asked for."""
        last = {} if self.final_fraction is None else {"final_fraction": self.final_fraction}
        return {"kind": "cosine", **last}
