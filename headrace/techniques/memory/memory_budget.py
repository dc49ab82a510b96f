"""Let the compiler keep a fraction of the activations that it would, and recompute the cheapest.

The compiler cuts a traced step into a forward and a backward graph, and what crosses the cut is
kept. By itself it cuts where the step is fastest. With a budget it keeps at most `fraction` of that
cut's bytes beyond the graph's inputs: it gives up results that are cheap per byte, work by element
first, then thin products, then attention, by solving a knapsack over the work of each. So there is
one number to turn instead of a list of operations, and it holds for any model that compiles.

With `torch_compile.scope=block` the inputs that are kept anyway are each block's; with scope=model
they are the token ids alone, and the fraction is of everything. Fewer bytes need another graph, so
every change compiles anew. What is left out: a budget for each part of the model
(`torch.autograd.graph.region_activation_memory_budget`, torch 2.13), and measured instead of
counted work. Source: torch._functorch.config.activation_memory_budget; PyTorch's "Current and new
activation checkpointing techniques" (2025).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.count import baseline_ledger
from headrace.costs.ledger import Ledger, Line
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

COMPILED = "CompiledFunctionBackward"
"""Autograd's name of a compiled graph's node."""
PARTITIONED = ("inductor", "aot_eager")
"""Backends whose graphs are cut by the partitioner that reads the budget."""
REMADE = ("norm", "activation", "weight_cast")
"""A block's lines that any budget under 1 gives up, unless one operation made them."""
PINNED = "it says itself what a block keeps, so nothing is left for the budget to choose "


class MemoryBudget(Technique[Build]):
    """Let the compiler keep a fraction of the activations that it would, recompute the cheapest."""

    fraction: float = Field(default=0.5, gt=0, le=0.99)
    """Bytes kept over those of the fastest cut, beyond the graph's inputs; 1 would be the
    compiler's own choice, as without this technique; tuner range 0.2 to 0.9."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.GATE
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    excludes: ClassVar[Mapping[str, str]] = {
        "full_checkpoint": PINNED + "(torch._functorch.partitioners, recompute tags)",
        "selective_checkpoint": PINNED + "(torch._functorch.partitioners, recompute tags)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations",)
    card: ClassVar[Card] = Card(
        buys="1 - fraction of the activations that compiled code keeps (derived)",
        costs="the work of what is not kept: by element first, then products and attention",
        helps="compiled runs that miss the memory by some tens of percent",
        hurts="compiled runs that fit: they keep no more than is fast already",
        source="torch._functorch.config.activation_memory_budget",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require compiled code whose graphs are cut by torch's min-cut partitioner."""
        on = context.plan.techniques.values() if context.plan else ()
        compiling = [t for t in on if "compiled" in t.composes]
        if not compiling:
            return Unsupported(
                "the budget is the compiler's, and nothing is compiled",
                mend("+torch_compile"),
                RefusalKind.COMBINATION,
            )
        backend = getattr(compiling[0], "backend", PARTITIONED[0])
        if backend not in PARTITIONED:
            return Unsupported(
                f"backend = {backend!r} leaves it to autograd what is kept",
                mend(f"techniques.{compiling[0].name()}.backend={PARTITIONED[0]}"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep what the partitioner's knapsack keeps of a block; add the work of the rest."""
        sizes = ledger.sizes
        # Of a pipeline's rank each block is held once for each micro-batch in flight.
        blocks = {v.layer for v in ledger.memory.values() if v.layer is not None}
        each, lost, recomputed = 1 / max(1, len(blocks)), 0.0, 0.0
        rerun_share: dict[str, float] = {}
        for layer in blocks:
            block = {n.split("/")[1]: v for n, v in ledger.memory.items() if v.layer == layer}
            if "residual" not in block:  # sent to the host
                continue
            keeps, work, gone = _kept_of(block, sizes, self.fraction)
            recomputed += work * each * sizes["layers"]
            for name in gone:
                rerun_share[name] = rerun_share.get(name, 0.0) + each
            for name, line in block.items():
                left = keeps.get(name, 0.0)
                lost += line.bytes - left
                ledger = ledger.without([f"{layer}/{name}"])
                if left:
                    ledger = ledger.with_line(f"{layer}/{name}", replace(line, bytes=left))
        ledger = ledger.with_line("recompute", Line(lost * each, ("turn", "backward")))

        def share(piece: str) -> float:
            """Return the share of a forward piece's kernels that run again.

            Matmuls go by name, and work by element runs again as a whole.
            """
            name = piece.partition("/")[0]
            if name in ("offload", "mlp.down"):
                return 0.0
            return rerun_share.get(name, 0.0) if name == "attention" or "." in name else 1.0

        ledger = ledger.recompute(share).with_flops("recompute", recomputed)
        # The loss is a graph of its own, whose largest result are the logits.
        head = ("head/result", "loss/forward") if sizes.get("compiled_loss") else ()
        more = {
            f"{n}/again": replace(ledger.work[n], phase="recompute")
            for n in head
            if n in ledger.work
        }
        return replace(ledger, work={**ledger.work, **more})

    def apply(self, build: Build) -> None:
        """Set the budget while the run compiles, and look at the first graphs that ran."""
        seen = build.notes[self.name()] = {"budget": 1.0, "graphs": 0.0, "kept_bytes": 0.0}

        def budget() -> AbstractContextManager[Any]:
            from torch._functorch import config

            return config.patch(activation_memory_budget=self.fraction)

        def look(model: Any, given: Any, output: Tensor) -> None:
            if output.requires_grad:
                handle.remove()
                seen.update(_kept(build, output))

        build.runtime.append(budget)
        handle = build.model.register_forward_hook(look)

    def active(self, build: Build) -> Evidence:
        """Report the budget in force when the first step compiled, and what its graphs kept."""
        seen = build.notes[self.name()]
        share = seen["kept_bytes"] / _eager_bytes(build)
        return Evidence(
            active=seen["graphs"] > 0 and seen["budget"] == self.fraction and share > 0,
            detail=f"{seen['graphs']:.0f} compiled graphs kept {seen['kept_bytes']:.0f} bytes for "
            f"the backward pass under a budget of {seen['budget']:g}: {share:.1%} of what the "
            "plain baseline keeps uncompiled",
            numbers={**seen, "fraction_of_eager": share},
        )


def _kept_of(
    block: Mapping[str, Line], sizes: Mapping[str, float], fraction: float
) -> tuple[dict[str, float], float, list[str]]:
    """Return bytes that a block keeps by line, and FLOPs per token and pieces to remake the rest.

    The partitioner (torch._functorch.partitioners, choose_saved_values_set) counts what the fastest
    cut keeps beyond the graph's inputs; a fp32 weight whose cast is kept instead counts against it.
    A cut that keeps matmuls and attention alone is taken if it fits. Else matmuls go into a
    knapsack by their FLOPs. Attention is in no knapsack (torch 2.11's list of dear operations lacks
    cuDNN's, and a peak with torch's default kernel shows the same), and is run again.
    """
    sizes_by_line = {name: line.bytes for name, line in block.items()}
    stream = min(sizes["residual"], sizes_by_line["residual"])
    wide = "gate_up" if "mlp.gate_up/in" in sizes else "up"
    cast, turned = sizes_by_line.get("weight_cast", 0.0), sizes_by_line.get("attention_input", 0.0)
    # Queries and keys are kept as they are turned, and as they were only for their norms. Casts are
    # half of the weights that they stand for.
    whole = (
        sum(sizes_by_line.values())
        - stream
        - 2 * cast
        - (0.0 if "qk_norm" in sizes_by_line else turned)
    )
    room = fraction * max(0.0, whole)
    linears = {"gate_up": f"mlp.{wide}", "qkv": "mixer.qkv", "out": "mixer.out"}
    matmul_flops = {
        name: 2 * sizes[f"{linear}/in"] * sizes[f"{linear}/out"]
        for name, linear in linears.items()
        if name in sizes_by_line or name == "out"
    }
    weights = {
        name: sizes_by_line.get(name, sizes_by_line["residual"] - stream) for name in matmul_flops
    }
    plain = {n: b for n, b in sizes_by_line.items() if block[n].opaque or n not in REMADE}
    if sum(weights.values()) + sizes_by_line.get("attention", 0.0) < room:
        return plain, 0.0, []
    every = (c for n in range(len(matmul_flops) + 1) for c in combinations(matmul_flops, n))
    fits = (c for c in every if sum(weights[name] for name in c) <= room)
    best = max(fits, key=lambda c: sum(matmul_flops[name] for name in c))
    keeps = {name: sizes_by_line[name] for name in best if name in sizes_by_line}
    keeps["residual"] = sizes_by_line["residual"] if "out" in best else stream
    if "qkv" in best:
        keeps["attention_input"] = turned
    work = sum(matmul_flops.values()) - sum(matmul_flops[name] for name in best)
    gone = [linears[name] for name in matmul_flops if name not in best]
    return keeps, work + sizes["attention_flops"] / sizes["layers"], [*gone, "attention"]


def _kept(build: Build, output: Tensor) -> dict[str, float]:
    """Return what the graphs behind `output` hold for the backward pass, without parameters."""
    from torch._functorch import config

    own = {place for p in build.model.parameters() for place in _places(p)}
    graphs = [node for node in _nodes(output.grad_fn) if node.name().endswith(COMPILED)]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for node in graphs
        for tensor in node.saved_tensors
        if isinstance(tensor, Tensor)
    }
    kept = sum(count for place, count in storages.items() if place not in own)
    return {
        "budget": float(config.activation_memory_budget),
        "graphs": float(len(graphs)),
        "kept_bytes": float(kept),
    }


def _places(tensor: Tensor) -> Iterator[int]:
    """Yield the storages of a tensor: those of its parts where it is sharded, or in few bits."""
    local: Any = local_of(tensor)
    if hasattr(local, "__tensor_flatten__"):
        for name in local.__tensor_flatten__()[0]:
            yield from _places(getattr(local, name))
    else:
        yield local.untyped_storage().data_ptr()


def _nodes(root: Any) -> Iterator[Any]:
    """Yield every node of the graph behind `root`, once."""
    waiting, seen = [root], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            yield node


def _eager_bytes(build: Build) -> float:
    """Return what the plain baseline keeps of a micro-batch uncompiled, by its ledger."""
    plan = build.plan
    ledger = baseline_ledger(
        build.config,
        rows=plan.micro_rows,
        length=plan.data.sequence_length,
        precision=build.context.precision,
        device=build.context.device,
    )
    return sum(line.bytes for line in ledger.memory.values() if "loss" in line.instants)
