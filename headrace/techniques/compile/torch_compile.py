"""Compile the model into fused kernels with torch.compile.

Eager torch launches one kernel per operation, and each reads and writes its tensors in device
memory. The compiler fuses work by element into few kernels, and plans what the backward pass keeps.
`fullgraph` makes a graph break an error: a break is time that one should know about. `scope=model`
lets the compiler see across blocks; `scope=block` compiles one block and reuses it for all, which
starts sooner. Source: PyTorch 2 (ASPLOS 2024, doi 10.1145/3620665.3640366).
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.core.strict import Wrong
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import REGION
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class TorchCompile(Technique[Build]):
    """Compile the model into fused kernels with torch.compile."""

    scope: Literal["model", "block"] = "model"
    """What is one graph: all blocks, or one block whose graph all reuse."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """The code generator; all but inductor only trace, for tests."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How long inductor searches for kernels; what records CUDA graphs is `cuda_graphs`."""
    fullgraph: bool = True
    """Whether a graph break is an error."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    composes: ClassVar[tuple[str, ...]] = ("block_forward", "compiled", "runtime")
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth", "launch")
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("torch.compile",)
    settled: ClassVar[tuple[str, ...]] = ("backend", "fullgraph")
    card: ClassVar[Card] = Card(
        buys="fewer kernels and fewer bytes moved between matrix products (derived)",
        costs="seconds to minutes before the first step, and again for each new shape",
        helps="GPUs, above all where work by element and launches take a large share",
        hurts="short runs, many shapes, and CPUs whose eager kernels are as fast",
        source="doi 10.1145/3620665.3640366",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _no_graphs(cls, mode: Any) -> Any:
        """Send who asks for torch's CUDA graphs to the technique that records them."""
        if mode in ("reduce-overhead", "max-autotune"):
            left = "max-autotune-no-cudagraphs" if mode == "max-autotune" else "default"
            raise Wrong(
                f"{mode!r} is {left!r} with CUDA graphs, which are a technique of their own here: "
                f"cuda_graphs; write mode={left} and --with cuda_graphs",
                mend("+cuda_graphs", f"techniques.torch_compile.mode={left}"),
            )
        return mode

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support Triton on a GPU and a C++ compiler on a CPU, which inductor needs."""
        on = context.plan.techniques.values() if context.plan else ()
        sharding = [t.name() for t in on if "shard" in t.composes]
        if self.scope == "model" and sharding:
            return Unsupported(
                f"{sharding[0]} gathers each block's weights between the blocks, which one graph "
                "of all blocks cannot hold",
                mend(f"techniques.{self.name()}.scope=block"),
            )
        if self.backend != "inductor":
            return Supported()
        if context.device == "cuda" and not context.has_triton:
            return Unsupported(
                "inductor needs Triton on a GPU", "pip install triton", RefusalKind.PACKAGE
            )
        if context.device == "cpu" and not context.has_compiler:
            return Unsupported(
                "inductor needs a C++ compiler on a CPU",
                "install g++ or clang++",
                RefusalKind.PACKAGE,
            )
        if context.device == "mps":
            return Unsupported(
                "inductor on Apple GPUs is not proven here", mend("device=cpu"), RefusalKind.DEVICE
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep nothing that fusion recomputes, and no logits in fp32."""
        if self.backend != "inductor":
            return ledger
        sizes, ledger = ledger.sizes, ledger.reworked(lambda _, piece: piece.compiled())
        calls = sizes["layers"] if self.scope == "block" else 1.0
        ledger = ledger.with_host("compiled/calls", 1 + calls, REGION)  # and the loss
        for name, line in ledger.memory.items():
            kind = name.split("/")[1] if line.layer is not None else ""
            if kind == "down":  # the next block's input, which that one keeps
                ledger = ledger.without([name])
            else:
                kept = min(line.bytes, _kept(kind, line, ledger))
                if kind == "residual" and f"{line.layer}/norm" in ledger.memory:
                    # A stream in fp32 is kept once; its sum with attention's result is made again.
                    kept *= (1 + sizes["stream_bytes"] / sizes["activation_bytes"]) / 2
                ledger = ledger.with_line(name, replace(line, bytes=kept))
        final = ledger.memory.get("final_norm")
        if self.scope == "model" and final:  # it is compiled, and keeps its input as it is
            less = min(final.bytes, 2 * sizes["residual"])
            ledger = ledger.with_line("final_norm", replace(final, bytes=less))
        return self._compiled_head(ledger)

    def _compiled_head(self, ledger: Ledger) -> Ledger:
        """Keep logits as the matmul gives them; their gradient is written over them."""
        logits, sizes = ledger.memory.get("logits"), ledger.sizes
        if logits is None or "head_gradients" in ledger.memory:
            return ledger
        own = sizes["logits_fused"] / 3
        weights = Line(sizes["activation_bytes"] * sizes["embedding"], ("loss",))
        ledger = ledger.with_line("logits", replace(logits, bytes=min(logits.bytes, own)))
        ledger = replace(ledger, sizes={**sizes, "compiled_loss": 1.0})
        return ledger.with_line("head_gradients", weights)

    def apply(self, build: Build) -> None:
        """Compile blocks or the whole decoder, and the head where it can be.

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
        build.runtime.append(partial(_settings, _shapes(build.plan)))
        build.notes[self.name()] = _graphs()

    def _how(self) -> dict[str, Any]:
        how: dict[str, Any] = {
            "backend": self.backend,
            "fullgraph": self.fullgraph,
            "dynamic": False,
        }
        return how | ({"mode": self.mode} if self.backend == "inductor" else {})

    def active(self, build: Build) -> Evidence:
        """Read the graphs that were made since, and breaks between them."""
        graphs, breaks = (
            now - was for now, was in zip(_graphs(), build.notes[self.name()], strict=True)
        )
        return Evidence(
            active=graphs > 0 and not (self.fullgraph and breaks),
            detail=f"{graphs} graphs of {' and '.join(build.compiled)}, {breaks} graph breaks",
            numbers={"graphs": graphs, "graph_breaks": breaks},
        )


def _kept(kind: str, line: Line, ledger: Ledger) -> float:
    """Return the bytes of one of a block's lines that the partitioner keeps.

    It recomputes work by element where that costs no pass over memory of its own. A matmul's
    operand would have to be written a second time, so it is kept: results of norms and of the
    activation, rotated queries and keys, casts of weights. What lies between them is not kept. An
    8-bit matmul reads an operand that it casts itself, which is cast a second time; what an
    operation without parts made is kept as cast. Traced from torch's partitioner.
    """
    sizes = ledger.sizes
    stream, size = sizes.get("written", sizes["residual"]), sizes["activation_bytes"]
    wide = "mlp.gate_up" if "mlp.gate_up/in" in sizes else "mlp.up"
    if kind == "activation":
        if "mlp.down/fp8" in sizes:
            return line.bytes / size if line.opaque else 0.0
        return line.bytes if line.opaque or wide == "mlp.up" else line.bytes / 2
    if line.opaque:
        return line.bytes
    if kind == "norm":  # pieces of an MLP that run again have their input's norm run again
        reads = ("mixer.qkv/fp8" not in sizes) + (
            f"{wide}/fp8" not in sizes and "mlp_piece" not in ledger.memory
        )
        return reads * stream + 2 * FP32 * sizes["tokens"]
    if kind == "qk_norm":
        return FP32 * sizes["tokens"] * (sizes["heads"] + sizes["kv_heads"])
    if kind == "read":
        return line.bytes * size / FP32
    return line.bytes


def _shapes(plan: Any) -> int:
    """Return how many shapes micro-batches may have in the run.

    Where rows grow, their length doubles, and a batch that grows has others in each stage.
    """
    lengths = plan.data.sequence_length.bit_length() if plan.lengthening else 1
    return lengths * len(plan.batches.stages)


def _settings(shapes: int) -> AbstractContextManager[Any]:
    """Set the tracer up for the run.

    A checkpointed block may keep what `auxiliary` reads, which the tracer would refuse otherwise:
    recomputing the block does not keep it again, and nobody reads it then. And it makes as many
    graphs of a function for each shape as it makes of one by itself, before it gives up.
    """
    from torch._dynamo import config

    return config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        recompile_limit=config.recompile_limit * shapes,
    )


def _graphs() -> tuple[int, int]:
    """Return graphs and graph breaks of this process so far, by torch's own counters."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
