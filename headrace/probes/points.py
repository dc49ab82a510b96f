"""Define what is measured, in which order, and how each point is made.

Shapes: B rows, H query heads, G key-value heads, T tokens, K features of a head.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from headrace.costs.rates import (
    AttentionPoint,
    Kernel,
    LinearMatmul,
    MatmulPoint,
    MeasuredStep,
    Precision,
    Shape,
    StreamPoint,
)
from headrace.probes.clock import REPEATS, Clock

KIB, MIB, GIB = 2**10, 2**20, 2**30
TINY = 200
"""How many operations are queued to time one launch; fewer than a stream can hold."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
COMPILING_S = {"flex": 40.0, "flash4": 30.0}
"""Seconds that compiling a kernel takes. Its probe is left out when no more time is left."""
SQUARES = {"cuda": (8192, 4096), "cpu": (256, 512)}
"""Sizes n of the n x n x n matmuls; the first one in the main precision always runs."""
GRIDS = {
    "cuda": (
        ((2048, 8192, 32768), (768, 2048, 8192)),
        ((128, 512, 65536), (512, 4096, 16384)),
        ((4096, 16384), (1024, 3072, 6144, 12288)),
    ),
    "cpu": (((256, 1024), (128, 512)),),
}
"""Tokens and widths of a layer's matmuls, the important ones first; all but the first level are
timed in the main precision alone, which is bf16 on a GPU that multiplies it."""
HEADS = ((8192, 32768, 768), (32768, 128256, 2048), (128256, 2048, 32768), (32768, 768, 65536))
"""Sizes m, n and k of the output layer's matmuls."""
ROWS: dict[str, tuple[Shape, ...]] = {
    "cuda": (
        (8, 32, 8, 4096, 64),
        (4, 32, 8, 8192, 128),
        (32, 12, 12, 2048, 64),
        (64, 12, 12, 512, 64),
        (8, 16, 16, 2048, 128),
        (1, 32, 8, 32768, 128),
        (1, 32, 8, 32768, 64),
    ),
    "cpu": (
        (32, 4, 4, 128, 32),
        (8, 4, 4, 512, 32),
        (8, 4, 4, 256, 64),
        (16, 4, 4, 64, 32),
        (1, 4, 4, 512, 32),
        (4, 6, 6, 1024, 64),
        (1, 2, 2, 2048, 64),
    ),
}
SMALL_ROWS: Shape = (2, 12, 12, 1024, 64)
"""The shape for attention kernels that keep every score, or whose shapes compile slowly."""
MOVED = {
    "cuda": (GIB, 16 * KIB, 64 * MIB, MIB, 256 * MIB, 8 * MIB, 2 * GIB, 256 * KIB, 32 * MIB),
    "cpu": (16 * MIB, 16 * KIB, MIB, 128 * MIB),
}
"""Bytes that each timed copy reads and writes together, the most important first."""
LINKED = {"cuda": (64 * MIB, 64 * KIB, MIB, 512 * MIB), "cpu": (8 * MIB, 64 * KIB)}


@dataclass
class Probe:
    """A probe is one measurement that can be run."""

    group: str
    label: str
    work: float
    """FLOPs or bytes; within a group the time grows in proportion to it"""
    bytes: float
    """bytes of memory that it needs at once"""
    run: Callable[[], None]
    least_s: float = 0.0
    """seconds for what does not grow with the work, such as compiling"""
    must: bool = False
    """whether it runs without regard to the budget"""


@dataclass
class Readings:
    """Hold what the probes have measured so far."""

    clock: Clock
    draw: torch.Generator
    matmuls: dict[Precision, list[MatmulPoint]] = field(default_factory=dict)
    attention: dict[tuple[Kernel, bool], list[AttentionPoint]] = field(default_factory=dict)
    traffic: list[StreamPoint] = field(default_factory=list)
    links: dict[bool, list[StreamPoint]] = field(default_factory=lambda: {True: [], False: []})
    linears: dict[tuple[LinearMatmul, Precision], list[MatmulPoint]] = field(default_factory=dict)
    pieces: dict[str, list[StreamPoint]] = field(default_factory=dict)
    steps: list[MeasuredStep] = field(default_factory=list)
    launch_s: float = 0.0
    graph_launch_s: float = 0.0
    kernel_s: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device that is measured."""
        return self.clock.device

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normally distributed numbers on the device."""
        return torch.randn(*shape, device=self.device, generator=self.draw).to(dtype)


# --- one point --------------------------------------------------------------------------------


def matmul_probe(readings: Readings, precision: Precision, m: int, n: int, k: int) -> Probe:
    """Return the probe of the matmul [m, k] times [k, n]."""

    def run() -> None:
        seconds = readings.clock.seconds(_multiply(readings, precision, m, n, k))
        readings.matmuls.setdefault(precision, []).append(MatmulPoint(m, n, k, seconds))

    needed = 4.0 * (2 * (m * k + k * n) + m * n)
    return Probe(f"products in {precision}", f"{m}x{n}x{k}", 2.0 * m * n * k, needed, run)


def _multiply(
    readings: Readings, precision: Precision, m: int, n: int, k: int
) -> Callable[[], Any]:
    """Return a call that multiplies matrices laid out as in a linear layer's forward pass."""
    if precision == "fp8":
        a, b = (readings.random(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        one = torch.ones((), device=readings.device)
        return lambda: torch._scaled_mm(  # type: ignore[attr-defined]
            a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    dtype = DTYPES[precision]
    x, w = readings.random(m, k, dtype=dtype), readings.random(n, k, dtype=dtype)
    out = torch.empty(m, n, dtype=dtype, device=readings.device)

    def multiply() -> None:
        if precision != "tf32":
            torch.mm(x, w.t(), out=out)
            return
        torch.set_float32_matmul_precision("high")
        try:
            torch.mm(x, w.t(), out=out)
        finally:
            torch.set_float32_matmul_precision("highest")

    return multiply


def attention_probe(readings: Readings, kernel: Kernel, shape: Shape, causal: bool) -> Probe:
    """Return the probe of attention by one kernel, forward and backward."""
    rows, heads, kv_heads, length, features = shape
    if kernel in ("efficient", "math"):
        kv_heads = heads  # they take no groups of query heads

    def run() -> None:
        times = _mix(readings, kernel, (rows, heads, kv_heads, length, features), causal)
        for backward, seconds in zip((False, True), times, strict=True):
            point = AttentionPoint(rows, heads, kv_heads, length, features, causal, seconds)
            readings.attention.setdefault((kernel, backward), []).append(point)

    needed = 16.0 * rows * length * features * (heads + kv_heads)
    if kernel == "math":
        needed += 32.0 * rows * heads * length**2
    label = f"{rows}x{heads}/{kv_heads}x{length}x{features}{'' if causal else ' not causal'}"
    flops = 4.0 * rows * heads * length**2 * features
    return Probe(f"attention by {kernel}", label, flops, needed, run, COMPILING_S.get(kernel, 0.0))


def _mix(readings: Readings, kernel: Kernel, shape: Shape, causal: bool) -> tuple[float, float]:
    """Return the seconds of attention's forward pass and of its backward pass."""
    B, H, G, T, K = shape
    dtype = torch.bfloat16 if readings.device.type == "cuda" else torch.float32
    drawn = [readings.random(B, T, heads, K, dtype=dtype).transpose(1, 2) for heads in (H, G, G, H)]
    qkv, gradient = [x.requires_grad_() for x in drawn[:3]], drawn[3]
    if kernel == "flex":
        return _flex(readings.clock, qkv, gradient, causal)

    q, k, v = qkv

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=G != H)

    with _standing(kernel), sdpa_kernel(BACKENDS[kernel]):
        mixed = forward()
        forward_s = readings.clock.seconds(forward)
        backward_s = readings.clock.seconds(
            lambda: torch.autograd.grad(mixed, qkv, gradient, retain_graph=True)
        )
    return forward_s, backward_s


@contextmanager
def _standing(kernel: Kernel) -> Iterator[None]:
    """Use FlashAttention 4 in place of torch's flash kernels where `kernel` asks for it."""
    if kernel != "flash4":
        yield
        return
    if find_spec("flash_attn") is None:
        raise ImportError("flash-attn-4 is not installed")
    before = current_flash_attention_impl()
    activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        restore_flash_attention_impl()
        if before is not None:
            activate_flash_attention_impl(before)


def _flex(clock: Clock, qkv: list[Tensor], gradient: Tensor, causal: bool) -> tuple[float, float]:
    """Return the seconds of FlexAttention's forward pass and of its backward pass.

    Its compiled backward pass runs only once after each forward pass. So both are timed together,
    and the forward pass is subtracted.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (q, k, v), T = qkv, gradient.size(2)
    block = create_block_mask(
        lambda b, h, i, j: (i >= j) if causal else (i >= 0), None, None, T, T, device=q.device
    )
    call: Any = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        return call(q, k, v, block_mask=block, enable_gqa=q.size(1) != k.size(1))

    both_s = clock.seconds(lambda: torch.autograd.grad(forward(), qkv, gradient))
    forward_s = clock.seconds(forward)
    if both_s <= forward_s:
        raise RuntimeError("forward and backward took no longer than forward alone")
    return forward_s, both_s - forward_s


def moving(readings: Readings, size: int) -> Probe:
    """Return the probe of a copy on the device; half of the bytes are read, half written."""

    def run() -> None:
        x = torch.zeros(size // 2, dtype=torch.int8, device=readings.device)
        y = torch.empty_like(x)
        readings.traffic.append(StreamPoint(size, readings.clock.seconds(lambda: y.copy_(x))))

    return Probe("copies", f"{size} bytes", size, size, run)


def linking(readings: Readings, size: int, to_host: bool) -> Probe:
    """Return the probe of a copy between device and pinned memory; a CPU copies within its own."""

    def run() -> None:
        pin = readings.device.type == "cuda"
        host = torch.zeros(size, dtype=torch.int8, pin_memory=pin)
        here = torch.zeros(size, dtype=torch.int8, device=readings.device)
        onto, source = (host, here) if to_host else (here, host)
        seconds = readings.clock.seconds(lambda: onto.copy_(source, non_blocking=True))
        readings.links[to_host].append(StreamPoint(size, seconds))

    direction = "to" if to_host else "from"
    return Probe(f"copies {direction} the host", f"{size} bytes", size, size, run)


def launches(readings: Readings) -> None:
    """Measure what queueing an operation costs the host, and the least time of a kernel."""
    x = torch.zeros(1, device=readings.device)

    def queue() -> None:
        for _ in range(TINY):
            x.add_(1)

    queue()
    readings.launch_s = _queueing(readings, queue) / TINY
    if readings.device.type != "cuda":
        readings.graph_launch_s = readings.kernel_s = readings.launch_s
        readings.absent["captured graphs"] = "a CPU has none: each operation costs what it costs"
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    readings.graph_launch_s = _queueing(readings, graph.replay)
    readings.kernel_s = readings.clock.seconds(graph.replay) / TINY


def _queueing(readings: Readings, queue: Callable[[], Any]) -> float:
    """Return the host seconds until `queue` returns; the device's queue is empty before it."""
    times = []
    for _ in range(REPEATS + 2):
        readings.clock.wait()
        begin_s = time.perf_counter()
        queue()
        times.append(time.perf_counter() - begin_s)
    readings.clock.wait()
    return median(times[2:])


# --- which, and in which order ----------------------------------------------------------------


def in_order(readings: Readings) -> Iterator[Probe]:
    """Yield all probes of a GPU, the most important first; note as absent what it cannot run."""
    kind = readings.device.type
    main, *others = precisions(readings)
    moved = [moving(readings, size) for size in MOVED[kind]]
    linked = [
        linking(readings, size, toward_host)
        for size in LINKED[kind]
        for toward_host in (True, False)
    ]
    squares = {
        p: [matmul_probe(readings, p, n, n, n) for n in SQUARES[kind]] for p in (main, *others)
    }
    kernels: list[Kernel] = ["cudnn", "flash", "efficient"]
    rows = [
        [attention_probe(readings, kernel, one, True) for kernel in kernels] for one in ROWS[kind]
    ]
    for probe in (*moved[:2], *linked[:4], squares[main][0]):
        probe.must = True
        yield probe
    yield from (squares[other][0] for other in others)
    yield from (*rows[0], *rows[1], *moved[2:], *squares[main][1:], *grid(readings, main, 0))
    yield from (*linked[4:], *(probe for more in rows[2:] for probe in more))
    for other in others:
        yield from (*squares[other][1:], *grid(readings, other, 0))
    yield attention_probe(readings, "math", SMALL_ROWS, True)
    yield from (
        attention_probe(readings, kernel, (8, *SMALL_ROWS[1:]), False) for kernel in kernels
    )
    for level in range(1, len(GRIDS[kind])):
        yield from grid(readings, main, level)
    yield from (matmul_probe(readings, main, *one) for one in HEADS)
    yield from (attention_probe(readings, "flash4", ROWS[kind][n], True) for n in (0, 1))
    yield from (attention_probe(readings, "flex", ROWS[kind][n], True) for n in (2, -1))


def grid(readings: Readings, precision: Precision, level: int) -> Iterator[Probe]:
    """Yield a layer's matmuls: of the result, of the input's gradient and of the weight's."""
    kind = readings.device.type
    tokens, widths = GRIDS[kind][level]
    for m in tokens:
        for n in widths:
            for k in widths:
                yield matmul_probe(readings, precision, m, n, k)
    for n in widths:
        for k in widths:
            yield matmul_probe(readings, precision, n, k, max(tokens))


def precisions(readings: Readings) -> Iterator[Precision]:
    """Yield the precisions that the device has, the most used first; note others as absent."""
    if readings.device.type == "cpu":
        yield from ("fp32", "bf16")
        readings.absent |= dict.fromkeys(
            (f"products in {p}" for p in ("fp16", "tf32", "fp8")), "no matrix units of a GPU"
        )
        return
    capability = torch.cuda.get_device_capability(readings.device)
    needed: dict[Precision, tuple[int, int]] = {
        "bf16": (8, 0),
        "fp8": (8, 9),
        "fp32": (0, 0),
        "tf32": (8, 0),
        "fp16": (7, 0),
    }
    for precision, oldest in needed.items():
        if capability >= oldest:
            yield precision
        else:
            has = ".".join(map(str, capability))
            readings.absent[f"products in {precision}"] = f"compute capability {has} has no units"
