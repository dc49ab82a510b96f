"""Define the doctor's words: what can hold a run up, by names that findings and techniques share.

A technique's `symptoms` are such words, so that the doctor can list it as a remedy without knowing
it. A word may name a part behind a colon, as in `memory capacity:logits`: of that bottleneck, what
the technique acts on. A word without one acts on all of it.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

BOTTLENECKS: Mapping[str, tuple[str, ...]] = {
    "memory capacity": ("activations", "logits", "parameters", "gradients", "optimizer"),
    "fragmentation": (),
    "unused memory": (),
    "memory bandwidth": ("attention", "elementwise", "logits", "optimizer"),
    "kernel efficiency": ("attention", "elementwise", "convolution"),
    "launch": ("compilation",),
    "interconnect": (),
    "straggler": (),
    "input": (),
    "wasted tokens": (),
    "instability": (),
    "recipe": (),
    "silent no-op": (),
    "computation": ("attention", "products", "blocks"),
}
"""bottleneck -> its parts. `computation` is what lessens FLOPs or raises their rate; `recipe` what
comes to a loss in fewer tokens; `launch:compilation` steps that compile again."""
LoopChange = Literal[
    "8-bit states",
    "Liger kernels",
    "bf16 autocast",
    "few shapes",
    "kept compiled code",
    "log-sum-exp penalty",
    "pinned copies",
    "recomputed blocks",
    "recorded graphs",
    "smaller micro-batches",
    "tf32 matmuls",
    "torch.compile",
]
"""Changes of a training loop that is not Headrace's. A technique that does the same names them in
its `loop_changes`, so that the doctor of such a loop can point to it without knowing it."""
PAID = frozenset({"memory capacity:activations", "memory capacity:optimizer"})
"""What a technique is a remedy for, and nothing else, that gives time for memory."""


def parse(symptom: str) -> tuple[str, str]:
    """A word's bottleneck and part; the part is empty where it names none.

    Raises:
        ValueError: there is no such word; with those that there are.
    """
    bottleneck, colon, part = symptom.partition(":")
    if bottleneck not in BOTTLENECKS:
        raise ValueError(f"{symptom!r} is none of the doctor's words: {', '.join(BOTTLENECKS)}")
    if colon and part not in (parts := BOTTLENECKS[bottleneck]):
        raise ValueError(f"{symptom!r}: {bottleneck} has the parts {', '.join(parts) or 'none'}")
    return bottleneck, part


def names(symptoms: Iterable[str], bottleneck: str) -> bool:
    """Whether one of these words is that bottleneck's."""
    return any(symptom.partition(":")[0] == bottleneck for symptom in symptoms)


def saves_memory(symptoms: Iterable[str]) -> bool:
    """Whether a technique with these words trades time for memory, and buys nothing else."""
    return set() < {*symptoms} <= PAID
