"""Check whether activations move as far at every width: muP's coordinate check.

The plan's model is made at four widths, each twice the one before, with as many heads more and the
MLP as much wider. Each takes four steps on one batch, and how far every block's output and the
logits moved is written down after each. Where the learning rate carries over between widths the
wider models' activations move as far as the narrow one's; where it does not they move further
(arXiv 2203.03466, appendix D.1). The runs are scratch ones: they have no folder.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.assemble.context import check_supported, choose_device, make_context, on_one_process
from headrace.assemble.sockets import Build
from headrace.core.command import rerun
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.limits import WIDEST_CHECKED
from headrace.core.progress import Progress
from headrace.core.remedy import mend
from headrace.model.mask import Rows
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, installed
from headrace.report.chart import ChartAxis, ChartLine, line_chart
from headrace.report.page import Safe, figure, legend, swatch
from headrace.train.train import step
from headrace.tuner.scratch import scratch_build, write_measured

TECHNIQUE = "mup"
DOUBLINGS = 3
"""Doublings from the least width to the widest."""
MOST_WORDS = 10
"""Most changes beside muP that a plan without it is advised to make."""
STEPS = 4
"""Steps that each width takes. A rate that is wrong shows after a few."""
STEEPEST = 0.2
"""Power of the width that a change may grow with: 1.5 times over three doublings. In the usual
parametrization it grows with 0.3 and more."""


@dataclass(frozen=True)
class CoordinateCheck:
    """Hold how far activations moved at each width.

    Args:
        plan: the plan that was checked.
        widths: [W] values of model.dim.
        moved: part of the model -> [W][STEPS] root mean square of what its output moved by since
            the start.
    """

    plan: Plan
    widths: list[int]
    moved: dict[str, list[list[float]]]

    def slopes(self) -> dict[str, float]:
        """Return the power of the width that each part's move after the last step grows with."""
        x = np.log(np.array(self.widths, dtype=float))
        return {
            name: float(np.polyfit(x, np.log([moves[-1] for moves in each]), 1)[0])
            for name, each in self.moved.items()
        }

    @property
    def passes(self) -> bool:
        """Return whether no part's move grows faster than `STEEPEST` allows."""
        return all(slope <= STEEPEST for slope in self.slopes().values())

    def to_dict(self) -> dict[str, Any]:
        """Return the moves, their slopes and the verdict as JSON values."""
        return {
            "name": self.plan.name,
            "passes": self.passes,
            "slopes": self.slopes(),
            "steepest_allowed": STEEPEST,
            "widths": self.widths,
            "moved": self.moved,
        }


def check_mup(
    plan: Plan, *, widest: int = WIDEST_CHECKED, progress: Progress | None = None
) -> CoordinateCheck:
    """Train the plan's model for a few steps at each width, and return how far activations moved.

    Raises:
        ConfigError: the plan has no muP, it or this process has several ranks, or its heads are
            too wide; or a part does not move, or not by a finite number.
        ConfigError, UnsupportedError: the plan cannot run.
    """
    if TECHNIQUE not in plan.techniques:
        raise ConfigError(
            f"{plan.name} has no {TECHNIQUE}, and without it activations move further the wider a "
            "model is",
            mend(*_words_of_mup(plan)),
        )
    least = plan.model.resolved_head_dim * (plan.model.heads // plan.model.resolved_kv_heads)
    if widest % (least << DOUBLINGS):
        near = max(1, round(widest / (least << DOUBLINGS))) * (least << DOUBLINGS)
        raise ConfigError(
            f"{widest} features halved {DOUBLINGS} times are no whole heads of "
            f"{plan.model.resolved_head_dim}",
            f"--widest {near}",
        )
    _check_alone(plan)
    widths = [widest >> (DOUBLINGS - index) for index in range(DOUBLINGS + 1)]
    progress = progress or Progress()
    moved: dict[str, list[list[float]]] = {}
    for index, width in enumerate(widths):
        for name, moves in _moves(_at_width(plan, width), progress).items():
            # Behind outputs that begin at zero nothing moves in the first step.
            if not all(map(math.isfinite, moves)) or not moves[-1]:
                raise ConfigError(
                    f"what {name} gives at {width} features moved by {moves[-1]:.3g} in {STEPS} "
                    f"steps at optimizer.lr = {plan.optimizer.lr:g}, which tells nothing of widths",
                    mend("optimizer.lr=0.001"),
                )
            moved.setdefault(name, []).append(moves)
        progress.task("widths", index + 1, len(widths))
    return CoordinateCheck(plan, widths, moved)


def _check_alone(plan: Plan) -> None:
    """Check that one process was started, and that the plan has one rank.

    Raises:
        ConfigError: there are several.
    """
    started, ranks = int(os.environ.get("WORLD_SIZE", "1")), plan.mesh.ranks
    if started == ranks == 1:
        return
    several = f"the plan has {ranks} ranks" if ranks > 1 else f"{started} were started"
    words = on_one_process(plan)
    alone = f"{rerun(verb='check mup PLAN', ranks=1)} {words}".rstrip()
    raise ConfigError(
        f"the check trains in one process, and {several}", alone if started > 1 else words
    )


def _words_of_mup(plan: Plan) -> list[str]:
    """Return the changes that give a plan muP, and whatever else muP then asks for."""
    words, known = [f"+{TECHNIQUE}"], installed()
    for _ in range(MOST_WORDS):
        try:
            other = changed(plan, words, known)
            context = make_context(other, choose_device(other))
            check_supported([*other.techniques.values()], context)
            break
        except (ConfigError, UnsupportedError) as error:
            mends = (c for c in error.remedy.changes if not {f"-{TECHNIQUE}", *words} & {*c})
            words += next(mends, ())
    return words


def model_at(plan: Plan, width: int) -> dict[str, Any]:
    """Return the plan's table `model` at another width, with more heads as wide as before."""
    model, group = plan.model, plan.model.heads // plan.model.resolved_kv_heads
    heads = width // model.resolved_head_dim
    sizes = {
        "dim": width,
        "heads": heads,
        "kv_heads": heads // group,
        "head_dim": model.resolved_head_dim,
        "ffn": max(1, round(model.resolved_ffn * width / model.dim)),
    }
    return {**model.model_dump(exclude_unset=True), **sizes}


def narrowed(plan: Plan, divide: int, catalogue: Catalogue) -> Plan | None:
    """Return the plan with a model so many times as narrow, under muP; None where that cannot be.

    A plan without muP is given one whose base is its own width, with which it is what it was.

    Raises:
        ConfigError: the narrower plan contradicts itself.
    """
    model = plan.model
    least = model.resolved_head_dim * (model.heads // model.resolved_kv_heads)
    if model.dim % (divide * least):
        return None
    if TECHNIQUE not in plan.techniques:
        plan = changed(plan, [f"techniques.{TECHNIQUE}.base_dim={model.dim}"], catalogue)
    return plan.replaced(model=model_at(plan, model.dim // divide))


def _at_width(plan: Plan, width: int) -> Plan:
    """Return the plan with a model of another width, whose rate alone decides how it moves."""
    own = plan.optimizer.model_dump(exclude_unset=True)
    kept = {
        name: technique
        for name, technique in plan.techniques.items()
        if technique.room != "schedule" and "model.dim" not in technique.keys(plan)
    }
    return plan.replaced(
        techniques=kept,
        model=model_at(plan, width),
        optimizer={**own, "clip_norm": 0, "weight_decay": 0, "eps": 1e-12},
        schedule={"kind": "constant"},
    )


def _moves(plan: Plan, progress: Progress) -> dict[str, list[float]]:
    """Return how far each part's output moved after each step; by the part's name."""
    with scratch_build(plan, progress) as build:
        micros = build.loader.step(0).micros
        ids = micros[0].ids_BT.to(build.device)
        before, moved = _outputs(build, ids), dict[str, list[float]]()
        for index in range(STEPS):
            step(build, micros, index)
            for name, value in _outputs(build, ids).items():
                change = (value - before[name]).square().mean().sqrt()
                moved.setdefault(name, []).append(float(change))
    return moved


@torch.no_grad()
def _outputs(build: Build, ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the output of each block [B, T, D] and the logits [B, T, V], in fp32, by name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda _module, _given, out: seen.update({name: out.float()})

    blocks = build.model.blocks.items()
    hooks = [block.register_forward_hook(keep(f"block {name}")) for name, block in blocks]
    places = torch.arange(ids_BT.size(1), device=ids_BT.device)[None]
    try:
        with build.autocast():
            seen["logits"] = build.model.logits(ids_BT, Rows(places)).float()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def format_check(check: CoordinateCheck) -> str:
    """Return the verdict and the slopes as text for a reader."""
    slopes = check.slopes()
    worst = max(slopes, key=lambda name: slopes[name])
    verdict = "passes" if check.passes else "fails"
    return "\n".join(
        [
            f"muP {verdict}: from {check.widths[0]} to {check.widths[-1]} features no activation's "
            f"move may grow faster than with the power {STEEPEST} of the width; that of {worst} "
            f"grows with {slopes[worst]:.2f}",
            *(f"  {name}: {slope:+.2f}" for name, slope in slopes.items()),
        ]
    )


def write_check(check: CoordinateCheck, folder: Path) -> Path:
    """Write the check as a page with its picture, and as JSON beside it; return the page's path.

    Raises:
        ConfigError, RunError: the folder cannot be written.
    """
    marks = [(swatch(_colour(i), "line"), name) for i, name in enumerate(check.moved)]
    picture = figure(f"How far activations moved in {STEPS} steps", _chart(check))
    title, text = f"{check.plan.name} - coordinate check", format_check(check)
    return write_measured(folder, "mup", title, text, check.to_dict(), picture, legend(marks))


def _colour(index: int) -> str:
    """Return the colour of a part's curve."""
    return f"c{index % 8}"


def _chart(check: CoordinateCheck) -> Safe:
    """Draw each part's move after the last step over the width, relative to the first."""
    places = np.log2(np.array(check.widths, dtype=float) / check.widths[0])
    lines = [
        ChartLine(places, np.array([m[-1] / each[0][-1] for m in each]), _colour(i), marks=True)
        for i, each in enumerate(check.moved.values())
    ]
    return line_chart(
        "mup",
        lines,
        label=f"Moves of activations over the width; muP {'passes' if check.passes else 'fails'}",
        axis=ChartAxis("features", lambda place: f"{check.widths[0] * 2**place:.0f}"),
        y_label="times the first width's move",
        goal=math.pow(check.widths[-1] / check.widths[0], STEEPEST),
    )
