"""Define the words of the doctor: names of bottlenecks that findings and techniques share.

A technique's `symptoms` are such words, so the doctor can list it as a remedy without knowing it. A
word may name a part of a bottleneck after a colon, as in `memory capacity:logits`. The technique
then acts on that part. A technique whose word has no part acts on the whole bottleneck.
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
    "interconnect": ("gathers",),
    "straggler": (),
    "pipeline imbalance": (),
    "wrong layout": (),
    "input": (),
    "wasted tokens": (),
    "instability": (),
    "forgetting": (),
    "overfitting": (),
    "chat template": (),
    "recipe": (),
    "silent no-op": (),
    "computation": ("attention", "products", "blocks"),
}
"""Bottleneck -> its parts. `computation` is for what lessens FLOPs or raises their rate, `recipe`
for what reaches a loss in fewer tokens, and `launch:compilation` for steps that compile
repeatedly, `interconnect:gathers` for weights that are gathered more than once a step, `forgetting`
for what keeps what given weights know, and `overfitting` for what keeps a model from learning its
text by heart."""
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
"""Names of changes to a training loop that is not Headrace's. A technique that does the same lists
them in its `loop_changes`, so the doctor of such a loop can point to it without knowing it."""
PAID = frozenset({"memory capacity:activations", "memory capacity:optimizer"})
"""Symptoms of techniques that trade time for memory. A technique whose symptoms are all among these
buys nothing else."""


def parse(symptom: str) -> tuple[str, str]:
    """Return the bottleneck and the part of a word; the part is "" where the word names none.

    Raises:
        ValueError: there is no such word; the message lists those that there are.
    """
    bottleneck, colon, part = symptom.partition(":")
    if bottleneck not in BOTTLENECKS:
        raise ValueError(f"{symptom!r} is none of the doctor's words: {', '.join(BOTTLENECKS)}")
    if colon and part not in (parts := BOTTLENECKS[bottleneck]):
        raise ValueError(f"{symptom!r}: {bottleneck} has the parts {', '.join(parts) or 'none'}")
    return bottleneck, part


def names(symptoms: Iterable[str], bottleneck: str) -> bool:
    """Return whether one of the symptoms is of the bottleneck."""
    return any(symptom.partition(":")[0] == bottleneck for symptom in symptoms)


def saves_memory(symptoms: Iterable[str]) -> bool:
    """Return whether a technique with these symptoms trades time for memory.

    It is false where the technique buys anything else.
    """
    return set() < {*symptoms} <= PAID
