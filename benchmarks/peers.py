"""Compare training throughput with torchtitan and litgpt on one GPU, alternating in one call.

    python benchmarks/peers.py 160m 1b --rounds 5
    python benchmarks/peers.py 1b --sides headrace_float8 torchtitan torchtitan_float8

Headrace's reading is `headrace train` on real text in a process of its own, with everything that a
run does (loader, stream hash, metrics, clipping); a peer's is its model in the plainest loop on
random tokens that are made on the device, compiled as its authors do it, with fused AdamW, bf16
autocast and clipping. A peer's process stays between its readings and holds weights and optimizer
states then, so it compiles once. The peers need their packages: torchtitan==0.2.2 (with
torchao==0.18.0 for float8) and litgpt==0.5.13.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import receipts
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from variants import FLASH4, KERNELS

PLANS = Path(__file__).parent / "plans"
WARM_STEPS, TIMED_STEPS = 4, 16
CHILD_LIMIT_S = 300
Loss = Callable[[Tensor, Tensor], Tensor]


def shape_of(size: str) -> dict[str, Any]:
    """Return the numbers of a shape, from its plan."""
    import tomllib

    plan = tomllib.loads((PLANS / f"{size}.toml").read_text())
    length = plan["data"]["sequence_length"]
    return {**plan["model"], "length": length, "rows": plan["batch"]["tokens"] // length}


def torchtitan(
    s: dict[str, Any], *, float8: bool = False, gathered: bool = False, device: Any = "cuda"
) -> tuple[nn.Module, Loss]:
    """Build torchtitan's Llama 3, compiled block by block; fp8 as its own converter sets it.

    Args:
        s: what `shape_of` returns.
        float8: multiply in fp8, but for the head.
        gathered: let FSDP2 gather weights in fp8.
        device: where the weights are.
    """
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    model = Transformer(
        TransformerModelArgs(
            dim=s["dim"],
            n_layers=s["layers"],
            n_heads=s["heads"],
            multiple_of=256,
            n_kv_heads=s.get("kv_heads", s["heads"]),
            vocab_size=s["vocab"],
            ffn_dim_multiplier=s["ffn"] / (8 * s["dim"] / 3),
            rope_theta=s["rope_theta"],
            max_seq_len=s["length"],
        )
    ).to(device)
    with torch.no_grad():
        model.init_weights()
    assert model.layers["0"].feed_forward.w1.weight.shape[0] == s["ffn"]
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathered)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: "output" not in name
        )
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss = torch.compile(lambda p, y: F.cross_entropy(p.flatten(0, 1).float(), y.flatten(0, 1)))
    return model, lambda x, y: loss(model(x), y)


def litgpt(s: dict[str, Any]) -> tuple[nn.Module, Loss]:
    """Build litgpt's GPT in a Llama configuration, compiled whole."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(
        Config(
            name="llama",
            block_size=s["length"],
            n_layer=s["layers"],
            n_embd=s["dim"],
            n_head=s["heads"],
            n_query_groups=s.get("kv_heads", s["heads"]),
            padded_vocab_size=s["vocab"],
            vocab_size=s["vocab"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=s["ffn"],
            rope_base=int(s["rope_theta"]),
        )
    ).cuda()
    run = torch.compile(model)
    return model, lambda x, y: F.cross_entropy(run(x).flatten(0, 1), y.flatten(0, 1))


PEERS = {
    "torchtitan": torchtitan,
    "torchtitan_float8": partial(torchtitan, float8=True),
    "litgpt": litgpt,
}
CHUNKS = "-fused_cross_entropy techniques.chunked_cross_entropy.chunk_tokens="
OURS = {
    "headrace": "",
    "headrace_float8": "+float8_linear",
    "headrace_small": f"+selective_checkpoint {CHUNKS}8192",
    "headrace_smallest": f"{KERNELS}techniques.selective_checkpoint.wide_every=2 {CHUNKS}4096",
    "headrace_exact": f"-bf16_parameters +selective_checkpoint {CHUNKS}8192",
    "headrace_micro": "batch.micro_sequences=2",
    "headrace_fused": KERNELS,
    "headrace_flash4": f"{KERNELS}{FLASH4}",
    "headrace_float8_flash4": f"+float8_linear {KERNELS}{FLASH4}",
}
"""Changes of the shape's plan, as in variants.py. `small`, `smallest`, `exact` and `micro` are for
memory; `flash4` needs the package of FlashAttention 4."""
SHAPE_KEYS = ("data", "data.sequence_length", "batch", "batch.tokens")
"""Keys, beside the model's, that a peer takes from the plan's file."""


def check_shape(overrides: list[str]) -> None:
    """End the program at an override of the shape: a peer would not follow it."""
    for item in overrides:
        key = item.partition("=")[0].strip()
        if key.split(".")[0] == "model" or key in SHAPE_KEYS:
            raise SystemExit(f"{item}: a peer keeps the shape of benchmarks/plans; leave it out")


def serve_peer(name: str, size: str) -> None:
    """Answer every line of the standard input with a reading, as one line of JSON."""
    s = shape_of(size)
    torch.manual_seed(0)
    model, loss_fn = PEERS[name](s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        x = torch.randint(0, s["vocab"], (s["rows"], s["length"]), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_fn(x, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in sys.stdin:
        marks = []
        for index in range(WARM_STEPS + TIMED_STEPS):
            if index == WARM_STEPS:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        step_ms = median(a.elapsed_time(b) for a, b in marks[WARM_STEPS:])
        reading = {
            "tokens_per_s": s["rows"] * s["length"] / step_ms * 1e3,
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        torch.cuda.empty_cache()
        print(json.dumps(reading), flush=True)


class Peer:
    """Read a peer in a process of its own, which the first reading starts.

    Args:
        name: the peer.
        size: the shape.
        command: what starts the process; without it this program, for the peer.
        limit_s: seconds after which a reading is given up.
    """

    def __init__(
        self,
        name: str,
        size: str,
        command: list[str] | None = None,
        limit_s: float = CHILD_LIMIT_S,
    ) -> None:
        self.name, self.size, self.limit_s = name, size, limit_s
        self.command = command or [sys.executable, __file__, size, "--only", name]
        self.process: subprocess.Popen[str] | None = None

    def read(self) -> dict[str, Any]:
        """Return one reading.

        Raises:
            RuntimeError: the process failed, or gave no reading in time.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                self.command,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        limit = Timer(self.limit_s, self.process.kill)
        limit.start()
        with suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        answer = next((line for line in self.process.stdout if line.startswith("{")), None)
        limit.cancel()
        if answer is None:
            raise RuntimeError(f"{self.name} {self.size} failed, or took over {self.limit_s:g} s")
        return json.loads(answer)

    def close(self) -> None:
        """End the process; another reading starts one again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def time_headrace(size: str, work: Path, extra: list[str]) -> dict[str, Any]:
    """Return one reading of `headrace train`, from its own report."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace",
            "train",
            str(PLANS / f"{size}.toml"),
            "--json",
            f"directory={work / 'runs'}",
            f"data.directory={work / 'data'}",
            *extra,
        ],
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(
            f"headrace {size} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )
    report = json.loads(ended.stdout)
    return {
        "tokens_per_s": report["steady_tokens_per_s"],
        "peak_bytes": report["peak_memory_bytes"]["allocated"],
        "mfu": report["model_flops_utilization"]["value"],
        "report": report,
    }


def compare(
    size: str,
    sides: list[str],
    rounds: int,
    limit_s: float,
    results: Path,
    work: Path,
    extra: list[str],
    once: list[str],
) -> None:
    """Time all sides alternately, then write a row for each; no round begins after `limit_s`.

    A side that fails is not read again. What was read has its row, whatever ends the rounds.
    """
    from variants import Variant

    ours = {n: Variant.parse(f"{n}: {OURS[n]}", {}) for n in sides if n in OURS}
    facts: dict[str, dict[str, Any]] = {name: {} for name in sides}
    for name, variant in ours.items():
        plan = variant.of(PLANS / f"{size}.toml", extra)
        facts[name] = {
            "plan_sha256": receipts.sha256(plan.dump()),
            "overrides": [*variant.overrides, *extra],
        }
    peers = {name: Peer(name, size) for name in sides if name in PEERS}
    readings: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    begin_s = time.monotonic()
    try:
        for index in range(rounds):
            if index and time.monotonic() - begin_s > limit_s:
                break
            for name in readings:
                if name in failed or (index and name in once):
                    continue
                try:
                    if name in ours:
                        reading = time_headrace(size, work, [*ours[name].command(), *extra])
                    else:
                        reading = peers[name].read()
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{name} is left out: {error}", flush=True)
                    failed[name] = facts[name]["failed_later"] = str(error)[-1500:]
                    continue
                readings[name].append(reading)
                print_progress(f"{size} round {index} {name}", reading)
    finally:
        for peer in peers.values():
            peer.close()
        write(size, {n: values for n, values in readings.items() if values}, facts, results)


def print_progress(what: str, reading: dict[str, Any]) -> None:
    """Print a line or two of progress."""
    print(f"{what}: {reading['tokens_per_s'] or 0:,.0f} tokens/s", flush=True)
    if start_s := reading.get("report", {}).get("start_s"):
        parts = ", ".join(f"{part} {spent_s:.1f}" for part, spent_s in start_s.items())
        print(f"  seconds before the first step ended: {parts}", flush=True)


def write(
    size: str,
    readings: dict[str, list[dict[str, Any]]],
    facts: dict[str, dict[str, Any]],
    results: Path,
) -> None:
    """Write a row for each side that was read, with `facts`.

    Readings are those of the rounds from the first on, so the first ones of two sides are pairs,
    also where one side was read less often.
    """
    for name, values in readings.items():
        metrics = spreads(
            values,
            {"tokens_per_s": ("tokens_per_s", "tokens/s"), "peak_memory": ("peak_bytes", "bytes")},
        )
        if name in OURS:
            metrics |= spreads(values, {"mfu": ("mfu", "share of bf16 peak")})
            for peer in (other for other in readings if other in PEERS):
                pairs = list(zip(values, readings[peer], strict=False))
                for key, what in (("tokens_per_s", "ratio"), ("peak_bytes", "memory_ratio")):
                    if ratios := [a[key] / b[key] for a, b in pairs if a[key] and b[key]]:
                        metrics[f"{what}_to_{peer}"] = receipts.spread(ratios, "x")
        receipts.append(
            "peers",
            metrics,
            results=results,
            peer=name,
            shape=size,
            n=len(values),
            seeds=[0],
            versions={p: receipts.installed(p) for p in ("torchtitan", "torchao", "litgpt")},
            techniques=sorted(values[-1]["report"]["techniques"]) if name in OURS else None,
            **facts[name],
        )
        print(json.dumps({"peer": name, "size": size, **metrics}), flush=True)


def spreads(
    readings: list[dict[str, Any]], wanted: dict[str, tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """Return the metrics that every reading has; `wanted` maps a metric to a key and a unit."""
    return {
        name: receipts.spread([r[key] for r in readings], unit)
        for name, (key, unit) in wanted.items()
        if all(r[key] for r in readings)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="+")
    parser.add_argument(
        "--sides", nargs="+", choices=[*OURS, *PEERS], default=["headrace", "torchtitan", "litgpt"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", nargs="*", default=[], help="sides that are read once only")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for each shape")
    parser.add_argument("--only", choices=PEERS)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for Headrace's plan")
    args = parser.parse_args()
    if args.only:
        return serve_peer(args.only, args.sizes[0])
    if any(side in PEERS for side in args.sides):
        check_shape(args.set)
    with tempfile.TemporaryDirectory() as work:
        for size in args.sizes:
            compare(
                size,
                args.sides,
                args.rounds,
                args.limit_s,
                args.results,
                Path(work),
                args.set,
                args.once,
            )


if __name__ == "__main__":
    main()
