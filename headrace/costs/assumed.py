"""State what is assumed of a device that nobody probed: shares of its published peaks, as data.

All of it stands in one place, so that it can be doubted line by line. "Reached" is what one kernel
reaches alone: a matmul of three sizes of 8,192, a copy of gigabytes, attention over 4 causal rows
of 8,192 tokens with 32 heads of 128 features. Only the H200 was measured, and its numbers stand in
for the H100 and the GH200: matmuls and attention as they are on the same chip, copies by their own
bandwidth. These numbers are in `constants.toml`, with the program that measured them.
Everything else is a round number from what such devices are known to reach;
`headrace.probes.measure` puts measurements in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.costs.constants import number, numbers, table

GB, GIB, MICROSECOND = 10**9, 2**30, 1e-6

FACTORS: Mapping[str, tuple[str, float]] = {
    "bf16": ("half", 1.0),
    "fp16": ("half", 1.0),
    "tf32": ("half", 0.5),
    "fp8": ("half", 2.0),
    "fp32": ("fp32", 1.0),
}
"""precision -> (the published peak that its own peak is a multiple of, that multiple). The
datasheets of A10, A100, L4, L40S, H100, H200 and B200, and the whitepapers of GeForce cards with
fp32 accumulation, give dense rates in these ratios."""


@dataclass(frozen=True)
class AssumedAttention:
    """A row holds attention by one kernel as it was measured on an H200.

    Rates are TFLOP/s of causal FLOPs, forward and backward.
    """

    rows: int
    heads: int
    kv_heads: int
    length: int
    features: int
    rates: tuple[float, float] = (0.0, 0.0)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Return everything but the rates."""
        return self.rows, self.heads, self.kv_heads, self.length, self.features

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward pass, half of all pairs counted."""
        return 2.0 * self.rows * self.heads * self.length**2 * self.features


ANCHOR_ATTENTION = AssumedAttention(4, 32, 8, 8192, 128)
"""The shape of attention at which `attention` of `Family` states shares of a peak."""
H200_PEAK = 989e12
"""bf16 FLOP/s; rows count for other chips of the family in proportion to theirs."""


@dataclass(frozen=True)
class Family:
    """A family holds devices that reach like shares of their peaks."""

    matmuls: Mapping[str, float]
    """precision -> share of its peak reached; the devices lack a precision that is missing"""
    attention: Mapping[str, tuple[float, float]]
    """kernel -> shares of the bf16 peak reached forward and backward (of 2.5 times the FLOPs);
    "math" is computed from matmuls and traffic"""
    traffic: float
    """share of the memory bandwidth reached, reads and writes together"""
    kernel_s: float
    """device seconds that the smallest kernel takes in a stream of kernels"""
    launch_s: float
    """host seconds of an eager operation"""
    graph_launch_s: float
    """host seconds of one replay of a captured graph"""
    context_bytes: int
    """bytes that CUDA's context and the libraries take"""
    link_bytes_per_s: float
    """bytes per second of a copy between pinned memory and the device, either way"""
    link_s: float
    """seconds of the smallest copy over that link"""
    says: str
    """where these numbers are from"""
    rows: Mapping[str, tuple[AssumedAttention, ...]] = field(default_factory=dict)
    """kernel -> attention that was measured on one of them, in place of shares"""
    relative: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """kernel -> (another kernel that has rows, the factor of its rates)"""


def _h200_attention(name: str) -> tuple[AssumedAttention, ...]:
    """Return the rows of a kernel of attention that were measured on an H200."""
    return tuple(
        AssumedAttention(*map(int, row[:5]), (row[5], row[6]))  # type: ignore[arg-type]
        for row in table(name)
    )


_BF16, _FP16, _FP8, _TF32, _FP32 = numbers("h200_matmul")
_LINK_GB, _LINK_US = numbers("h200_link")

HOPPER = Family(
    matmuls={
        "bf16": _BF16 / 989,
        "fp16": _FP16 / 989,
        "fp8": _FP8 / 1978,
        "tf32": _TF32 / 494.5,
        "fp32": _FP32 / 67,
    },
    attention={},
    rows={
        "cudnn": _h200_attention("h200_attention_cudnn"),
        "flash": _h200_attention("h200_attention_flash"),
        "flex": _h200_attention("h200_attention_flex"),
        "efficient": _h200_attention("h200_attention_efficient"),
    },
    relative={"flash4": ("cudnn", number("flash4_over_cudnn"))},
    traffic=number("h200_copy") / 4.8,
    kernel_s=number("h200_kernel") * MICROSECOND,
    launch_s=number("h200_launch") * MICROSECOND,
    graph_launch_s=number("h200_graph_launch") * MICROSECOND,
    context_bytes=int(number("h200_context")) * 2**20,
    link_bytes_per_s=_LINK_GB * GB,
    link_s=_LINK_US * MICROSECOND,
    says="measured on an H200 (2026-11-22, torch 2.11.0+cu130, driver 580): one product of 8,192 "
    "cubed in each precision (fp16 the mean of that and 4,096 cubed), copies, attention by cudnn, "
    "flash, efficient and flex (at 2,048 tokens; of longer rows it is from steps), launches, the "
    f"link and the context; flash4 is {number('flash4_over_cudnn')} times cudnn, from its receipts "
    "in results/techniques.jsonl. Products of other shapes follow from the one: the 125 that were "
    "probed told steps of a shape left out less well. Other chips of the family are assumed to "
    "reach the same shares",
)

AMPERE = Family(
    matmuls={"bf16": 0.82, "fp16": 0.82, "tf32": 0.8, "fp32": 0.85},
    attention={
        "cudnn": (0.55, 0.45),
        "flash": (0.55, 0.45),
        "flex": (0.45, 0.35),
        "efficient": (0.4, 0.3),
    },
    traffic=0.85,
    kernel_s=3 * MICROSECOND,
    launch_s=7 * MICROSECOND,
    graph_launch_s=15 * MICROSECOND,
    context_bytes=int(0.5 * GIB),
    link_bytes_per_s=24 * GB,
    link_s=10 * MICROSECOND,
    says="all shares are assumed; flash is near the lower end of what arXiv 2307.08691 "
    "measured on an A100",
)

ADA = Family(
    matmuls={"bf16": 0.8, "fp16": 0.8, "fp8": 0.75, "tf32": 0.8, "fp32": 0.7},
    attention={
        "cudnn": (0.6, 0.5),
        "flash": (0.6, 0.5),
        "flex": (0.5, 0.4),
        "efficient": (0.45, 0.35),
    },
    traffic=0.88,
    kernel_s=2.5 * MICROSECOND,
    launch_s=6 * MICROSECOND,
    graph_launch_s=12 * MICROSECOND,
    context_bytes=int(0.5 * GIB),
    link_bytes_per_s=24 * GB,
    link_s=10 * MICROSECOND,
    says="all shares are assumed: no such device was measured",
)

TURING = Family(
    matmuls={"fp16": 0.75, "fp32": 0.8},
    attention={"efficient": (0.3, 0.22)},
    traffic=0.8,
    kernel_s=3 * MICROSECOND,
    launch_s=7 * MICROSECOND,
    graph_launch_s=15 * MICROSECOND,
    context_bytes=int(0.4 * GIB),
    link_bytes_per_s=12 * GB,
    link_s=10 * MICROSECOND,
    says="all shares are assumed: no such device was measured, nor any without units for bf16",
)

FAMILIES: Mapping[str, Family] = {
    "hopper": HOPPER,
    "blackwell": Family(
        matmuls={"bf16": 0.72, "fp16": 0.72, "fp8": 0.65, "tf32": 0.7, "fp32": 0.75},
        attention={
            "cudnn": (0.5, 0.4),
            "flash": (0.15, 0.12),
            "flex": (0.2, 0.15),
            "flash4": (0.55, 0.45),
            "efficient": (0.12, 0.09),
        },
        traffic=0.88,
        kernel_s=2.5 * MICROSECOND,
        launch_s=6 * MICROSECOND,
        graph_launch_s=12 * MICROSECOND,
        context_bytes=int(0.8 * GIB),
        link_bytes_per_s=52 * GB,
        link_s=10 * MICROSECOND,
        says="all shares are assumed: no such device was measured",
    ),
    "ampere": AMPERE,
    "ada": ADA,
    "ampere_rtx": replace(
        AMPERE,
        attention={**AMPERE.attention, "flash": (0.5, 0.4)},
        says="all shares are assumed, those of the A100's family but for flash attention, which "
        "has less shared memory here; no such device was measured",
    ),
    "blackwell_rtx": replace(
        ADA,
        link_bytes_per_s=52 * GB,
        says="all shares are assumed, those of the Ada family: no such device was measured",
    ),
    "turing": TURING,
    "volta": TURING,
    "cpu": Family(
        matmuls={"fp32": 0.7, "bf16": 0.5},
        attention={"flash": (0.4, 0.3)},
        traffic=0.6,
        kernel_s=3 * MICROSECOND,
        launch_s=3 * MICROSECOND,
        graph_launch_s=3 * MICROSECOND,
        context_bytes=0,
        link_bytes_per_s=6 * GB,
        link_s=1 * MICROSECOND,
        says="a processor of unknown kind, of which the peaks are guessed too: CPU",
    ),
}


@dataclass(frozen=True)
class Processor:
    """A processor has the peaks that stand in for those of an unknown CPU.

    They are those of each core, and of its memory.
    """

    half_flops: float
    fp32_flops: float
    bandwidth_bytes_per_s: float


CPU = Processor(half_flops=90e9, fp32_flops=90e9, bandwidth_bytes_per_s=20e9)
"""A core with 256-bit vectors: 2 units x 8 numbers x 2 operations x 2.8 GHz; two channels of DDR4.
No matrix units are assumed, so bf16 is as fast as fp32."""
