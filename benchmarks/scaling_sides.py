"""Name the sides that scaling.py measures: a plan's changes for so many GPUs, and what they face.

Weak scaling: every GPU has as many tokens as one GPU has alone, so that a side of `n` GPUs has a
batch `n` times as large. The words of a side may hold `{n}`, the number of GPUs, and
`{half}`, half of it.
"""

from dataclasses import dataclass

import receipts

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import parse
from headrace.plan.plan import Plan

EXACT = "-bf16_parameters "
"""Weights in fp32, for what refuses matrices in bf16; products are in bf16 by autocast."""
CAST = f"{EXACT}+fsdp techniques.fsdp.gather=bf16 "
"""Slices in fp32 that are cast for each gather, for what needs such weights."""
FSDP = "+fsdp "
FSDP8 = "+fsdp techniques.fsdp.gather=fp8 "
FP8 = "+float8_linear "
LARGE = (
    "+bf16_parameters +torch_compile techniques.torch_compile.scope=block +cudnn_attention "
    "+fused_swiglu "
)
"""The recipe of the shape 1b for 8b, whose file is a plain one, without its loss."""
LONG = (
    f"-torch_compile {FSDP}+full_checkpoint -fused_cross_entropy +chunked_cross_entropy "
    "techniques.chunked_cross_entropy.chunk_tokens=4096 +chunked_mlp "
    "techniques.chunked_mlp.chunk_tokens=8192 +activation_offload "
)
TINY = 256
"""Times that rows and batches are smaller in a dry run."""
TINY_KEEPS = (
    "fsdp",
    "zero",
    "data_parallel",
    "tensor_parallel",
    "context_parallel",
    "ulysses",
    "expert_parallel",
    "mixture_of_experts",
    "pipeline_parallel",
    "muon",
    "full_checkpoint",
)
"""Techniques that a dry run keeps; others are for GPUs, or for sizes that it has not."""


@dataclass(frozen=True)
class Side:
    """Hold what one side of the comparison runs.

    Args:
        name: its name in rows.
        words: changes of the shape's plan.
        shape: the name of a plan in plans/.
        ranks: GPUs that it takes; 0 means all.
        length: tokens of a row; 0 means the plan's.
        tokens: tokens of a step for each GPU; 0 means the plan's batch.
        against: sides of the same round that its tokens per second and GPU are divided by.
        once: it is read in the first round only.
        brief: tokens of a brief first step, for a row that is too long to be run twice; else 0.
        peer: a peer's name in peers.py, in the place of Headrace; it takes mesh, rows, fp8 and
            asynchronous tensor parallelism from the plan.
        saves: saves of the whole state beside which its steps are timed; else 0.
    """

    name: str
    words: str = ""
    shape: str = "1b"
    ranks: int = 0
    length: int = 0
    tokens: int = 0
    against: tuple[str, ...] = ("one",)
    once: bool = False
    brief: int = 0
    peer: str = ""
    saves: int = 0

    def plan(self, ranks: int, more: list[str], *, tiny: bool) -> Plan:
        """Return the plan of this side.

        Args:
            ranks: GPUs of the machine.
            more: overrides over all others.
            tiny: shrink the model, the rows and the batch for a dry run.

        Raises:
            ConfigError: the changes contradict each other, or do not divide.
        """
        n, divisor = self.ranks or ranks, TINY if tiny else 1
        path = receipts.plan_file("tiny" if tiny else self.shape)
        text, known = path.read_text(), catalogue()
        base = Plan.read(receipts.plan_file(self.shape).read_text(), known)
        length = max(8 * n, (self.length or base.data.sequence_length) // divisor)
        tokens = (self.tokens or base.batch.tokens) // divisor
        words = self.words.format(n=n, half=max(1, n // 2)).split()
        if tiny:
            words = [*filter(_is_kept, words), "model.vocab=4096", "device=cpu"]
        sizes = [
            f"data.sequence_length={length}",
            f"batch.tokens={max(1, n * tokens // length) * length}",
        ]
        changes = parse([*sizes, *words])
        return changes.plan(text, known, more)


def _is_kept(word: str) -> bool:
    if word.startswith("techniques."):
        _, name, key = word.split(".", 2)
        of_gpus = key.endswith(("bf16", "fp8")) or key.startswith("asynchronous")
        return name in TINY_KEEPS and not of_gpus
    return word[1:] in TINY_KEEPS if word[0] in "+-" else True


TENSOR = "+tensor_parallel mesh.tensor={n}"
ASYNC = f"{TENSOR} techniques.tensor_parallel.asynchronous=true"
RING = "+context_parallel mesh.context={n} "
SHARDED = f"{LARGE}{FSDP}mesh.data={{n}} "
FUSED_LOSS = "+fused_cross_entropy"
EXPERTS = "-fused_swiglu +mixture_of_experts "
"""Eight experts of half the features, of which each token takes two: the same products."""
HALF = "+selective_checkpoint techniques.selective_checkpoint.every=2 "


def of_8b(
    name: str,
    words: str = "",
    rows: int = 1,
    peer: str = "",
) -> Side:
    """Return a side of 8b with `rows` rows of 8,192 tokens for each GPU."""
    against = () if name == "8b" else ("8b",)
    return Side(
        name,
        words,
        "8b",
        length=8192,
        tokens=8192 * rows,
        against=against,
        peer=peer,
    )


SIDES = (
    Side("one", ranks=1, against=()),
    Side("one_float8", FP8, ranks=1, against=()),
    Side("fsdp", f"{FSDP}mesh.data={{n}}"),
    Side("titan_fsdp", f"{FSDP}mesh.data={{n}}", peer="torchtitan", against=("one", "fsdp")),
    Side(
        "titan_fsdp_float8",
        f"{FSDP8}{FP8}mesh.data={{n}}",
        peer="torchtitan",
        against=("one_float8", "fsdp_float8", "fsdp_float8_gathered"),
    ),
    Side("titan_tensor", TENSOR, peer="torchtitan", against=("tensor", "tensor_async")),
    Side("titan_tensor_async", ASYNC, peer="torchtitan", against=("tensor", "tensor_async")),
    Side("replicas", "+data_parallel mesh.data={n}", against=("one", "fsdp")),
    Side("fsdp_float8", f"{FSDP}{FP8}mesh.data={{n}}", against=("one_float8",)),
    Side(
        "fsdp_float8_gathered",
        f"{FSDP8}{FP8}mesh.data={{n}}",
        against=("one_float8", "fsdp_float8"),
    ),
    Side("zero1", "+zero mesh.data={n}"),
    Side("tensor", TENSOR, against=("one", "fsdp")),
    Side("tensor_async", ASYNC, against=("one", "fsdp", "tensor")),
    Side("fsdp_8k", f"{FSDP}mesh.data={{n}}", length=8192, against=()),
    Side("context_8k", f"{FSDP}{RING}", length=8192, against=("fsdp_8k",)),
    Side("ulysses_8k", f"{FSDP}+ulysses mesh.context={{n}}", length=8192, against=("fsdp_8k",)),
    Side(
        "fsdp_64k",
        f"{FSDP}+selective_checkpoint -fused_cross_entropy +chunked_cross_entropy "
        "techniques.chunked_cross_entropy.chunk_tokens=8192 mesh.data={n}",
        length=65536,
        tokens=65536,
        against=(),
    ),
    Side("context_64k", f"{FSDP}{RING}", length=65536, against=("fsdp_64k",)),
    Side("ulysses_64k", f"{FSDP}+ulysses mesh.context={{n}}", length=65536, against=("fsdp_64k",)),
    Side(
        "pipeline",
        "+pipeline_parallel techniques.pipeline_parallel.schedule=interleaved "
        "techniques.pipeline_parallel.chunks=2 mesh.pipeline={n} batch.micro_sequences=1",
        against=("one", "fsdp"),
    ),
    Side("muon_fsdp", f"{CAST}+muon mesh.data={{n}}", against=("fsdp", "fsdp_cast")),
    Side(
        "muon_fsdp_symmetric",
        f"{CAST}+muon techniques.muon.symmetric_matmuls=true mesh.data={{n}}",
        against=("fsdp", "fsdp_cast", "muon_fsdp"),
    ),
    Side(
        "muon_fsdp_fraction",
        f"{CAST}+muon techniques.muon.fraction=0.25 mesh.data={{n}}",
        against=("fsdp", "fsdp_cast", "muon_fsdp"),
    ),
    Side("fsdp_cast", f"{CAST}mesh.data={{n}}", against=("one", "fsdp")),
    Side("experts_whole", f"{FSDP}{EXPERTS}mesh.data={{n}}", against=()),
    Side(
        "experts",
        f"{FSDP}{EXPERTS}+expert_parallel mesh.data={{n}} mesh.expert={{n}}",
        against=("experts_whole",),
    ),
    Side("one_fp32", EXACT, ranks=1, against=("one",)),
    Side("replicas_fp32", f"{EXACT}+data_parallel mesh.data={{n}}", against=("one", "one_fp32")),
    Side("fsdp_kept", f"{FSDP}techniques.fsdp.reshard=false mesh.data={{n}}", against=("fsdp",)),
    Side("save_one", ranks=1, against=(), once=True, saves=3),
    Side("save", f"{FSDP}mesh.data={{n}}", against=(), once=True, saves=3),
    of_8b("8b", f"{SHARDED}{HALF}{FUSED_LOSS}"),
    of_8b("8b_float8", f"{SHARDED}{HALF}{FUSED_LOSS} {FP8}"),
    of_8b("8b_rows2", f"{SHARDED}+selective_checkpoint {FUSED_LOSS}", rows=2),
    of_8b("8b_rows2_float8", f"{SHARDED}+selective_checkpoint {FUSED_LOSS} {FP8}", rows=2),
    of_8b("8b_rows2_half", f"{SHARDED}{HALF}{FUSED_LOSS}", rows=2),
    of_8b("8b_rows2_half_float8", f"{SHARDED}{HALF}{FUSED_LOSS} {FP8}", rows=2),
    of_8b("8b_whole", f"{SHARDED}{FUSED_LOSS}"),
    of_8b("8b_whole_float8", f"{SHARDED}{FUSED_LOSS} {FP8}"),
    of_8b(
        "8b_tensor2",
        f"{SHARDED}mesh.data={{half}} {HALF}+tensor_parallel mesh.tensor=2 {FUSED_LOSS}",
    ),
    of_8b("titan_8b", "+fsdp mesh.data={n}", peer="torchtitan"),
    Side("context_128k", f"{FSDP}{RING}", length=131072, against=("one_128k",)),
    Side(
        "one_128k",
        LONG.replace(FSDP, ""),
        ranks=1,
        length=131072,
        tokens=1,
        against=(),
        once=True,
        brief=4096,
    ),
    *(
        Side(
            f"long_{name}",
            f"{LONG}{RING}",
            length=length,
            tokens=1,
            against=("one_128k",),
            once=True,
            brief=16384,
        )
        for name, length in {"128k": 2**17, "512k": 2**19, "1m": 2**20, "2m": 2**21}.items()
    ),
)
"""All sides."""
FEW = (
    *("one", "fsdp", "one_float8", "fsdp_float8", "fsdp_float8_gathered", "tensor"),
    *("tensor_async", "replicas", "titan_fsdp", "fsdp_8k", "context_8k", "pipeline", "zero1"),
    *(
        "titan_fsdp_float8",
        "titan_tensor",
        "titan_tensor_async",
        "muon_fsdp",
        "muon_fsdp_symmetric",
        "muon_fsdp_fraction",
        "fsdp_64k",
        "context_64k",
        "ulysses_8k",
        "ulysses_64k",
        "save",
        "one_fp32",
    ),
    *("replicas_fp32", "fsdp_kept", "fsdp_cast", "experts_whole", "experts"),
)
"""The sides of two GPUs, by their importance."""
MANY = (
    *("one", "fsdp", "8b", "8b_float8", "long_1m", "one_128k", "long_128k", "context_128k"),
    *(
        "titan_8b",
        "one_float8",
        "fsdp_float8",
        "8b_rows2",
        "8b_tensor2",
        "save",
        "replicas",
        "long_2m",
    ),
)
"""The sides of more GPUs. A row of a million tokens takes four H100s three minutes."""
