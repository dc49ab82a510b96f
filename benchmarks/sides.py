"""Make the sides that techniques.py compares, and read what it needs beside steady steps.

A short training measures losses. Its schedule is as long as the training: a plan's own may end
sooner, and steps after its end learn at the lowest rate. A whole run measures seconds from the
first step on, with what is compiled in each, and every such run begins with a compiler's empty
caches. The third reading is what a plan's attention launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch

from headrace.assemble.build import make_context
from headrace.assemble.context import check_supported, choose_device
from headrace.assemble.filled import check_active, note_own_attention
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.brief_training import of_length
from headrace.tuner.readings import Reading, StepClock, counted, opened, peak, read

ATTENTION = "attention"
"""The key of what `attention_of` stores in a reading's evidence."""
GRAPHS = "graphs"
"""The key, in a reading's evidence, of how many graphs `run_whole` compiled."""


@dataclass
class Side:
    """Hold a plan under test and its readings."""

    name: str
    """The name of the technique, with knobs behind a colon; "" is the base."""
    plan: Plan
    refused: str = ""
    replaces: tuple[str, ...] = ()
    """Techniques of the recipe whose sockets it takes."""
    speed: Reading = field(default_factory=Reading)
    loss: Reading = field(default_factory=Reading)

    @property
    def why_not(self) -> str:
        """Return what refused or stopped the side."""
        return self.refused or self.speed.refused

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: the mean of the blocks' medians."""
        return mean(self.speed.seconds)

    @property
    def end_loss(self) -> float | None:
        """Return the mean loss of the last tenth, in nats per token."""
        losses = self.loss.losses
        return mean(losses[-max(1, len(losses) // 10) :]) if losses else None


def sides(
    path: Path,
    base: str,
    names: Sequence[str],
    overrides: list[str],
    with_: Sequence[str] = (),
    without: Sequence[str] = (),
) -> list[Side]:
    """Return the base and a side for each technique, `name` or `name:knob=value,a.plan.key=value`.

    Args:
        path: the file of the shape's plan, which is the recipe.
        base: one of BASES in techniques.py: the recipe, or the baseline without its techniques.
        names: the techniques that are measured.
        overrides: the overrides of every plan.
        with_: techniques that every plan has, also the baseline.
        without: techniques of the recipe that no plan has.
    """
    text = path.read_text()
    recipe = _read(text, overrides, with_, without)
    gone = [n for n in recipe.techniques if n not in with_] if base == "trunk" else []
    gone += without
    compared = [Side("", _read(text, overrides, with_, gone))]
    for asked in names:
        name, _, knobs = asked.partition(":")
        keys = [k for k in knobs.split(",") if k]
        keys = [k if "." in k.partition("=")[0] else f"techniques.{name}.{k}" for k in keys]
        inside = base == "recipe" and name in recipe.techniques and not keys
        taken = () if inside or base == "trunk" else _owners(recipe, name)
        out = [*(g for g in gone if g != name), *taken, *([name] if inside else [])]
        try:
            more = [n for n in with_ if n not in out]
            plan = _read(text, overrides + keys, more if inside else [*more, name], out)
            device = choose_device(plan)
            check_supported(list(plan.techniques.values()), make_context(plan, device))
        except HeadraceError as error:
            compared.append(Side(asked, recipe, refused=str(error), replaces=taken))
        else:
            compared.append(Side(asked, plan, replaces=taken))
    return compared


def _owners(recipe: Plan, name: str) -> tuple[str, ...]:
    """Return techniques of the recipe that own a socket which `name` claims."""
    claims = set(catalogue().find(name).claims)
    return tuple(n for n, t in recipe.techniques.items() if n != name and claims & set(t.claims))


def _read(text: str, overrides: list[str], more: Sequence[str], without: Sequence[str]) -> Plan:
    return Plan.read(text, catalogue(), overrides=overrides, with_=more, without=without)


# --- readings -------------------------------------------------------------------------------


def brief_plan(plan: Plan, *, steps: int, rows: int, seed: int = 0) -> Plan:
    """Return the plan of a short training.

    Args:
        plan: the plan that is trained.
        steps: the steps of the training, and of its schedule.
        rows: the sequences of a batch.
        seed: a number that is added to the plan's seed.
    """
    batch = {"tokens": rows * plan.data.sequence_length, "micro_sequences": 0}
    few = plan.replaced(seed=plan.seed + seed, batch=plan.batch.model_copy(update=batch))
    return of_length(few, steps)


def run_whole(plan: Plan, *, steps: int) -> Reading:
    """Return the seconds of every step from the first on, their peaks, and evidence at the end.

    The compiler's caches are empty. Modules and kernels that the process has loaded stay, so only
    its first reading includes loading them.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def go(reading: Reading) -> None:
        with fresh_cache(), opened(plan, text=True) as (build, micros):
            before, clock = counters["stats"]["unique_graphs"], StepClock(build.device)
            if build.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            clock.mark()
            for index in range(steps):
                train.step(build, micros(index), index)
                clock.mark()
            reading.seconds = clock.seconds()
            reading.peak_bytes = peak(build) if counted(plan) else None
            if build.device.type == "cuda":
                reading.reserved_bytes = float(torch.cuda.max_memory_reserved())
            reading.evidence = {n: e.detail for n, e in check_active(build).items()}
            reading.evidence[GRAPHS] = str(counters["stats"]["unique_graphs"] - before)

    return read(go)


def attention_of(plan: Plan) -> Reading:
    """Return what the attention of a plan launches at the shapes of its steps."""

    def go(reading: Reading) -> None:
        with opened(plan) as (build, micros):
            train.step(build, micros(0), 0)  # which some make their masks in
            note_own_attention(build)
            owners = build.filled.get("parts.attend", [])
            details = [
                f"{t.name()} {t.active(build).detail}"
                for t in build.techniques
                if t.name() in owners
            ]
            if own := build.run_notes.own_attention:
                names = (n.removeprefix("void ").partition("<")[0] for n in own["kernels"])
                more = [n for n in names if n not in own["detail"]]
                details = [", ".join(dict.fromkeys([own["detail"], *more]))]
            reading.evidence = {ATTENTION: "; ".join(details)}

    return read(go)
