"""Divide the experts of a mixture over ranks, and send each token's row to where its experts are.

`mesh.expert` ranks of `data` x `context` are a group; each of them reads its own rows, or its own
part of rows, and holds its share of every layer's experts, and everything else of the model as
before. Ranks that share rows are the innermost of a group. Between router and experts an
all-to-all carries each row to the ranks of its experts, and another carries the results back
(GShard, arXiv 2006.16668; parallel/experts). No token is dropped: the splits are the counts of this
very step. Router, balance loss and grouped matmul are those of `mixture_of_experts`.

An expert's gradient holds what all ranks of the group sent to it; ranks of other groups that hold
the same experts add theirs up. `fsdp` and `zero` slice experts over these (torchtitan does so too),
and the rest over all ranks as ever; a router stays whole there. Ranks of `mesh.tensor` each
exchange rows for their part of every expert.

Cost: rows cross the links four times a layer and micro-batch, and nothing hides them; a rank whose
experts are liked waits for no one, and the others wait for it; a GPU is waited for once a layer,
because the host must know the counts. Left out: capacity, and hiding the exchange behind a shared
expert (DeepSeek-V3).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.count import FP32
from headrace.costs.expert_work import divided_work
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.links import BUCKET_BYTES
from headrace.costs.work import Phase, Stream, Work, collective
from headrace.model.moe import ExpertLayer
from headrace.parallel.experts import ExpertExchange
from headrace.parallel.tensor import peers_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

AXIS = "expert"
MIXTURE = "mixture_of_experts"
"""Name of the technique whose experts are divided."""
INT64 = 8
COPIES = 3
"""Copies of the rows beside each other: sorted by expert, as they arrived, and to be sent."""


class ExpertParallel(Technique[Build]):
    """Divide the experts of a mixture over ranks, and send each token to where its experts are."""

    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.TENSOR
    axes: ClassVar[tuple[str, ...]] = (AXIS,)
    composes: ClassVar[tuple[str, ...]] = ("layouts",)
    timed: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer_in_backward": "gradients of experts or routers are added up after the backward "
        "pass, which has updated the weights by then (derived)",
    }
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:optimizer",
    )
    card: ClassVar[Card] = Card(
        buys="parameters, gradients and optimizer state of the experts divided by mesh.expert, and "
        "their gradients summed over so many ranks fewer (derived)",
        costs=(
            "four exchanges of every choice's row a layer and micro-batch, which nothing hides "
            "(arXiv 2006.16668, section 3.2)",
            "the slowest rank's experts, which all wait for",
        ),
        helps="mixtures whose experts are most of the model, on GPUs of one node",
        hurts="few experts, slow links, and routers that are not balanced yet",
        source="arXiv 2006.16668; arXiv 2211.15841; torchtitan's expert parallelism",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a mixture with an expert for each rank of a group."""
        plan, ranks = context.plan, context.plan.mesh.expert
        mixture = plan.techniques.get(MIXTURE)
        if mixture is None:
            return Unsupported(
                "the plan has no mixture, whose experts could be divided", mend(f"+{MIXTURE}")
            )
        if ranks == 1:
            two = (
                ("mesh.expert=2",) if plan.mesh.data % 2 == 0 else ("mesh.data=2", "mesh.expert=2")
            )
            return Unsupported("mesh.expert = 1: there is nothing to divide over", mend(*two))
        if mixture.experts < ranks:
            fits = max(n for n in range(1, mixture.experts + 1) if ranks % n == 0)
            fewer = (f"mesh.expert={fits}",) if fits > 1 else ("mesh.expert=1", f"-{self.name()}")
            return Unsupported(
                f"{mixture.experts} experts are fewer than mesh.expert = {ranks} ranks",
                mend(*fewer) | mend(f"techniques.{MIXTURE}.experts={ranks}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Count the share of the experts of the rank that has most, and the exchanges."""
        divided = ledger.experts()
        if not divided:
            return ledger
        ranks = int(ledger.sizes["expert_ranks"])
        count = next(iter(divided.values())).shape[0]
        share = -(-count // ranks) / count
        gone = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
        for matrix in divided.values():
            numbers = (1 - share) * matrix.numbers
            gone["parameters"] += matrix.stored * numbers
            gone["gradients"] += FP32 * numbers * bool(matrix.by)
            gone["optimizer"] += 2 * FP32 * numbers * (matrix.by == "adamw")
        kept = 1 - gone["parameters"] / ledger.memory["parameters"].bytes
        own_work = divided_work(ledger, experts=count, share=share, ranks=ranks, kept=kept)
        for name, bytes in gone.items():
            if line := ledger.memory.get(name):
                ledger = ledger.with_line(name, replace(line, bytes=line.bytes - bytes))
        layers = int(ledger.sizes["layers"])
        uncast = 2 * (1 - share) * sum(m.numbers for m in divided.values()) / layers
        for name in (f"{layer}/weight_cast" for layer in range(layers)):
            if line := ledger.memory.get(name):
                ledger = ledger.with_line(name, replace(line, bytes=line.bytes - uncast))
        own_matrices = {name: replace(m, share=m.share * share) for name, m in divided.items()}
        row_bytes = ledger.memory["0/routed"].bytes / 2
        ledger = ledger.with_line("exchange", Line(COPIES * row_bytes, ("backward",)))
        work = {**own_work, **dict(self._work(ledger, own_matrices, row_bytes, count))}
        return replace(ledger, work=work, matrices={**ledger.matrices, **own_matrices})

    def _work(
        self, ledger: Ledger, divided: dict[str, Matrix], row_bytes: float, experts: int
    ) -> Iterator[tuple[str, Work]]:
        """Yield the exchanges, and the gradients that ranks still sum."""
        sizes, layers = ledger.sizes, ledger.sizes["layers"]
        calls: dict[str, tuple[Phase, float]] = {
            "count": ("forward", INT64 * experts),
            "to_experts": ("forward", row_bytes),
            "to_tokens": ("forward", row_bytes),
            "to_tokens_backward": ("backward", row_bytes),
            "to_experts_backward": ("backward", row_bytes),
        }
        for name, (phase, bytes) in calls.items():
            yield f"experts/{name}", collective(sizes, AXIS, phase, "all_to_all", bytes, layers)
        own = FP32 * sum(m.numbers for m in divided.values() if m.by)
        whole = ledger.memory["gradients"].bytes - own
        for name, axis, bytes in (
            ("reduce/gradients", "shard", whole),
            ("experts/gradients", "expert_copies", own),
        ):
            if sizes[f"{axis}_ranks"] > 1 and bytes:
                buckets = -(-bytes // BUCKET_BYTES)
                yield (
                    name,
                    collective(sizes, axis, "optimizer", "all_reduce", bytes, kernels=buckets),
                )
                copies = "reduce/copy" if axis == "shard" else "experts/copy"
                yield copies, Stream("optimizer", 1, 4 * bytes, 2 * buckets)

    def apply(self, build: Build) -> None:
        """Lay each layer's experts out over the group, and put the exchange around them."""
        peers = peers_of(build.world.group(AXIS))
        exchanges: dict[str, ExpertExchange] = {}
        for layer, block in build.model.blocks.items():
            part: Any = block.get_submodule("mlp")
            if not isinstance(part, ExpertLayer):
                continue
            name = f"blocks.{layer}.mlp"
            exchanges[name] = ExpertExchange(peers, part.experts, part.multiply_all)
            part.through = exchanges[name]
            for key in (part.first, "down"):
                layout = build.layouts[f"{name}.{key}"]
                partial = (layout.partial - {"shard"}) | {"expert_copies"}
                split = {AXIS: 0, **layout.split}
                build.layouts[f"{name}.{key}"] = replace(layout, split=split, partial=partial)
        build.notes[self.name()] = exchanges

    def active(self, build: Build) -> Evidence:
        """Report the experts that this rank holds, and the rows that came to them from others."""
        exchanges: dict[str, ExpertExchange] = build.notes[self.name()]
        met = {n: x for n, x in exchanges.items() if x.arrived_Re is not None}
        if not met:
            nothing = None if not exchanges else False
            return Evidence(nothing, "no block of this rank sent a row")
        place = next(iter(met.values())).peers.place
        came = own = 0
        shares_fit = True
        for name, exchange in met.items():
            arrived_Re: Tensor = exchange.arrived_Re  # type: ignore[assignment]
            came, own = came + int(arrived_Re.sum()), own + int(arrived_Re[place].sum())
            here = build.layouts[f"{name}.down"].offsets(build.world)[1][0]
            shares_fit = shares_fit and here == exchange.shares[place] < sum(exchange.shares)
        here, whole = exchange.shares[place], sum(exchange.shares)
        return Evidence(
            active=shares_fit,
            detail=f"holds {here} of {whole} experts of {len(met)} layers; {came:,} rows came to "
            f"them in the last pass, {came - own:,} of these from other ranks",
            numbers={"experts_here": here, "experts": whole, "rows": came, "of_others": came - own},
        )
