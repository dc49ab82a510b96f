"""Define the workloads that faults are planted into: small plans for a CPU, larger for a GPU.

A CPU's have steps of some ten milliseconds and are over in seconds; a GPU's go from 30M to 1.2B
parameters, and record a trace of a few steps. They differ in depth, width, length, batch and
techniques, so that a threshold which fits one of them only is found out. UNSEEN were written beside
the doctor's thresholds and never run to set one.

On a GPU a run is healthy only while its host is ahead. Compiled by blocks, an H200's host took 3 ms
to issue one block's forward and backward pass (30M and 160M in one micro-batch, 160M in four), so
a micro-batch has so many tokens that the device needs 2.5 times as long by the planner's prediction
with probed rates: steps of 70 to 230 ms. Of UNSEEN that was predicted too, and nothing else. Of 24
steps two are warm and five are traced or behind a trace: 17 are steady, where 8 are judged.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """Describe a run that is healthy until a fault is planted into it.

    Args:
        name: in rows.
        device: "cpu" or "cuda".
        plan: TOML.
    """

    name: str
    device: str
    plan: str


SMALL = f"""
[data]
sources = "{Path(asyncio.__file__).parent}/*.py"
vocab = 512
sequence_length = LENGTH
[batch]
tokens = 2048
MORE_BATCH
[goal]
steps = 48
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 4
steps = 200
"""
LARGE = """
[data]
sequence_length = LENGTH
[batch]
tokens = TOKENS
MORE_BATCH
[goal]
steps = 24
[optimizer]
lr = 3e-4
[schedule]
warmup_steps = 4
steps = 400
[techniques.cudnn_attention]
[trace]
every_steps = 100
steps = 2
"""
COMMON = """
name = "{name}"
device = "{device}"
guard = false
[eval]
every_steps = 100000
tokens = 2048
[checkpoint]
every_steps = 0
[model]
{model}
"""


def _make(
    name: str,
    device: str,
    model: str,
    *,
    length: int,
    tokens: int = 32768,
    batch: str = "",
    more: str = "",
) -> Workload:
    body = SMALL if device == "cpu" else LARGE.replace("TOKENS", str(tokens))
    body = body.replace("LENGTH", str(length))
    head = COMMON.format(name=name, device=device, model=model.replace(", ", "\n"))
    return Workload(name, device, head + body.replace("MORE_BATCH", batch) + more)


BLOCKS = '[techniques.torch_compile]\nscope = "block"\n'
LEAN = f"{BLOCKS}[techniques.fused_swiglu]\n[techniques.fused_cross_entropy]\n"
MIXED = "[techniques.mixture_of_experts]\nexperts = 4\ntop_k = 2\n"
VARIANTS = {
    "plain": (),
    "clipped": ("optimizer.clip_norm=0.1",),
    "packed": ("techniques.document_packing={}",),
    "evaluated": ("eval.every_steps=4",),
    "saved": ("checkpoint.every_steps=8",),
    "resumed": ("checkpoint.every_steps=16",),
    "scaled": ("model.precision=fp16", "techniques.fp16_loss_scaling={}"),
    "autocast": ("model.precision=bf16", "techniques.bf16_autocast={}"),
    "adapters": ("techniques.lora={rank = 8}", "optimizer.lr=3e-4"),
    "accumulated": ("batch.micro_sequences=4",),
    "long": ("goal.steps=120",),
    "short": ("goal.steps=14",),
    "gentle": ("optimizer.lr=3e-5", "schedule.warmup_steps=0"),
    "compiled": ('techniques.torch_compile={scope = "block", backend = "aot_eager"}',),
    "dropped": ("techniques.stochastic_depth={rate = 0.2}",),
    "growing": ("techniques.sequence_length_schedule={start = 16}",),
    "small_batches": ("batch.tokens=256", "batch.micro_sequences=0", "goal.steps=150"),
}
"""What a healthy run may have beside its workload: name -> overrides. One that is resumed is
trained to its half first. None trades time for memory that is free, which is a fault."""
NOT_ON_GPU = (
    "packed",
    "accumulated",
    "long",
    "short",
    "compiled",
    "growing",
    "saved",
    "resumed",
    "small_batches",
)
"""Variants that are left out on a GPU: cuDNN's attention refuses documents, four rows leave the
device waiting for the host, each new length recompiles, and checkpoints of 1B parameters fill
the disk."""


def variants(device: str) -> list[str]:
    """Return the names of the variants of a device."""
    return [name for name in VARIANTS if device == "cpu" or name not in NOT_ON_GPU]


TIED = "[techniques.tied_embeddings]\n[techniques.z_loss]\n"
UNSEEN = ("cpu_tied", "cpu_muon", "gpu_90m_deep", "gpu_600m_muon")
WORKLOADS = {
    workload.name: workload
    for workload in (
        _make("cpu_dense", "cpu", "dim = 96, layers = 3, heads = 3, ffn = 256", length=64),
        _make(
            "cpu_packed",
            "cpu",
            "dim = 64, layers = 4, heads = 2, ffn = 192",
            length=128,
            more="[techniques.document_packing]\n",
        ),
        _make(
            "cpu_accumulated",
            "cpu",
            "dim = 128, layers = 2, heads = 4, ffn = 320",
            length=32,
            batch="micro_sequences = 8",
        ),
        _make(
            "cpu_experts",
            "cpu",
            "dim = 64, layers = 2, heads = 2, ffn = 128",
            length=64,
            more=MIXED,
        ),
        _make("cpu_wide", "cpu", "dim = 192, layers = 1, heads = 4, ffn = 512", length=64),
        _make(
            "cpu_tied", "cpu", "dim = 80, layers = 5, heads = 5, ffn = 208", length=32, more=TIED
        ),
        _make(
            "cpu_muon",
            "cpu",
            "dim = 112, layers = 2, heads = 7, kv_heads = 1, ffn = 288",
            length=128,
            batch="micro_sequences = 8",
            more="[techniques.muon]\n",
        ),
        _make(
            "gpu_30m",
            "cuda",
            "dim = 512, layers = 6, heads = 8, ffn = 1408, vocab = 16384",
            length=1024,
            tokens=131072,
            more=LEAN,
        ),
        _make(
            "gpu_160m",
            "cuda",
            "dim = 768, layers = 12, heads = 12, ffn = 2048, vocab = 32768",
            length=2048,
            tokens=65536,
            more=LEAN,
        ),
        _make(
            "gpu_160m_accumulated",
            "cuda",
            "dim = 1024, layers = 8, heads = 16, ffn = 2816, vocab = 32768",
            length=1024,
            tokens=98304,
            batch="micro_sequences = 48",
            more=BLOCKS,
        ),
        _make(
            "gpu_400m_long",
            "cuda",
            "dim = 1280, layers = 16, heads = 20, kv_heads = 4, ffn = 3456, vocab = 32768",
            length=4096,
            more=LEAN,
        ),
        _make(
            "gpu_1b",
            "cuda",
            "dim = 2048, layers = 16, heads = 32, kv_heads = 8, ffn = 8192, vocab = 65536",
            length=2048,
            tokens=16384,
            more=LEAN,
        ),
        _make(
            "gpu_90m_deep",
            "cuda",
            "dim = 512, layers = 24, heads = 8, ffn = 1408, vocab = 16384",
            length=512,
            tokens=131072,
            more=BLOCKS + TIED,
        ),
        _make(
            "gpu_600m_muon",
            "cuda",
            "dim = 1536, layers = 16, heads = 12, kv_heads = 4, ffn = 4096, vocab = 32768",
            length=2048,
            more=LEAN + "[techniques.muon]\n",
        ),
    )
}
"""Maps the name of each workload to the workload."""
