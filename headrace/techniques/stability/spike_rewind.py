"""Mask the update of a step that stands out, and go back to earlier weights if that is too little.

**Detect.** The losses and gradient norms of the last `window` good steps are kept on the device. A
step whose loss or norm is above their mean by more than `sigmas` deviations, or is not finite, is
refused there and then: its update is masked as that of an overflow is, and its batch is skipped.
Ranks add up their verdicts, so that all do the same. The host waits for nothing; it reads the flag
a step later, where it reads the loss.

**Rewind.** A bad batch is over with that: the weights never saw it. Where `patience` steps in a row
are refused, or one is not finite or the last before a checkpoint, the weights themselves may be bad
(a flipped bit, a step that was too long). They, the optimizers' states and what techniques keep
then return to the newest state that is known to be sound: one from which a later step was computed
that was in the band. The clock and the data go on: steps, the learning rate and the stream's place
are never set back. So the data between is the window that is skipped, metrics stay one row a step,
and the steps that were undone are paid for openly. After a rewind up to `skip` refused steps are
let pass (PaLM skipped 200 to 500 batches), then an earlier state is tried. After `most` rewinds
within `within` steps, or where no earlier state is kept, the run ends with one error.

**Recover.** It is over when `PROVE` steps in a row are in the band. What was noticed and done is in
report.json (`spikes`), on the run's page, and in metrics.jsonl (`masked`).

**Resume.** Band, open spikes and past rewinds are in the checkpoint; the kept states are not, since
they would double it or more. Checkpoints fall on steps at which a state is kept, and a resumed run
holds the one that it begins at. So a run that is killed after a rewind repeats it to the bit,
unless the first step after the checkpoint is refused already. A signal that stops a run within the
few steps between a fault and its rewind saves the faulty weights: resumed, it ends with the error
that names an earlier checkpoint.

Cost: `states` copies of weights and optimizer state in the host's memory (24 bytes a weight with
AdamW), one copy to it every `every` steps, and about 30 kernels on single numbers a step. Left out:
frozen weights, which no state holds, and a flip in them.
Sources: arXiv 2204.02311 (PaLM, section 5.1), arXiv 2501.00656 (OLMo 2, skipped steps).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from headrace.assemble.kept_states import KeptState, KeptStates
from headrace.assemble.nonfinite import first_nonfinite
from headrace.assemble.sockets import Build
from headrace.core.errors import Diverged
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.footprint import KEPT_STATES
from headrace.costs.ledger import SAVES, Ledger
from headrace.costs.work import HostCopy, Stream, Work
from headrace.optim.stability import Band, Spike
from headrace.plan.plan import Plan
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

USUAL_EVERY = 50
"""Steps between two kept states where the plan does not say it, at most: with copies of 12 bytes a
weight over a link of 25 GB/s, that is 10 ms a step at a billion weights (derived)."""
LEAST_EVERY, MOST_EVERY = 10, 200
"""Fewest steps between two kept states where another number divides the steps between checkpoints,
and most without a doubt: copies of a fifth of a usual interval cost five times as much."""
PROVE = 3
"""Steps in a row in the band after which a spike is over. The limits are those from before it."""
SMALL_KERNELS = 30
"""Kernels on single numbers that a step adds, counted in `Band`."""


class SpikeWatch:
    """Decide which steps are refused and when the run goes back; this is the technique's state.

    Steps are counted from 1. `decided` is the last step whose flag was acted on. The host acts on
    the flag of step n when step n + 1 was issued, and at once where the run drains its rows anyway
    (before a validation or a checkpoint). So what it does depends on no timing.
    """

    def __init__(self, knobs: "SpikeRewind", build: Build, every: int) -> None:
        self.knobs, self.every = knobs, every
        self.name = knobs.name()
        self.band = Band(
            build.device, window=knobs.window, sigmas=knobs.sigmas, warmup=max(2, knobs.window // 4)
        )
        self.copies = KeptStates(knobs.states, self.name)
        self.judged = 0
        self.flagged: dict[int, tuple[float | None, float | None]] = {}
        """loss and norm of refused steps that were not acted on yet"""
        self.decided = self.streak = self.calm = 0
        """the last step that was acted on; refused and good steps in a row up to it"""
        self.sound = 0
        """after how many steps the state is known to be sound"""
        self.spikes: list[Spike] = []
        self.rewinds: list[int] = []
        """steps at which the run went back"""
        self.open = self.on_probation = self.hopeless = False
        """a spike is not over; the run went back in it; nothing is left to try"""

    # --- on the device ---

    def judge(self, build: Build, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 where the step's update may be applied, the same on every rank."""
        self.judged += 1
        refused = self.band.stands_out(loss, norm)
        if build.world.ranks > 1:
            refused = build.world.sum_(refused.float()) > 0
        self.band.take(loss, norm, ~refused)
        return 1.0 - refused.float()

    # --- on the host ---

    def before_step(self, build: Build) -> None:
        """Take known flags into account, and copy the state where that is due."""
        build.run_notes.spikes = self.spikes
        done = int(build.now["step"])
        self._decide(build, done if self._drained(build.plan, done) else done - 1)
        if done % self.every == 0 or not self.copies.states:
            self.copies.take(build, done, self.sound)

    def recover(self, build: Build, step: int, metrics: Mapping[str, float]) -> None:
        """Note a refused step; this fills the `recover` socket.

        Raises:
            Diverged: earlier rewinds did not help.
        """
        loss, norm = (_finite(metrics[key]) for key in ("loss", "grad_norm"))
        self.flagged[step] = loss, norm
        done = int(build.now["step"]) + 1
        self._decide(build, step if self._drained(build.plan, done) else min(step, done - 1))
        if self.hopeless:
            raise self._gives_up()

    def _drained(self, plan: Plan, done: int) -> bool:
        """Return whether the run reads all rows after this many steps."""
        often = (plan.eval.every_steps, plan.checkpoint.every_steps, plan.goal_steps)
        return any(every and done % every == 0 for every in often)

    def _decide(self, build: Build, last: int) -> None:
        """Take the flags of all steps up to `last` into account, in order."""
        for step in range(self.decided + 1, last + 1):
            if step in self.flagged:
                self._see_refused(build, step, *self.flagged.pop(step))
            else:
                self._see_good(build, step)
        self.decided = max(self.decided, last)

    def _see_good(self, build: Build, step: int) -> None:
        self.calm, self.streak = self.calm + 1, 0
        if not self.open:
            self.sound = step - 1  # its weights gave a loss in the band
        elif self.calm >= PROVE:
            spike = self.spikes[-1]
            spike.recovered = step - PROVE + 1
            self.open = self.on_probation = False
            build.note_line(f"step {step}: the loss is back in its band since {spike.recovered}")

    def _see_refused(self, build: Build, step: int, loss: float | None, norm: float | None) -> None:
        self.calm, self.streak = 0, self.streak + 1
        wild = loss is None or norm is None
        if not self.open:
            self.open = True
            most_loss, most_norm = map(_finite, self.band.limits.tolist())
            self.spikes.append(Spike(step, 0, loss, norm, most_loss, most_norm))
            if wild and not build.auxiliary and (source := first_nonfinite(build, step - 1)):
                self.spikes[-1].source = source.sentence
        self.spikes[-1].masked += 1
        at_once = wild or self._drained(build.plan, step)  # bad weights are not saved
        patience = self.knobs.skip if self.on_probation else 1 if at_once else self.knobs.patience
        if self.streak >= patience and not self.hopeless:
            self._rewind(build, step)

    def _rewind(self, build: Build, step: int) -> None:
        """Return to the newest state that may be sound, or find that nothing is left to try."""
        spike = self.spikes[-1]
        self.rewinds = [at for at in self.rewinds if step - at < self.knobs.within]
        target = self._target(spike)
        if target is None or len(self.rewinds) >= self.knobs.most:
            self.hopeless = True
            return
        self.copies.restore(build, target)
        self.rewinds.append(step)
        spike.rewound_to = (*spike.rewound_to, target.step)
        self.streak, self.on_probation = 0, True
        why = f"; {spike.source}" if spike.source else ""
        build.note_line(
            f"step {step}: the loss left its band at step {spike.step}{why}; the weights are again "
            f"as after step {target.step}, and the data goes on"
        )

    def _target(self, spike: Spike) -> KeptState | None:
        """Return the state to go back to: the newest sound one, else the earliest that is kept.

        A state that this spike went back to already is not tried again.
        """
        tried = min(spike.rewound_to, default=math.inf)
        left = [one for one in self.copies.states if one.step < tried]
        sound = [one for one in left if one.step <= self.sound]
        return sound[-1] if sound else left[0] if left else None

    def _gives_up(self) -> Diverged:
        spike, name = self.spikes[-1], self.name
        states = ", ".join(map(str, spike.rewound_to))
        tried = f"going back to the states after steps {states} did not help" if states else ""
        enough = f"{len(self.rewinds)} rewinds in {self.knobs.within} steps are the most"
        return Diverged(
            f"the loss left its band at step {spike.step} (loss {_shown(spike.loss)}, limit "
            f"{_shown(spike.loss_limit)}; gradient norm {_shown(spike.grad_norm)}, limit "
            f"{_shown(spike.norm_limit)}); {spike.masked} updates were masked, and "
            f"{tried or enough}",
            mend(f"techniques.{name}.sigmas={2 * self.knobs.sigmas:g}"),
        )

    # --- in the checkpoint ---

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, and filled in place."""
        return self.band.tensors()

    HOST = ("decided", "streak", "calm", "sound", "rewinds", "open", "on_probation", "hopeless")
    """Names of what the host keeps that JSON takes as it is."""

    def values(self) -> dict[str, Any]:
        """Return what is saved as JSON."""
        kept = {name: getattr(self, name) for name in self.HOST}
        flagged = [[step, *numbers] for step, numbers in self.flagged.items()]
        spikes = [spike.to_dict() for spike in self.spikes]
        return {**kept, "rewinds": [*self.rewinds], "flagged": flagged, "spikes": spikes}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what `values` gave."""
        for name in self.HOST:
            setattr(self, name, values[name])
        self.flagged = {step: (loss, norm) for step, loss, norm in values["flagged"]}
        self.spikes = [
            Spike(**{**spike, "rewound_to": tuple(spike["rewound_to"])})
            for spike in values["spikes"]
        ]


class SpikeRewind(Technique[Build]):
    """Mask the update of a step that stands out; go back to earlier weights if it is too little."""

    sigmas: float = Field(default=6.0, gt=1, le=100)
    """Standard deviations above the mean at which a loss or a norm stands out; OLMo-core's 6."""
    window: int = Field(default=128, ge=8, le=1 << 16)
    """Good steps whose losses and norms say what is usual; OLMo-core's 128. Nothing finite stands
    out before a quarter of them were seen."""
    patience: int = Field(default=2, ge=1, le=1000)
    """Refused steps in a row after which the weights go back, where all numbers are finite."""
    skip: int = Field(default=16, ge=1, le=10**6)
    """Refused steps in a row that are let pass after a rewind, before an earlier state is tried."""
    every: int | None = Field(default=None, ge=2, le=10**9)
    """Steps between two kept states; it must divide checkpoint.every_steps. Left open: the largest
    number up to 50 that does, or the nearest to 50 where that is below 10."""
    states: int = Field(default=2, ge=2, le=16)
    """States that are kept in the host's memory."""
    most: int = Field(default=3, ge=1, le=1000)
    """Rewinds within `within` steps after which the next one ends the run."""
    within: int = Field(default=1000, ge=1, le=10**12)
    """Steps in which rewinds are counted."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "stability"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = ("recover",)
    composes: ClassVar[tuple[str, ...]] = ("state", "before_step", "judges")
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer_in_backward": "weights are updated before the loss and the norm of the whole "
        "step are known, so that no update can be masked (arXiv 2306.09782)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    settled: ClassVar[tuple[str, ...]] = (
        "sigmas",
        "window",
        "patience",
        "skip",
        "every",
        "states",
        "most",
        "within",
    )
    card: ClassVar[Card] = Card(
        buys="a run that goes on by itself after a bad batch, a flipped bit or a step that was too "
        "long, with at most two times `every` steps undone (derived)",
        costs=(
            "`states` copies of weights and optimizer state in the host's memory, 24 bytes a "
            "weight with AdamW (derived)",
            "a copy to the host every `every` steps",
        ),
        helps="long runs that nobody watches, and large learning rates; PaLM restarted by hand "
        "about 20 times (arXiv 2204.02311, section 5.1)",
        hurts="runs whose loss rises by design, as where the data changes: steps are skipped that "
        "should count",
        source="arXiv 2204.02311; arXiv 2501.00656; github.com/allenai/OLMo-core",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that checkpoints fall on steps at which a state is kept."""
        plan = context.plan
        saves = plan.checkpoint.every_steps if plan is not None else 0
        if self.every is None or not saves or saves % self.every == 0:
            return Supported()
        fits = [n for n in divisors(saves) if n > 1] or [saves]
        near = min(fits, key=lambda n: abs(n - (self.every or 0)))
        change = (
            f"techniques.{self.name()}.every={near}"
            if near > 1
            else f"checkpoint.every_steps={self.every}"
        )
        return Unsupported(
            f"every = {self.every} does not divide checkpoint.every_steps = {saves}, so that a "
            "resumed run would hold other states",
            mend(change),
        )

    def saves_by(self, often: int) -> int:
        """Let checkpoints fall on steps at which a state is kept."""
        return self.every or min(often, USUAL_EVERY)

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of checkpoints between which no usual number of kept states fits."""
        saves = plan.checkpoint.every_steps
        every = self._every(saves)
        if self.every or saves <= USUAL_EVERY or every in range(LEAST_EVERY, MOST_EVERY + 1):
            return None
        return Doubt(
            f"{self.name()} copies the state every {every} steps, since no number nearer to "
            f"{USUAL_EVERY} divides checkpoint.every_steps = {saves}",
            mend(f"checkpoint.every_steps={round(saves / USUAL_EVERY) * USUAL_EVERY}"),
        )

    def _every(self, saves: int) -> int:
        """Return the steps between two kept states, with so many between two checkpoints."""
        fits = [n for n in divisors(saves) if n > 1] if saves else []
        if self.every or not fits:
            return self.every or USUAL_EVERY
        usual = max((n for n in fits if n <= USUAL_EVERY), default=0)
        if usual >= LEAST_EVERY:
            return usual
        return min(fits, key=lambda n: abs(math.log(n / USUAL_EVERY)))

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the kept states where the host's memory is the device's, and the copies to it."""
        learns = sum(m.numbers * m.stored for m in ledger.updates().values())
        every_weight = sum(m.numbers * m.stored for m in ledger.matrices.values())
        share = learns / every_weight if every_weight else 1.0
        state = share * ledger.memory["parameters"].bytes + ledger.memory["optimizer"].bytes
        often = 1 / self._every(int(ledger.sizes[SAVES]))
        work: dict[str, Work] = {"spike_rewind/flag": Stream("optimizer", 1, 0.0, SMALL_KERNELS)}
        if ledger.sizes["on_gpu"]:
            work["spike_rewind/copy"] = HostCopy("forward", often, state)
        else:
            work["spike_rewind/copy"] = Stream("forward", often, 2 * state)
        copies = 0.0 if ledger.sizes["on_gpu"] else self.states * state
        return replace(
            ledger, work={**ledger.work, **work}, sizes={**ledger.sizes, KEPT_STATES: copies}
        )

    def apply(self, build: Build) -> None:
        """Judge every step, hold states, and take over what follows a masked update."""
        watch = SpikeWatch(self, build, self._every(build.plan.checkpoint.every_steps))
        build.notes[self.name()] = build.state[self.name()] = watch
        build.judges.append(watch.judge)
        build.before_step.append(watch.before_step)
        build.recover = watch.recover

    def active(self, build: Build) -> Evidence:
        """Report the steps that were judged, the limits that stand now, and the kept states."""
        watch: SpikeWatch = build.notes[self.name()]
        taken, copies = float(watch.band.count), watch.copies.states
        limit, norm_limit = watch.band.limits.tolist()
        masked = sum(spike.masked for spike in watch.spikes)
        copied_bytes = sum(state.nbytes for state in copies)
        steps = " and ".join(str(state.step) for state in copies) or "none"
        limits = (
            f"limits are {limit:.3g} nats and a norm of {norm_limit:.3g}"
            if math.isfinite(limit)
            else "no limits yet"
        )
        return Evidence(
            active=watch.judged > 0 and copied_bytes > 0 and watch.judge in build.judges,
            detail=f"judged {watch.judged} steps, {limits}; masked {masked}, went back "
            f"{len(watch.rewinds)} times; holds the states after steps {steps}",
            numbers={
                "judged": watch.judged,
                "usual": taken,
                "masked": masked,
                "rewinds": sum(len(spike.rewound_to) for spike in watch.spikes),
                "kept_bytes": copied_bytes,
            },
        )


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can hold; None for one that is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
