"""Compile the model into fused kernels with torch.compile.

Eager torch launches one kernel per operation, and each reads and writes its tensors in device
memory. The compiler fuses work by element into few kernels, and plans what the backward pass keeps.
`fullgraph` makes a graph break an error: a break is time that one should know about. `scope=model`
lets the compiler see across blocks; `scope=block` compiles one block and reuses it for all, which
starts sooner. Source: PyTorch 2 (ASPLOS 2024, doi 10.1145/3620665.3640366).
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from headrace.core.ledger import Ledger
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.sockets import Build

FUSED_LINES = ("norm", "attention_input", "qk_norm", "activation", "weight_cast")


class TorchCompile(Technique[Build]):
    """Compile the model into fused kernels with torch.compile."""

    scope: Literal["model", "block"] = "model"
    """One graph of all blocks, or one block's graph reused for all."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """The code generator; the others only trace, for tests."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How long inductor searches for kernels."""
    fullgraph: bool = True
    """A graph break is an error."""

    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    composes: ClassVar[tuple[str, ...]] = ("block_forward", "compiled", "runtime")
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth", "launch")
    card: ClassVar[Card] = Card(
        buys="fewer kernels and fewer bytes moved between matrix products (derived)",
        costs="seconds to minutes before the first step, and again for each new shape",
        helps="GPUs, above all where work by element and launches take a large share",
        hurts="short runs, many shapes, and CPUs whose eager kernels are as fast",
        source="doi 10.1145/3620665.3640366",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Inductor needs Triton on a GPU and a C++ compiler on a CPU."""
        on = context.plan.techniques.values() if context.plan else ()
        sharding = [t.name() for t in on if "shard" in t.composes]
        if self.scope == "model" and sharding:
            return Unsupported(
                f"{sharding[0]} gathers each block's weights between the blocks, which one graph "
                "of all blocks cannot hold",
                f"techniques.{self.name()}.scope=block",
            )
        if self.backend != "inductor":
            return Supported()
        if context.device == "cuda" and not context.has_triton:
            return Unsupported("inductor needs Triton on a GPU", "pip install triton")
        if context.device == "cpu" and not context.has_compiler:
            return Unsupported("inductor needs a C++ compiler on a CPU", "install g++ or clang++")
        if context.device == "mps":
            return Unsupported("inductor on Apple GPUs is not proven here", "device=cpu")
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """What fusion recomputes is not kept, and logits are not held in fp32."""
        if self.backend != "inductor":
            return ledger
        logits = ledger.memory["logits"]
        fused = min(logits.bytes, ledger.sizes["logits_fused"])
        return ledger.with_line("logits", replace(logits, bytes=fused)).without(
            n for n, v in ledger.memory.items()
            if v.layer is not None and n.split("/")[1] in FUSED_LINES and not v.opaque
        )  # fmt: skip

    def apply(self, build: Build) -> None:
        """Compile blocks or the whole trunk, and the head where it can be.

        A build starts from nothing: what an earlier one in this process compiled would serve this
        one too, and be no evidence for it.
        """
        torch.compiler.reset()
        model, how = build.model, self._how()
        if self.scope == "block":
            build.wrap_blocks(self.name(), lambda forward, layer: torch.compile(forward, **how))
            build.compiled.append("blocks")
        else:
            model.states = torch.compile(model.states, **how)  # type: ignore[method-assign]
            build.compiled.append("blocks")
        if model.head is not None and model.head.compilable:
            model.loss = torch.compile(model.loss, **how)  # type: ignore[method-assign]
            build.compiled.append("loss")
        elif model.head is not None:
            model.head.compile_inside(lambda function: torch.compile(function, **how))
        build.runtime.append(_keep_side_effects)
        build.notes[self.name()] = _graphs()

    def _how(self) -> dict[str, Any]:
        how: dict[str, Any] = {
            "backend": self.backend, "fullgraph": self.fullgraph, "dynamic": False,
        }  # fmt: skip
        return how | ({"mode": self.mode} if self.backend == "inductor" else {})

    def active(self, build: Build) -> Evidence:
        """Graphs that were made since, and breaks between them."""
        graphs, breaks = (now - was for now, was in zip(
            _graphs(), build.notes[self.name()], strict=True))  # fmt: skip
        return Evidence(
            active=graphs > 0 and not (self.fullgraph and breaks),
            detail=f"{graphs} graphs of {' and '.join(build.compiled)}, {breaks} graph breaks",
            numbers={"graphs": graphs, "graph_breaks": breaks},
        )


def _keep_side_effects() -> AbstractContextManager[Any]:
    """Let a checkpointed block keep what `auxiliary` reads; a tracer would refuse it otherwise.

    Recomputing the block does not keep it again, and nobody reads it then.
    """
    from torch._dynamo import config

    return config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


def _graphs() -> tuple[int, int]:
    """Graphs and graph breaks of this process so far, by torch's own counters."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
