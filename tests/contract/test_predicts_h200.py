"""Predicts: the ledger against peaks that were measured on an H200, where no device is needed.

Bytes are `torch.cuda.max_memory_allocated` of steady steps less what was held before the build, by
benchmarks/techniques.py and limits.py under torch 2.11 with CUDA 13.0 (results/).
"""

from pathlib import Path

import house
import pytest

from headrace.build import predict
from headrace.core.plan import Plan

PLANS = Path(__file__).parents[2] / "benchmarks" / "plans"
BAND = 0.005
TRUNK = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters "
MICRO = TRUNK + "batch.micro_sequences=4 "
BLOCK = "techniques.torch_compile.scope=block "
LONG = (
    "-torch_compile +full_checkpoint -fused_cross_entropy +chunked_cross_entropy +chunked_mlp "
    "techniques.chunked_cross_entropy.chunk_tokens=4096 techniques.chunked_mlp.chunk_tokens=32768 "
    "data.sequence_length=262144 batch.tokens=262144"
)

MEASURED = [
    ("160m", TRUNK + "+full_checkpoint", 28959468032),
    ("160m", TRUNK + "+fused_cross_entropy", 34026330624),
    ("160m", TRUNK + "+fused_rms_norm", 52833196544),
    ("1b", MICRO + "+sliding_window", 80088110592),
    ("1b", MICRO, 79551239680),
    ("1b", BLOCK + "+chunked_mlp", 42020370944),
    ("1b", BLOCK + "+float8_linear", 61347797504),
    ("160m", TRUNK + "+linear_attention", 65175087104),
    ("160m", TRUNK + "+prefix_lm", 58571398144),
    ("160m", TRUNK + "+selective_checkpoint", 42687437312),
    ("160m", BLOCK + "+selective_checkpoint", 20118806016),
    (
        "1b",
        MICRO + "+memory_budget techniques.torch_compile.scope=block +torch_compile",
        34532709888,
    ),
    ("1b", MICRO + "+full_checkpoint", 50994304512),
    ("1b", BLOCK + "-fused_cross_entropy", 69803440640),
    ("1b", BLOCK + "-fused_swiglu", 69937658368),
    ("1b", BLOCK + "+activation_offload", 30113790464),
    ("160m", TRUNK + "+torch_compile", 28191791616),
    ("160m", TRUNK, 55350172160),
    ("160m", TRUNK + "+z_loss", 72530567168),
    ("160m", BLOCK + "+liger_kernels -fused_swiglu", 28076318208),
    ("160m", BLOCK + "+linear_attention -cudnn_attention", 36778071552),
    ("160m", BLOCK, 28179602944),
    ("160m", BLOCK + "+memory_budget", 15248027136),
    ("1b", BLOCK + "+z_loss -fused_cross_entropy", 77683915776),
    ("1b", MICRO + "+bf16_parameters", 77082892800),
    ("1b", BLOCK, 69939755520),
    ("1b", BLOCK + "+memory_budget", 46780889600),
    ("160m", TRUNK + "+activation_offload", 30216198656),
    ("160m", TRUNK + "+chunked_cross_entropy", 29969131008),
    ("160m", TRUNK + "+chunked_mlp", 42353334784),
    ("160m", BLOCK + "-bf16_parameters", 28389972480),
    ("160m", BLOCK + "-fused_cross_entropy", 28074745344),
    ("160m", BLOCK + "-torch_compile", 30591327744),
    ("160m", BLOCK + "+chunked_cross_entropy -fused_cross_entropy", 24118209024),
    ("1b", LONG, 51708255232),
    ("7b", "+selective_checkpoint batch.micro_sequences=2", 133401909760),
]
"""shape, changes of its plan, bytes"""


def plan_of(shape: str, changes: str) -> Plan:
    """The shape's plan with changes; what is added is not left out."""
    words = changes.split()
    words = [w for w in words if not (w[0] == "-" and f"+{w[1:]}" in words)]
    return Plan.read(
        (PLANS / f"{shape}.toml").read_text(), house.CATALOGUE,
        overrides=[w for w in words if w[0] not in "+-"],
        with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "changes", "measured"), MEASURED)
def test_the_peak_is_what_an_h200_measured(shape: str, changes: str, measured: int) -> None:
    plan = plan_of(shape, changes)
    ledger = predict(plan, house.context_on("cuda", plan))
    assert ledger.peak()[1] == pytest.approx(measured, rel=BAND)
