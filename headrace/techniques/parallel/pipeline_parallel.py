"""Give each rank some of the layers, and pass activations from rank to rank (1F1B and others).

Ranks along `pipeline` hold the model's layers one after the other, so weights, gradients, optimizer
state and most activations are divided by their number, and all that crosses a border is one
[rows, tokens, features] tensor per micro-batch and direction: far less than sharded weights need,
which is why pipelines span slow networks (arXiv 2104.04473; Llama 3, arXiv 2407.21783, section
3.3.2). The cost is the bubble, (ranks - 1) / (micro-batches x chunks + ranks - 1) of the step, so a
pipeline wants several micro-batches per rank. `schedule=interleaved` with `chunks` stages per rank
makes the bubble smaller and the messages more. `schedule=zbv` lays two stages a rank out along a V
and sends a gradient before it computes those of the weights, which fill the time that is left
(parallel/zero_bubble): the bubble is (ranks - 1) / (6 x micro-batches + ranks - 1) from 2 x ranks
micro-batches on, and every rank holds as many activations as 1F1B's first. It wants gradients to be
summed after the last backward pass, and layers whose backward pass can be done in two parts.
`schedule=dualpipev` lies along the same V, and does only the first and the last in two parts.

The last stage also has the head, whose matmul takes as long as that of some layers where the
vocabulary is large. It gets as many layers less (`balance`), since the slowest stage sets the pace.
The others share the rest as evenly as it goes, the later of them one more: the first ranks hold the
activations of the most micro-batches. A tied embedding is held by both ends; each computes its part
of the gradient, and the sum of both reaches both. What all blocks read of the embedding
(`embedding_residual`, `value_embeddings`) is made by the first stage, which has the tables too, and
travels beside the activations, once more for each: over slow networks that costs more than a
border's activations alone. The mechanism is parallel/pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, MicroBatch, auxiliary_loss
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.count import FP32, instants_of
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.links import COMMUNICATORS
from headrace.costs.split_adapters import unreached
from headrace.costs.stage_work import (
    StageShare,
    border_work,
    ends_work,
    mixing_share,
    outside_lines,
)
from headrace.costs.work import IDLE, Work
from headrace.model.decoder import Decoder, Part
from headrace.model.from_embedding import PassedOn
from headrace.model.head import Objective
from headrace.parallel import pipeline, zero_bubble
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

STATES: Mapping[str, Callable[[Matrix], float]] = {
    "parameters": lambda m: m.stored * m.numbers,
    "gradients": lambda m: FP32 * m.numbers * bool(m.by),
    "optimizer": lambda m: 2 * FP32 * m.numbers * bool(m.by),
}
"""Ledger line -> the bytes of one matrix in it, before optimizers edit the line."""
WHOLE_BACKWARD = (
    *("torch_compile", "shape_buckets", "cuda_graphs", "memory_budget", "liger_kernels"),
    *("selective_checkpoint", "full_checkpoint", "activation_offload", "chunked_mlp"),
    *("chunked_cross_entropy", "fused_cross_entropy"),
    *("fused_rms_norm", "fused_rope", "fused_swiglu"),
)
"""Techniques with a backward pass that is one for a block, computes again what it needs, or gives
away what it has computed."""
HEAD_LAYERS = "head_layers"
"""The size of a ledger that says how many layers take as long as the head."""


class PipelineParallel(Technique[Build]):
    """Give each rank some of the layers, and pass activations from rank to rank."""

    schedule: Literal["1f1b", "interleaved", "zbv", "dualpipev"] = "1f1b"
    """1f1b takes any number of micro-batches; interleaved takes multiples of the ranks, and waits
    less; zbv takes any number, and waits least; dualpipev pairs whole passes in its middle."""
    chunks: int = Field(default=1, ge=1, le=16)
    """Stages per rank: 1 for 1f1b, 2 or more for interleaved, 2 for zbv and
    dualpipev; tuner range 1 to 4."""
    balance: Literal["flops", "layers"] = "flops"
    """What stages have alike: FLOPs, of which the head counts as layers, or layers alone."""
    layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Layers of each stage, the first stage first; none shares them out by `balance`."""

    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.PIPELINE
    claims: ClassVar[tuple[str, ...]] = ("engine",)
    composes: ClassVar[tuple[str, ...]] = ("layouts",)
    axes: ClassVar[tuple[str, ...]] = ("pipeline",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:parameters", "interconnect")
    timed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        buys="weights, gradients and optimizer state divided by the ranks, with one activation per "
        "micro-batch and border on the network (derived)",
        costs="ranks that wait: (ranks - 1) / (micro-batches x chunks + ranks - 1) of a step",
        helps="models too large for one node's memory, and networks too slow for sharded weights",
        hurts="few micro-batches per step, and stages that are not equally slow",
        source="arXiv 2104.04473; arXiv 2006.09503; arXiv 2407.21783 (section 3.3.2)",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require several ranks, a layer for each stage, and micro-batches for the schedule."""
        plan, me = context.plan, f"techniques.{self.name()}"
        wrong = self.chunks != 2 if self.is_v else (self.schedule == "1f1b") != (self.chunks == 1)
        if wrong:
            return Unsupported(
                f"schedule = {self.schedule!r} and chunks = {self.chunks} contradict each other",
                mend(f"{me}.chunks={(1 if self.schedule == '1f1b' else 2)}"),
            )
        if context.ranks < 2 or plan.mesh.pipeline < 2:
            return Unsupported(
                "a pipeline needs several ranks",
                mend("mesh.pipeline=2", text="mesh.pipeline=2 under torchrun"),
            )
        ranks, layers = plan.mesh.pipeline, plan.model.layers
        stages = ranks * self.chunks
        if layers < stages and not plan.model.pretrained:
            fewer = max(1, layers // ranks)
            return Unsupported(
                f"{layers} layers are too few for {ranks} ranks x {self.chunks} = {stages} stages",
                mend(f"model.layers={stages}") | mend(f"{me}.chunks={fewer}" if fewer > 1 else ""),
            )
        known = not plan.model.pretrained
        if known and (wrong := unfit(self.layers, layers, stages)):
            return Unsupported(wrong, mend(f"{me}.layers={split(layers, stages)}".replace(" ", "")))
        if self.is_v and (refused := self._refuse_whole(context)):
            return refused
        rows = plan.rows_per_step // plan.mesh.data
        if self.schedule == "interleaved" and rows // plan.micro_rows % ranks:
            fits = divisors(rows // ranks) if rows % ranks == 0 else []
            near = min(fits, key=lambda n: abs(n - plan.micro_rows), default=None)
            return Unsupported(
                f"an interleaved pipeline takes micro-batches in groups of {ranks}, and a step of "
                f"{rows} rows in micro-batches of {plan.micro_rows} has {rows // plan.micro_rows}",
                mend(f"batch.micro_sequences={near}")
                if near
                else mend(f"{me}.schedule=1f1b", f"{me}.chunks=1"),
            )
        return Supported()

    def micro_group(self, plan: Any) -> int:
        """Return the ranks, where stages take micro-batches by turns, in groups of these."""
        return plan.mesh.pipeline if self.schedule == "interleaved" else 1

    @property
    def is_v(self) -> bool:
        """Return whether stages lie along a V, and backward passes are done in two parts."""
        return self.schedule in zero_bubble.ORDERS

    def _refuse_whole(self, context: Context) -> Unsupported | None:
        """Refuse what needs a whole backward pass at once; None where nothing does."""
        others = context.plan.techniques
        whole = [n for n, t in others.items() if n in WHOLE_BACKWARD or "sync" in t.claims]
        if not whole:
            return None
        me = f"techniques.{self.name()}"
        return Unsupported(
            f"schedule = {self.schedule!r} does backward passes in two parts, and {whole[0]} needs "
            "whole ones",
            mend(f"{me}.schedule=1f1b", f"{me}.chunks=1") | mend(f"-{whole[0]}"),
            RefusalKind.COMBINATION,
        )

    def _mine(self, parts: Sequence[Part], ranks: int, rank: int) -> list[Part]:
        """Return a rank's parts of the model, one per chunk."""
        if self.is_v:
            return [parts[zero_bubble.stage_of(ranks, rank, chunk)] for chunk in range(2)]
        return list(parts[rank::ranks])

    def _waits(self, ranks: int, micros: int) -> float:
        """Return the share of a step in which a rank waits."""
        if self.is_v:
            return zero_bubble.bubble_of_v(ranks, micros, self.schedule)
        return pipeline.bubble(ranks, micros, self.chunks)

    def predict(self, ledger: Ledger) -> Ledger:
        """Count one rank's memory, and the time that ranks wait, as work not done."""
        ranks = int(ledger.sizes["pipeline_ranks"])
        if ranks == 1:
            return ledger
        ledger = replace(ledger, sizes={**ledger.sizes, HEAD_LAYERS: self._head_layers(ledger)})
        micros = int(ledger.sizes["micro_batches"])
        idle = self._waits(ranks, micros)
        lost = ledger.flops_per_token() * idle / (1 - idle)
        one = self._on(ledger, int(ledger.sizes["pipeline_rank"]), ranks, micros)
        return one.with_flops("bubble", lost)

    def _head_layers(self, ledger: Ledger) -> float:
        """Return how many layers have the FLOPs of the head; 0 where layers alone are shared."""
        if self.balance == "layers":
            return 0.0
        sizes = ledger.sizes
        block = (sizes["block_flops"] + sizes["attention_flops"]) / sizes["layers"]
        return 2 * sizes["dim"] * sizes["vocab"] / block

    def _on(self, ledger: Ledger, rank: int, ranks: int, micros: int) -> Ledger:
        """Count one rank's memory: its layers, once for each micro-batch in flight."""
        layers, last = int(ledger.sizes["layers"]), rank == (0 if self.is_v else ranks - 1)
        names, head = tuple(map(str, range(layers))), ledger.sizes.get(HEAD_LAYERS, 0.0)
        stages = make_parts(names, ranks * self.chunks, head, self.layers)
        parts = self._mine(stages, ranks, rank)
        mine = [name for part in parts for name in part.blocks or ()]
        here, visits = len(mine), most_in_flight(ranks, rank, micros, self.chunks)
        if self.is_v:
            visits = zero_bubble.most_of_v(ranks, rank, micros, self.schedule)
        memory = outside_lines(
            ledger, first=rank == 0, last=last, visits=visits, chunks=self.chunks
        )
        by_layer: dict[int, dict[str, Line]] = {int(name): {} for name in mine}
        for name, line in ledger.memory.items():
            if line.layer in by_layer:
                by_layer[line.layer][name.split("/")[1]] = line
        blocks = list(by_layer.values())
        for copy in range(-(-here * visits // self.chunks)):
            # A micro-batch in flight is as many blocks more, held while another goes backward.
            instants = instants_of(copy) if copy < here else ("loss", "turn", "backward")
            for name, line in blocks[copy % here].items():
                memory[f"{copy}/{name}"] = replace(line, instants=instants, layer=copy)
        matrices = self._matrices(ledger, mine, first=rank == 0, last=last)
        for name, bytes_of in STATES.items():  # vectors are shared out as layers are
            whole, part = (sum(map(bytes_of, m.values())) for m in (ledger.matrices, matrices))
            own = ledger.sizes["final_norm"] * FP32 * (2 if name == "optimizer" else 1)
            vectors = memory[name].bytes - whole
            own = min(vectors, own)
            vectors = (vectors - own) * here / layers + own * last
            memory[name] = replace(memory[name], bytes=vectors + part)
        idle = self._waits(ranks, micros)
        sizes = {**ledger.sizes, "layers": here, IDLE: idle}
        sizes["final_norm"] *= last
        learned = memory["gradients"].bytes / max(1.0, ledger.memory["gradients"].bytes)
        mixing = mixing_share(ledger, {*by_layer})
        stage = StageShare(rank == 0, last, here, layers, learned, unreached(sizes), mixing)
        work = {n: part for n, w in ledger.work.items() if (part := stage.part(n, w)) is not None}
        work |= self._sends(ledger, rank, ranks)
        neighbours = (rank > 0) + (rank < ranks - 1)
        borders = 2 * neighbours if self.is_v else 2 if self.chunks > 1 else neighbours  # both ways
        ends = bool(sizes["tied"]) and (rank == 0 or last) and not self.is_v
        sizes[COMMUNICATORS] = sizes.get(COMMUNICATORS, 0.0) + 2 * borders + ends
        return replace(ledger, memory=memory, sizes=sizes, matrices=matrices, work=work)

    def _sends(self, ledger: Ledger, rank: int, ranks: int) -> dict[str, Work]:
        """Return what a rank sends to its neighbours, and adds up with the other end."""
        ahead = self.chunks - (rank == ranks - 1) - (self.is_v and rank == 0)
        back = self.chunks - (rank == 0) - (self.is_v and rank == ranks - 1)
        sends = border_work(ledger, ahead=ahead, back=back)
        if ledger.sizes["tied"] and rank in (0, ranks - 1) and not self.is_v:
            sends |= ends_work(ledger.sizes)
        return sends

    def _matrices(
        self, ledger: Ledger, mine: Sequence[str], *, first: bool, last: bool
    ) -> dict[str, Matrix]:
        """Return the matrices of one rank's part."""
        here = tuple(f"blocks.{name}." for name in mine)
        of_first = ("embed.", "pairs.", "smear.", "position.", "value_embed.")
        here += of_first * first + ("head.",) * last
        here += ("embed.",) * (last and bool(ledger.sizes["tied"]))
        return {name: m for name, m in ledger.matrices.items() if name.startswith(here)}

    def apply(self, build: Build) -> None:
        """Keep this rank's layers, connect the ranks, and fill the engine."""
        assert build.world.mesh is not None
        ranks, rank = build.world.size("pipeline"), build.world.place("pipeline")
        head = build.predicted(build.plan).sizes[HEAD_LAYERS]
        stages = make_parts(tuple(build.model.blocks), ranks * self.chunks, head, self.layers)
        parts, tied = self._mine(stages, ranks, rank), build.config.tied_embeddings
        keep_only(build.model, parts, tied=tied)
        if tied and not self.is_v:
            layout = build.layouts["embed.weight"]
            build.layouts["embed.weight"] = replace(layout, partial={*layout.partial, "ends"})
        grid = build.world.mesh.mesh.flatten(1)
        line = pipeline.PipelineRank(grid, build.device, chunks=self.chunks, v=self.is_v)
        pipe = Pipe(self.schedule, line, parts)
        build.notes[self.name()] = pipe
        build.engine = pipe.engine

    def active(self, build: Build) -> Evidence:
        """Report messages that were sent, actions that ran, and the blocks that are held."""
        pipe: Pipe = build.notes[self.name()]
        own_blocks, layers = len(build.model.blocks), build.config.layers
        return Evidence(
            active=0 < own_blocks < layers and pipe.line.messages > 0 and pipe.actions > 0,
            detail=f"rank {pipe.line.rank} of {pipe.line.ranks} holds {own_blocks} of {layers} "
            f"blocks, ran {pipe.actions} passes and sent {pipe.line.messages} messages, "
            f"{pipe.line.bytes:,} bytes",
            numbers={
                "blocks": own_blocks,
                "layers": layers,
                "chunks": self.chunks,
                "actions": pipe.actions,
                "messages": pipe.line.messages,
                "bytes": pipe.line.bytes,
            },
        )


@dataclass
class Pipe:
    """A pipe is a rank's stages and its neighbours."""

    schedule: str
    line: pipeline.PipelineRank
    parts: Sequence[Part]
    """of the model, one per chunk"""
    actions: int = 0
    """forward and backward passes so far"""

    def engine(
        self, build: Build, micros: Sequence[MicroBatch], objective: Objective, scale: Tensor
    ) -> Tensor:
        """Forward and backward of all micro-batches; returns this rank's scaled loss sum."""
        place = (self.line.ranks, self.line.rank, len(micros))
        if not torch.is_grad_enabled():
            actions = pipeline.forward_only(self.line.ranks, len(micros), self.line.chunks)
        elif self.line.v:
            actions = zero_bubble.ORDERS[self.schedule](*place)
        elif self.line.chunks > 1:
            actions = pipeline.interleaved(*place, self.line.chunks)
        else:
            actions = pipeline.one_forward_one_backward(*place)
        self.actions += len(actions)
        return pipeline.run(
            actions, self.line, DecoderStages(build, self, micros, objective, scale)
        )


class DecoderStages:
    """The build's model, as `pipeline.run` asks for it."""

    def __init__(
        self,
        build: Build,
        pipe: Pipe,
        micros: Sequence[MicroBatch],
        objective: Objective,
        scale: Tensor,
    ) -> None:
        self.build, self.pipe, self.micros = build, pipe, micros
        self.objective, self.scale = objective, scale
        self.dtype = build.model.residual_dtype

    def shape(self, micro: int) -> tuple[int, ...]:
        """Return [B, T, D], or what tensor ranks make of it, or what blocks read beside it."""
        return self.build.model.border_shape(*self.micros[micro].ids_BT.shape)

    def forward(self, chunk: int, micro: int, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run one stage of one micro-batch; return the result and what its layers kept."""
        self.build.phases.mark("forward")
        work = self.micros[micro]
        with self.build.autocast():
            output = self.build.model(
                work.ids_BT if x is None else x,
                work.targets_BT,
                work.rows,
                objective=self.objective,
                scale=self.scale,
                extras=work.extras,
                part=self.pipe.parts[chunk],
            )
        auxiliary = auxiliary_loss(self.build) if torch.is_grad_enabled() else None
        return output, None if auxiliary is None else auxiliary * self.scale

    def before_backward(self, chunk: int, last: bool) -> None:
        """Let gradients be sent to other replicas in a chunk's last backward pass."""
        self.build.sync(self.build, last)
        self.build.phases.mark("backward")

    def weights(self) -> list[nn.Parameter]:
        """Return what learns on this rank."""
        return [p for p in self.build.model.parameters() if p.requires_grad]

    def waiting(self) -> None:
        """Count a message that is not here yet as time in which nothing is computed."""
        self.build.phases.mark("communication_exposed")


# --- who holds what --------------------------------------------------------------------------


def split(layers: int, stages: int, head: float = 0.0) -> list[int]:
    """Return the layers of each stage, at least one; stages right before the last get what is left.

    Args:
        layers: of the model.
        stages: of the pipeline.
        head: layers that take as long as the head, which the last stage has too.

    Raises:
        ConfigError: a stage would have none.
    """
    if layers < stages:
        raise ConfigError(
            f"{layers} layers are too few for {stages} stages of a pipeline",
            mend(
                f"mesh.pipeline={layers}",
                "techniques.pipeline_parallel.schedule=1f1b",
                "techniques.pipeline_parallel.chunks=1",
            )
            if layers > 1
            else mend("mesh.pipeline=1", "-pipeline_parallel"),
        )
    others = stages - 1
    slowest = {n: max(n + head, -(-(layers - n) // others)) for n in range(1, layers - others + 1)}
    last = min(slowest, key=lambda n: (slowest[n], -n if head else n))
    each, over = divmod(layers - last, others)
    return [each + (others - over <= stage) for stage in range(others)] + [last]


def unfit(counts: Sequence[int], layers: int, stages: int) -> str:
    """Return why layers cannot be shared out so; "" where they can, or where none is asked for."""
    if not counts or (len(counts), sum(counts)) == (stages, layers):
        return ""
    return (
        f"layers = {[*counts]} are {sum(counts)} layers in {len(counts)} stages, and the model's "
        f"{layers} are shared out to {stages}"
    )


def make_parts(
    blocks: Sequence[str], stages: int, head: float = 0.0, counts: Sequence[int] = ()
) -> list[Part]:
    """Return the model's parts, first stage first: `counts` layers each, or else see `split`.

    Raises:
        ConfigError: the layers are too few, or `counts` are of another model or pipeline.
    """
    parts, start, me = [], 0, "techniques.pipeline_parallel"
    if wrong := unfit(counts, len(blocks), stages):
        raise ConfigError(wrong, mend(f"{me}.layers=[]"))
    for stage, count in enumerate(counts or split(len(blocks), stages, head)):
        names = tuple(blocks[start : start + count])
        parts.append(Part(names, first=stage == 0, last=stage == stages - 1))
        start += count
    return parts


def keep_only(model: Decoder, parts: Sequence[Part], *, tied: bool) -> None:
    """Take out of the model what no part runs; what stays keeps its name."""
    mine = {name for part in parts for name in part.blocks or ()}
    for name in set(model.blocks) - mine:
        del model.blocks[name]
    first, last = any(p.first for p in parts), any(p.last for p in parts)
    if not first:
        for name, _ in list(model.position.named_parameters(recurse=False)):
            model.position.register_parameter(name, None)
    if not (first or (last and tied)):
        model.embed = None  # type: ignore[assignment]
    if not first:
        model.pairs, model.smear = PassedOn(), PassedOn()
        model.value_embed = nn.ModuleList()
    if not last:
        model.norm = model.head = None  # type: ignore[assignment]


def most_in_flight(ranks: int, rank: int, micros: int, chunks: int) -> int:
    """Return the most (stage, micro-batch) pairs whose activations a rank holds at once."""
    ahead = ranks - rank if chunks == 1 else 2 * (ranks - rank) - 1 + (chunks - 1) * ranks
    return min(ahead, micros * chunks)
