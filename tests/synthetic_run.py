"""Write a synthetic run's folder with the shape and the noise of a real one."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MIB = 1024 * 1024
TOKEN = "a-token"
"""With which a server of runs lets a test stop one."""
STEPS, STEP_S, TOKENS_PER_STEP, TOKENS_PER_BYTE = 400, 0.52, 8192, 0.31
PLAN = """name = "demo"
seed = 7
device = "cpu"

[model]
family = "headrace"
width = 192
layers = 6

[data]
sources = "stdlib"
sequence_length = 256

[goal]
bits_per_byte = 2.2
minutes = 4

[optimizer]
lr = 0.003

[techniques.document_packing]

[techniques.muon]
lr = 0.02
"""
ENVIRONMENT = {
    "headrace": "0.1.0",
    "python": "3.11.9",
    "torch": "2.13.0+cpu",
    "device": "cpu",
    "device_name": "x86_64",
    "cpu": "Xeon 8488C",
    "cores": 2,
    "platform": "Linux-6.1-x86_64-glibc2.36",
    "commit": "4f0c2d1e9b",
    "triton": None,
}


def bits_per_byte(step: int | np.ndarray) -> Any:
    """Return the synthetic validation loss after `step` in bits per byte."""
    return 1.9 + 3.3 * np.exp(-np.asarray(step) / 18) + 0.9 * np.exp(-np.asarray(step) / 160)


def metric_rows() -> list[dict[str, Any]]:
    """Return 400 synthetic rows of metrics.jsonl."""
    random = np.random.default_rng(0)
    at = np.arange(1, STEPS + 1)
    loss = bits_per_byte(at) * math.log(2) / TOKENS_PER_BYTE + random.normal(0, 0.09, STEPS)
    took = STEP_S * random.lognormal(0, 0.04, STEPS)
    return [
        {
            "step": int(n),
            "tokens": int(n) * TOKENS_PER_STEP,
            "wall_s": 3.0 + float(took[:n].sum()),
            "loss": float(loss[n - 1]),
            "grad_norm": 1.0,
            "lr": 3e-3,
            "tokens_per_s": TOKENS_PER_STEP / float(took[n - 1]),
            "step_s": float(took[n - 1]),
            "input_s": 0.004,
            "forward_s": 0.31 * float(took[n - 1]),
            "backward_s": 0.60 * float(took[n - 1]),
            "optimizer_s": 0.07 * float(took[n - 1]),
            "wasted_tokens": 12,
        }
        for n in at.tolist()
    ]


def report_values() -> dict[str, Any]:
    """report.json of a run that reached its goal."""
    wall_s = 3.0 + STEP_S * STEPS + 9.4
    val = [
        {
            "step": n,
            "tokens": n * TOKENS_PER_STEP,
            "wall_s": 3.0 + STEP_S * n,
            "loss_nats": float(bits_per_byte(n)) * math.log(2) / TOKENS_PER_BYTE,
            "bits_per_byte": float(bits_per_byte(n)),
        }
        for n in range(0, STEPS + 1, 50)
    ]
    return {
        "format": 1,
        "name": "demo",
        "status": "done",
        "message": "",
        "goal": {
            "asked": {"bits_per_byte": 2.2, "minutes": 4.0},
            "reached": True,
            "step": 250,
            "wall_s": 133.0,
            "tokens": 250 * TOKENS_PER_STEP,
            "ended_by": "bits_per_byte",
        },
        "steps": STEPS,
        "tokens": STEPS * TOKENS_PER_STEP,
        "wall_s": wall_s,
        "steady_tokens_per_s": 15754.2,
        "model_flops_utilization": {
            "value": 0.412,
            "peak_flops": 1.21e11,
            "peak_source": "matrix product of 1024 x 1024, measured here",
            "formula": "6 N + 12 L d T per token",
            "model_flops_per_token": 2.9e7,
        },
        "peak_memory_bytes": {
            "allocated": 402 * MIB,
            "reserved": None,
            "predicted": 391 * MIB,
            "method": "tracker",
        },
        "memory_lines": [
            {"name": "gate_up", "bytes": 212 * MIB},
            {"name": "logits", "bytes": 128 * MIB},
            {"name": "optimizer", "bytes": 27 * MIB},
            {"name": "parameters", "bytes": 13.5 * MIB},
            {"name": "gradients", "bytes": 10.5 * MIB},
        ],
        "memory_measured": {
            "parameters": 13.5 * MIB,
            "gradients": 13.5 * MIB,
            "optimizer": 27 * MIB,
            "activations, logits and work": 348 * MIB,
        },
        "phase_s": {
            "input": 1.6,
            "forward": 64.5,
            "backward": 124.8,
            "optimizer": 14.6,
            "communication_exposed": None,
            "checkpoint": 0.9,
            "eval": 8.1,
            "compile": 2.6,
        },
        "wasted_token_fraction": 0.0123,
        "input_wait": {"p50_s": 0.0038, "p99_s": 0.011, "stalled_steps": 0},
        "val": val,
        "dollars": 0.0312,
        "restarts": 0,
        "skipped_steps": 0,
        "techniques": {
            "document_packing": {
                "active": True,
                "detail": "the attention mask blocks 41 % of earlier positions",
                "numbers": {"documents_per_row": 2.7},
                "line": "Whole documents side by side in a row, blind to each other.",
            },
            "muon": {
                "active": True,
                "detail": "25 matrices are updated by orthogonalised momentum",
                "numbers": {"matrices": 25.0, "parameters": 2.65e6},
                "line": "Orthogonalised momentum for the matrices of the blocks.",
            },
        },
        "stream_sha256": "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab",
        "seed": 7,
        "parameters": 3_540_000,
        "narrowest": {
            "station": "computation",
            "share": 0.574,
            "sentence": "matrix products of the backward pass keep both cores busy.",
            "evidence": "Median step 520 ms, of it 312 ms in backward; input waits 4 ms.",
        },
        "sample": {
            "prompt": "def read(self",
            "text": ", size=-1):\n    if size < 0:\n        return self._buffer.read()\n",
        },
        "command": "headrace train runs/demo/plan.toml",
        "tokenizer": {"kind": "bpe", "vocab": 4096, "sha256": "ab12cd34"},
    }


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `values` with these top-level keys replaced."""
    return {**deepcopy(values), **changes}


def write_run(
    directory: Path,
    *,
    rows: list[dict[str, Any]] | None = None,
    plan: str = PLAN,
    environment: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a run into a folder; keywords beyond the named ones replace keys of report.json."""
    directory.mkdir(parents=True)
    report = merge(report_values(), changes)
    (directory / "report.json").write_text(json.dumps(report))
    lines = metric_rows() if rows is None else rows
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    values = ENVIRONMENT if environment is None else environment
    (directory / "environment.json").write_text(json.dumps(values))
    (directory / "plan.toml").write_text(plan)
    return directory


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return `write_run` into a folder of runs: `make_run("a", rows=[...], dollars=None)`."""

    def make(folder: str = "demo", **given: Any) -> Path:
        return write_run(tmp_path / "runs" / folder, **given)

    return make


def add_rows(folder: Path, rows: list[dict[str, Any]], *, whole: bool = True) -> None:
    """Append rows to the metrics of a run; the last is cut in half where they are not whole."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text if whole else text[: -len(text) // (2 * len(rows))])
