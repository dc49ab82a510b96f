"""The tiny plan and its text, and what to compare of two runs."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace import probes
from headrace.assemble.build import make_build
from headrace.costs.machine import Machine
from headrace.data.ingest import prepare
from headrace.export.hf import export_hf
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.train.checkpoint import INDEX, Saved, _sealed

WORDS = [
    "river",
    "water",
    "mill",
    "wheel",
    "stone",
    "gate",
    "level",
    "flow",
    "deep",
    "cold",
    "still",
    "bank",
    "reed",
    "boat",
    "weir",
    "lock",
    "winter",
    "summer",
    "rain",
    "thaw",
    "flood",
    "silt",
    "race",
    "head",
    "tail",
    "power",
    "grain",
    "flour",
    "bread",
    "salt",
]

READ = """
name = "tiny"
device = "cpu"
model = {{ dim = 32, layers = 2, heads = 2, ffn = 48, vocab = 320 }}
goal = {{ steps = 3 }}
batch = {{ tokens = 64 }}
eval = {{ every_steps = 1000, tokens = 64 }}
checkpoint = {{ every_steps = 0 }}
[data]
sources = "{corpus}"
directory = "{prepared}"
vocab = 300
sequence_length = 16
workers = 0
"""
"""A plan whose steps are read: three of them, and nothing between."""

PLAN = """
name = "tiny"
device = "cpu"
seed = 3

[model]
dim = 16
layers = 1
heads = 2
ffn = 32

[data]
sources = "{corpus}"
directory = "{prepared}"
vocab = 300
sequence_length = 16

[goal]
steps = 12

[batch]
tokens = 128

[optimizer]
lr = 1e-2

[schedule]
steps = 40

[eval]
every_steps = 5
tokens = 512

[checkpoint]
every_steps = 4
"""

TIMES = ("_s", "tokens_per_s", "session")


def write_corpus(folder: Path, *, seed: int = 0) -> Path:
    """Write 24 short text files of random words, equal for equal seeds; return their folder."""
    source = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(24):
        lines = [" ".join(source.choices(WORDS, k=12)) + ".\n" for _ in range(20)]
        (folder / f"{number:02d}.txt").write_text("".join(lines))
    return folder


def save_weights(plan: Plan, folder: Path) -> str:
    """Write the model that a plan starts from in Hugging Face format; return the folder's name.

    It stands for one that was trained, where adapters or a teacher need one.
    """
    build = make_build(
        plan.replaced(techniques={}),
        prepare(plan),
        World(),
        torch.device(plan.device),
        until=Stage.MATERIALIZE,
    )
    state = {name: p.detach() for name, p in build.model.named_parameters()}
    build.prepared.tokenizer.save(file := folder.with_suffix(".json"))
    export_hf(state, build.config, file, folder, sequence_length=plan.data.sequence_length)
    return str(folder)


def report(run: Path) -> dict[str, Any]:
    """report.json."""
    return json.loads((run / "report.json").read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return every row of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> torch.Tensor:
    """The loss of each step, of which none is missing."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return torch.tensor([row["loss"] for row in rows])


def without_times(value: Any) -> Any:
    """A JSON value without its times, rates, and how often the run was restarted."""
    if isinstance(value, list):
        return [without_times(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: without_times(v)
        for k, v in value.items()
        if not k.endswith(TIMES) and k not in ("phase_s", "restarts", "rank_values", "seal")
    }


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its name."""
    saved, found = Saved(path), {}
    for name in saved.names():
        shape, dtype = saved.shape_of(name)
        found[name] = torch.empty(shape, dtype=dtype)
        saved.fill_(name, found[name])
    return found


def assert_same_run(one: Path, two: Path) -> None:
    """Weights, optimizer, counters, RNG, metrics, validations, stream and links are the same."""
    names = sorted(p.name for p in (one / "checkpoints").iterdir())
    assert names == sorted(p.name for p in (two / "checkpoints").iterdir())
    for link in ("latest", "best"):
        assert os.readlink(one / "checkpoints" / link) == os.readlink(two / "checkpoints" / link)
    last = [run / "checkpoints" / "latest" for run in (one, two)]
    first, second = (tensors(path) for path in last)
    assert first.keys() == second.keys()
    assert any(n.startswith("optimizer/") for n in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    indices = [json.loads((path / "checkpoint.json").read_text()) for path in last]
    assert without_times(indices[0]["counters"]) == without_times(indices[1]["counters"])
    assert indices[0]["parts"][0]["rank_values"] == indices[1]["parts"][0]["rank_values"]
    rows = [without_times(metrics(run)) for run in (one, two)]
    assert [row["step"] for row in rows[0]] == list(range(1, len(rows[0]) + 1))
    assert rows[0] == rows[1]
    reports = [report(run) for run in (one, two)]
    assert without_times(reports[0]["val"]) == without_times(reports[1]["val"]) != []
    assert reports[0]["stream_sha256"] == reports[1]["stream_sha256"]
    assert reports[0]["status"] == reports[1]["status"] == "done"


FILE = "rank-00000.safetensors"
"""The tensors of a checkpoint that one process saved."""


def resealed(step: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change a checkpoint, and make its hashes and its seal anew."""
    tensors, index = load_file(step / FILE), json.loads((step / INDEX).read_text())
    change(tensors, index["parts"][0])
    save_file({name: t.contiguous() for name, t in tensors.items()}, step / FILE)
    data = (step / FILE).read_bytes()
    index["parts"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / INDEX).write_text(json.dumps(_sealed(index)))


def keep_rates(home: Path) -> None:
    """Write rates of this processor, as it runs with the threads of a test, into a user's folder.

    They are the guessed ones, so that no time of a step rests on them.
    """
    file = probes.path(torch.device("cpu"))
    Machine.assumed("cpu").write(home / ".cache" / "headrace" / "machines" / file.name)
