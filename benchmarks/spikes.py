"""Plant faults into runs with `spike_rewind`: which recover, and which healthy runs it disturbs.

    python benchmarks/spikes.py --results results
    python benchmarks/spikes.py --healthy 2 --seeds 1 --steps 70 --results try

Each run is `headrace.train.train.run` of a decoder of two layers on generated text, on the CPU. A
fault falls on a step that the seed draws, in the second half of the run. A faulty run has
**recovered** where it ends, every spike that was noticed is over by its own proof (three steps in
a row in the band), and its last validation loss is within `BAND` nats of the healthy run's of the
same seed. The same fault without the technique is run too: `unaided` is the share of those that
end as well, so that a fault that does nothing is seen as such. A healthy run has a false rewind
where `spike_rewind` went back, and a false mask where it refused a step.

Rows go to `learning.jsonl`, kind "spike_rewind": one for each fault, one for the healthy runs.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import receipts
import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.train import train

BAND = 0.15
"""Largest difference in nats of a validation loss from the healthy run's that counts as recovered.
Healthy runs of other seeds differ by about as much."""
WINDOW = 8
"""Steps of the poisoned window."""
PLAN = """
name = "spikes"
device = "cpu"
guard = false
model = {{dim = 32, layers = 2, heads = 2, ffn = 64, context = 32}}
data = {{sources = "{text}", directory = "{prepared}", vocab = 300, sequence_length = 32}}
batch = {{tokens = 512}}
optimizer = {{lr = 1e-2}}
schedule = {{kind = "constant", warmup_steps = 5}}
eval = {{every_steps = 20, tokens = 2048}}
checkpoint = {{every_steps = 20}}
"""
WORDS = (
    *("the", "mill", "turns", "when", "water", "runs", "down", "and"),
    *("stones", "grind", "grain", "into", "flour", "for", "bread"),
)


Plant = Callable[[Build, list[Micro], random.Random], None]


def _weight(build: Build, chance: random.Random) -> Tensor:
    """Return one number of a matrix of the blocks, as a view [1]."""
    matrices = [p for n, p in build.model.named_parameters() if p.ndim == 2 and "blocks" in n]
    flat = chance.choice(matrices).data.view(-1)
    at = chance.randrange(len(flat))
    return flat[at : at + 1]


def flipped_bit(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Change the highest bit of a weight's exponent."""
    _weight(build, chance).view(torch.int32).bitwise_xor_(1 << 30)


def flipped_sign_and_size(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Change a weight's sign, and a bit of its exponent that makes it 2^32 times as large."""
    weight = _weight(build, chance)
    weight.copy_(-weight * 2.0**32)


def nan_in_a_weight(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Set a weight to NaN."""
    _weight(build, chance).fill_(float("nan"))


def nan_in_an_activation(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Let one module's output hold a NaN in this step alone."""
    layer, step = chance.randrange(build.config.layers), build.now["step"]
    module = build.model.get_submodule(f"blocks.{layer}.mlp")

    def spoil(_: Any, args: Any, output: Tensor) -> Tensor:
        return output * float("nan") if build.now["step"] == step else output

    module.register_forward_hook(spoil)


def long_step(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Let this step's update be a thousand times as long."""
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= 1000


def repeated_token(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Let the batch be one token over and over, whose next is another, at 100 times the rate."""
    token = chance.randrange(256)
    for micro in micros:
        micro.ids_BT.fill_(token)
        micro.targets_BT.fill_(token + 1)
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= 100


def shuffled_labels(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Shuffle the labels of the batch, and update at 100 times the rate."""
    shuffled_window(build, micros, chance)
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= 100


def shuffled_window(build: Build, micros: list[Micro], chance: random.Random) -> None:
    """Shuffle the labels of the batch, at the run's own rate."""
    source = torch.Generator().manual_seed(chance.randrange(1 << 30))
    for micro in micros:
        flat = micro.targets_BT.view(-1)
        flat.copy_(flat[torch.randperm(len(flat), generator=source)])


FAULTS: dict[str, tuple[Plant, int]] = {
    "flipped bit": (flipped_bit, 1),
    "flipped sign and size": (flipped_sign_and_size, 1),
    "NaN in a weight": (nan_in_a_weight, 1),
    "NaN in an activation": (nan_in_an_activation, 1),
    "long step": (long_step, 1),
    "repeated token": (repeated_token, 1),
    "shuffled labels": (shuffled_labels, 1),
    "window of shuffled labels": (shuffled_window, WINDOW),
}
"""Name of a fault -> what plants it, and in how many steps in a row."""


@dataclass(frozen=True)
class Case:
    """A case is one run: a seed, a fault or "" for none, and whether the technique is on."""

    seed: int
    fault: str = ""
    aided: bool = True


@dataclass(frozen=True)
class Ended:
    """Hold what came of a case: the last validation loss, None where it failed, and its spikes."""

    loss: float | None
    spikes: Sequence[dict[str, Any]]
    error: str = ""

    def recovered(self, healthy: float) -> bool:
        """Return whether the run ended as well as a healthy one, and every spike is over."""
        over = all(spike["recovered"] is not None for spike in self.spikes)
        return self.loss is not None and over and self.loss - healthy <= BAND


def run(case: Case, folder: Path, steps: int) -> Ended:
    """Run one case in this process."""
    torch.set_num_threads(1)
    home = folder / f"{case.seed}-{case.fault.replace(' ', '-')}-{int(case.aided)}"
    text = PLAN.format(text=folder / "text", prepared=folder / "prepared")
    asked = [f"directory={home}", f"seed={case.seed}", f"goal.steps={steps}"]
    on = ["techniques.spike_rewind.window=32"] if case.aided else []
    plan = Plan.read(text, catalogue(), overrides=[*asked, *on])
    chance = random.Random(f"{case.seed} {case.fault}")
    plant, lasts = FAULTS.get(case.fault, (None, 0))
    first = chance.randrange(steps // 2, steps - 30)
    whole = train.step

    def step(build: Build, micros: list[Micro], index: int, inspect: Any = None) -> Tensor:
        """Take a step, with the fault before its forward pass where it is its turn."""
        due = plant is not None and first <= index < first + lasts
        begin = [] if not due else [lambda build: plant(build, micros, chance)]  # type: ignore[misc]
        build.before_step += begin
        try:
            return whole(build, micros, index, inspect)
        finally:
            del build.before_step[len(build.before_step) - len(begin) :]

    train.step = step  # type: ignore[assignment]
    try:
        folder_of_run = train.run(plan).folder
    except HeadraceError as error:
        return Ended(None, [], f"{type(error).__name__}: {error.message}")
    finally:
        train.step = whole
    report = json.loads((folder_of_run / "report.json").read_text())
    shutil.rmtree(home)
    return Ended(report["val"][-1]["loss_nats"], report["spikes"])


def write_text(folder: Path) -> None:
    """Write 60 short files of sentences with a grammar, the same each time."""
    source = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(60):
        begins = (source.randrange(len(WORDS)) for _ in range(40))
        lines = [" ".join(WORDS[(at + k * 3) % len(WORDS)] for k in range(9)) for at in begins]
        (folder / f"{number:02d}.txt").write_text(".\n".join(lines))


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """Return a share as a metric."""
    value = sum(hits) / len(hits)
    return {"value": value, "low": value, "high": value, "unit": "share"}


def count(values: Sequence[int]) -> dict[str, Any]:
    """Return a sum as a metric."""
    return {"value": sum(values), "low": min(values), "high": max(values), "unit": "count"}


def measure(
    healthy: int, seeds: int, steps: int, faults: Sequence[str], workers: int, results: Path
) -> None:
    """Run all cases, print what came of each, and append the rows."""
    cases = [Case(seed) for seed in range(max(healthy, seeds))]
    faulty = [Case(s, fault, on) for fault in faults for s in range(seeds) for on in (True, False)]
    with tempfile.TemporaryDirectory(prefix="spikes-") as scratch:
        folder = Path(scratch)
        write_text(folder / "text")
        first = run(cases[0], folder, steps)  # prepares the text once
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            rest = pool.map(partial(run, folder=folder, steps=steps), [*cases[1:], *faulty])
            ended = dict(zip([*cases, *faulty], [first, *rest], strict=True))
    for case, outcome in ended.items():
        masked = sum(spike["masked"] for spike in outcome.spikes)
        back = [spike["rewound_to"] for spike in outcome.spikes]
        print(f"{case}: loss {outcome.loss}, masked {masked}, went back {back} {outcome.error}")
    facts = {"kind": "spike_rewind", "steps": steps, "band_nats": BAND, "shape": "d32 L2"}
    write = partial(receipts.append, "learning", results=results)
    whole = [ended[case].loss for case in cases]
    assert all(loss is not None for loss in whole), "a healthy run failed"
    for fault in faults:
        aided, alone = (
            [ended[Case(s, fault, on)].recovered(whole[s] or 0.0) for s in range(seeds)]
            for on in (True, False)
        )
        spikes = [ended[Case(s, fault)].spikes for s in range(seeds)]
        rewinds = [sum(len(spike["rewound_to"]) for spike in each) for each in spikes]
        masks = [sum(spike["masked"] for spike in each) for each in spikes]
        write(
            {
                "recovered": share(aided),
                "unaided": share(alone),
                "rewinds": count(rewinds),
                "masked": count(masks),
            },
            **facts,
            fault=fault,
            n=seeds,
            seeds=[*range(seeds)],
        )
        print(f"{fault}: recovered {sum(aided)} of {seeds}, unaided {sum(alone)}")
    if healthy:
        spikes = [ended[case].spikes for case in cases[:healthy]]
        rewinds = [sum(len(spike["rewound_to"]) for spike in each) for each in spikes]
        masks = [sum(spike["masked"] for spike in each) for each in spikes]
        write(
            {"false_rewinds": count(rewinds), "false_masks": count(masks)},
            **facts,
            fault="",
            n=healthy,
            seeds=[*range(healthy)],
        )
        print(f"healthy: {sum(rewinds)} rewinds and {sum(masks)} masks in {healthy} runs")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each fault")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run, 70 at least")
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS])
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--results", type=Path, default=Path("results"))
    asked = parser.parse_args()
    steps = max(70, asked.steps)
    measure(asked.healthy, asked.seeds, steps, asked.faults, asked.workers, asked.results)


if __name__ == "__main__":
    main()
