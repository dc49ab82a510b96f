"""Sort kernels into families by their names, and list the longest.

Shares in the table are of the kernels' summed time. Kernels may overlap, so the verdicts rest on
unions of intervals and never on these sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from headrace.doctor.trace.file import Event
from headrace.doctor.trace.limits import BRIEF_KERNEL_US

PREFIXES = {
    "triton_tem_fused_flex_attention": "attention",
    "triton_tem_": "products",
    "triton_": "elementwise",
}
"""How inductor's names begin -> family; the first that fits, before any of FAMILIES."""
FAMILIES = {
    "collectives": ("nccl", "rccl", "mscclpp", "nvshmem", "cross_device_reduce", "one_shot_all"),
    "attention": (
        "attention",
        "fmha",
        "flash",
        "cudnn_generated",
        "sdpa",
        "attn",
        "dot_do_o",
        "convert_dq",
    ),
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "matmul",
        "scaled_mm",
        "xmma",
        "splitk",
        "gemv",
        "conv2d",
        "fprop",
        "dgrad",
        "wgrad",
        "implicit_con",
        "winograd",
    ),
    "optimizer": ("adam", "multi_tensor", "lpnorm", "foreach"),
    "copies": ("memcpy", "memset"),
    "elementwise": (
        "elementwise",
        "norm",
        "softmax",
        "reduce",
        "rope",
        "rotary",
        "swiglu",
        "silu",
        "gelu",
        "cross_entropy",
        "nll_loss",
        "embedding",
        "index",
        "gather",
        "scatter",
        "dropout",
        "fill",
        "copy",
        "cat",
        "welford",
        "triton",
    ),
}
"""Family -> parts of its kernels' names; the first that fits. Elementwise holds normalisations and
reductions too: what reads and writes much and computes little."""
MEMORY_FAMILIES = ("elementwise", "optimizer")
SLOW_MATMULS = ("sgemm", "simt", "f32f32_f32f32_f32")
"""Parts of the names of float32 matmuls that run without tensor cores."""
FASTER = ("tf32", "s1688", "tensorop")


@dataclass(frozen=True)
class KernelRow:
    """Hold one kernel of the table.

    Args:
        name: its name, as the trace has it.
        family: its family in FAMILIES, or "other".
        calls: calls in all steps that were measured.
        total_s: their summed time.
        share: share of all kernels' summed time.
        bound: "compute", "bandwidth" or "latency" where shapes were recorded; else empty.
        of_roof: the share of the device's highest rate that it reached; None without shapes.
    """

    name: str
    family: str
    calls: int
    total_s: float
    share: float
    bound: str = ""
    of_roof: float | None = None


@cache
def family_of(name: str) -> str:
    """Return the family of a kernel."""
    low = name.lower()
    if not any(part in low for part in FAMILIES["collectives"]):
        for prefix, family in PREFIXES.items():
            if low.startswith(prefix):
                return family
    return next((f for f, parts in FAMILIES.items() if any(p in low for p in parts)), "other")


@cache
def is_slow_matmul(name: str) -> bool:
    """Return whether a kernel is a float32 matmul without tensor cores."""
    low = name.lower()
    return any(p in low for p in SLOW_MATMULS) and not any(p in low for p in FASTER)


def is_memory_bound(event: Event) -> bool:
    """Return whether its family moves much and computes little; brief kernels are all latency."""
    long = event.end_us - event.start_us >= BRIEF_KERNEL_US
    return long and family_of(event.name) in MEMORY_FAMILIES


def is_host_copy(event: Event, direction: str) -> bool:
    """Return whether a copy goes between host and device, in direction "HtoD" or "DtoH"."""
    return event.kind == "copy" and direction.lower() in event.name.lower()


def table(
    events: Sequence[Event], bounds: Mapping[str, tuple[str, float]] | None = None
) -> tuple[KernelRow, ...]:
    """Return kernels and copies by name, the longest first.

    Args:
        events: what ran.
        bounds: name -> bound, and share of the roof.
    """
    sums: dict[str, tuple[int, float]] = {}
    for event in events:
        calls, spent_us = sums.get(event.name, (0, 0.0))
        sums[event.name] = calls + 1, spent_us + event.end_us - event.start_us
    whole_us = sum(spent for _, spent in sums.values()) or 1.0
    rows = []
    for name, (calls, spent_us) in sums.items():
        bound, of_roof = (bounds or {}).get(name, ("", None))
        share = spent_us / whole_us
        rows.append(KernelRow(name, family_of(name), calls, spent_us * 1e-6, share, bound, of_roof))
    return tuple(sorted(rows, key=lambda row: (-row.total_s, row.name)))


def brief_kernels(events: Sequence[Event]) -> float | None:
    """Return the share of kernels briefer than a launch is worth; None without kernels."""
    spent_us = [e.end_us - e.start_us for e in events if e.kind == "kernel"]
    brief = sum(us < BRIEF_KERNEL_US for us in spent_us)
    return brief / len(spent_us) if spent_us else None
