"""Split every matrix over a few ranks, so that each holds and multiplies a part of it.

The first matrix of attention and MLP is cut by rows: each rank computes its own heads or hidden
features from the whole input. The last is cut by columns: each rank has a part of every sum, and
one collective adds the parts. So a block communicates four times forward and backward, and nothing
inside of attention or MLP. The embedding and the output matrix are cut along the vocabulary, and
the loss is reduced without whole logits (model/sharded_vocabulary).

With `sequence`, what stands between those parts (residual stream, norms) is cut along the sequence:
an all-gather and a reduce-scatter replace one all-reduce, carry the same bytes, and each rank keeps
a part of those activations. Weights on a slice of tokens then have a partial gradient, which the
step's `reduce` adds, as that of everything whole inside of the parts (q_norm, a router).

A rank keeps plain local tensors (parallel/layout says which part of what); every collective is a
traceable operation (parallel/tensor). With `asynchronous` a compiler cuts matmuls by ranks and
sends one part while it multiplies another (parallel/micro_pipeline); else matmuls wait. Gathered
inputs are kept for the backward pass instead of being gathered again, as Megatron does. Sources:
arXiv 1909.08053 (tensor), arXiv 2205.05198 (sequence).

Shapes: B rows, T tokens, t tokens of a rank, D features.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.core.units import divisors
from headrace.costs.adapters import SCALES, TRAINED, UNSPLIT, is_unsplit
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger, Line
from headrace.costs.links import COMMUNICATORS
from headrace.costs.mask_work import mask_of_heads
from headrace.costs.split_adapters import gathered_results, split_lines
from headrace.costs.split_work import split_head, split_work
from headrace.kernels.launches import COUNTS, since
from headrace.model.lora import DoraLinear, LoraLinear
from headrace.model.sharded_vocabulary import ShardedVocabulary
from headrace.model.token_before import PairEmbedding
from headrace.parallel.layout import share
from headrace.parallel.micro_pipeline import GATHERS, PREFIX, SCATTERS, compiling, share_memory
from headrace.parallel.tensor import (
    Peers,
    all_reduce,
    copy,
    gather_sequence,
    local_length,
    peers_of,
    scatter_sequence,
    split_sequence,
    sum_forward,
)
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

AXIS = "tensor"
LAUNCHED = "tensor launched"
"""Name of the note that holds the launches of kernels when the technique was applied."""
WHOLE = mend("mesh.tensor=1", "-tensor_parallel")
"""The remedy that leaves the model uncut."""
COLUMNS: Mapping[str, int] = {"weight": 0, "bias": 0}
ROWS: Mapping[str, int] = {"weight": 1}
"""Dimension along which a plain linear's parameters are cut, by output or by input features; one
with other parameters says so itself in `column_parameters` and `row_parameters`."""
CORRECTS = "adds a correction to their results before that"
UNFUSED: Mapping[str, str] = {
    "float8_linear": "casts the first as a whole before",
    **dict.fromkeys(("lora", "dora", "qlora"), CORRECTS),
}
"""Technique whose matmuls torch does not overlap with collectives -> why."""
INSIDE_LINES = (
    "qkv",
    "attention",
    "attention_input",
    "value",
    "values",
    "qk_norm",
    "gate_up",
    "activation",
    "weight_cast",
)
"""Ledger lines of a block that are kept inside of attention and MLP."""
INSIDE_SIZES = (
    "logits_per_token",
    "logits_leaf",
    "logits_fused",
    "down_matrices",
    "embedding",
    "attention_flops",
    "heads",
    "kv_heads",
    "ffn",
)
STATE_LINES = ("parameters", "gradients", "optimizer")


class WholeTokens:
    """Between the parts every rank has all tokens."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.length, self.calls = peers, 0, 0

    def widen(self, x: Tensor) -> Tensor:
        """Return all tokens, as a cut part reads them."""
        self._count()
        return copy(x, self.peers)

    def add(self, y: Tensor) -> Tensor:
        """Return the sum of what the ranks' parts wrote."""
        self._count()
        return sum_forward(y, self.peers)

    def split(self, x: Tensor) -> Tensor:
        """Return what the first block reads, of what is equal everywhere."""
        return x

    def _count(self) -> None:
        if not torch.compiler.is_compiling():
            self.calls += 1


class SplitTokens(WholeTokens):
    """Between the parts every rank has its own tokens: `length` of all of them, set beforehand."""

    def widen(self, x: Tensor) -> Tensor:
        """Return all tokens, as a cut part reads them."""
        self._count()
        return gather_sequence(x, self.length, self.peers)

    def add(self, y: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of what the ranks' parts wrote."""
        self._count()
        return scatter_sequence(y, self.peers)

    def split(self, x: Tensor) -> Tensor:
        """Return what the first block reads, of what is equal everywhere."""
        return split_sequence(x, self.peers)


class TensorParallel(Technique[Build]):
    """Split every matrix over a few ranks, so that each holds and multiplies a part of it."""

    sequence: bool = Field(default=True)
    """Cut residual stream and norms along the sequence, for the same bytes on the wire."""
    asynchronous: bool = False
    """Send parts of a matmul's input or result while others are multiplied; on GPUs of one host."""

    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.TENSOR
    axes: ClassVar[tuple[str, ...]] = (AXIS,)
    composes: ClassVar[tuple[str, ...]] = ("layouts", "runtime")
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:optimizer",
        "memory capacity:activations",
        "memory capacity:logits",
    )
    timed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        buys="parameters, gradients, optimizer state, logits and activations of a rank divided by "
        "mesh.tensor, and less work per token on each (derived)",
        costs="two collectives of tokens x dim numbers per attention and per MLP, forward and "
        "backward, that products wait for (derived)",
        helps="models too large for data parallelism with sharding, on GPUs of one node; latency "
        "of large blocks",
        hurts="small models, and ranks that are joined by a network instead of NVLink",
        source="arXiv 1909.08053; arXiv 2205.05198",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require several ranks, and whole groups of heads and hidden features for each."""
        ranks, model = context.plan.mesh.tensor, context.plan.model
        if ranks == 1:
            return Unsupported(
                "mesh.tensor = 1: there is nothing to split over", mend("mesh.tensor=2")
            )
        if self.asynchronous and (refusal := self._waits(context)):
            return refusal
        kv, ffn = model.resolved_kv_heads, model.resolved_ffn
        if model.pretrained or not (kv % ranks or ffn % ranks):
            return Supported()  # the shape of pretrained weights is checked when it is known
        what = f"{kv} key-value heads" if kv % ranks else f"{ffn} hidden features (model.ffn)"
        return Unsupported(
            f"{what} do not divide into mesh.tensor = {ranks} parts", _nearest(model, ranks)
        )

    def _waits(self, context: Context) -> Unsupported | None:
        """Return why matmuls would wait for collectives, if they would."""
        plan, key = context.plan, f"techniques.{self.name()}.asynchronous"
        plain = mend(f"{key}=false")
        if context.device != "cuda":
            return Unsupported(
                f"{key} = true needs NVIDIA GPUs, whose memory other ranks can read",
                plain,
                RefusalKind.DEVICE,
            )
        compiler = plan.techniques.get("torch_compile")
        if getattr(compiler, "backend", "") != "inductor":
            return Unsupported(
                f"{key} = true is done by inductor, and nothing is compiled by it",
                mend("+torch_compile", "techniques.torch_compile.backend=inductor") | plain,
                RefusalKind.COMBINATION,
            )
        if other := next((name for name in UNFUSED if name in plan.techniques), ""):
            return Unsupported(
                f"{key} = true overlaps matmuls with what they read and what is sent of them, and "
                f"{other} {UNFUSED[other]}",
                mend(f"-{other}") | plain,
                RefusalKind.COMBINATION,
            )
        if not self.sequence:
            return Unsupported(
                f"{key} = true overlaps all-gathers and reduce-scatters, which sequence = false "
                "has not",
                mend(f"techniques.{self.name()}.sequence=true") | plain,
            )
        own = plan.data.sequence_length // plan.mesh.context
        if own % plan.mesh.tensor:
            return Unsupported(
                f"{key} = true needs equal parts, and mesh.tensor = {plan.mesh.tensor} does not "
                f"divide {own} tokens",
                plain,
            )
        return None

    def predict(self, ledger: Ledger) -> Ledger:
        """Count one rank's share of matrices, activations and work."""
        ranks = ledger.sizes["tensor_ranks"]
        ledger = mask_of_heads(ledger, ranks)
        sizes = dict(ledger.sizes)
        kept = ledger.memory["parameters"].bytes
        trained, unsplit = sizes.get(TRAINED, 0.0), sizes["unsplit"] + sizes.get(UNSPLIT, 0.0)
        whole = FP32 * unsplit + sizes.get(SCALES, 0.0)
        left = learned = (whole + (kept - whole) / ranks) / kept
        if trained:  # adapters alone have gradients and states
            learned = (sizes[UNSPLIT] + (trained - sizes[UNSPLIT]) / ranks) / trained
        work = split_work(
            ledger, sequence=self.sequence, kept=learned, asynchronous=self.asynchronous
        )
        ledger = ledger.scaled(lambda name: name == "parameters", left)
        ledger = ledger.scaled(lambda name: name in STATE_LINES[1:], learned)
        ledger = ledger.scaled(
            lambda name: (
                name in ("logits", "head_cast", "head_weight_gradient")
                or name.split("/")[-1] in INSIDE_LINES
            ),
            1 / ranks,
        )
        ledger = split_lines(split_head(ledger, ranks))
        sizes, stream = dict(ledger.sizes), sizes["residual"]
        if self.asynchronous:  # torch's workspace: what is sent of one matmul, and what comes
            ledger = ledger.with_line(
                "symmetric_memory", Line(2 * stream / ranks, ("loss", "turn", "backward"))
            )
        if self.sequence:
            between = ("/residual", "/stream")
            ledger = ledger.scaled(lambda name: name.endswith(between), 1 / ranks)
            results = gathered_results(sizes)
            for name, line in ledger.memory.items():  # what is gathered from a norm is kept whole
                if (end := name.split("/")[-1]) in results:
                    whole = results[end] * stream
                    bytes_ = whole + (line.bytes - whole) / ranks
                    ledger = ledger.with_line(name, replace(line, bytes=bytes_))
            sizes |= {"residual": stream / ranks, "written": stream}
        sizes |= {name: sizes[name] / ranks for name in INSIDE_SIZES if name in sizes}
        sizes[COMMUNICATORS] = sizes.get(COMMUNICATORS, 0.0) + 1
        flops = {phase: count / ranks for phase, count in ledger.flops.items()}
        cut = {
            n: replace(m, share=m.share / ranks)
            for n, m in ledger.matrices.items()
            if n != "position.weight" and not is_unsplit(n)
        }
        return replace(ledger, sizes=sizes, flops=flops, work=work).with_matrices(cut)

    def apply(self, build: Build) -> None:
        """Cut the parts, the embedding and the head, and put collectives around them."""
        model, peers = build.model, peers_of(build.world.group(AXIS))
        tokens = (SplitTokens if self.sequence else WholeTokens)(peers)
        build.notes[self.name()] = tokens
        if self.asynchronous:
            share_memory(build.world.group(AXIS))
            build.runtime.append(compiling)
            build.notes[LAUNCHED] = dict(COUNTS)
        for layer, block in model.blocks.items():
            for kind in ("mixer", "mlp"):
                name, part = f"blocks.{layer}.{kind}", block.get_submodule(kind)
                self._cut_part(build, name, part, peers)
                part.forward = _around(part, tokens)
        self._cut_ends(build, peers)
        _split_model(model, tokens)

    def _cut_part(self, build: Build, name: str, part: nn.Module, peers: Peers) -> None:
        """Record the layout of every parameter of a mixer or an MLP."""
        cut, ranks = dict(_cuts(name, part)), peers.ranks
        units = getattr(part, "units", 1)
        if not cut or units % ranks:
            reason = f"has {units} groups of features" if cut else "does not say how it is split"
            fits = gcd(units, ranks) if cut else 1
            raise ConfigError(
                f"mesh.tensor = {ranks}, and {name} ({type(part).__name__}) {reason}",
                mend(f"mesh.tensor={fits}") | WHOLE if fits > 1 else WHOLE,
            )
        rows = getattr(part, "rows", ())
        for row in rows:
            if isinstance(linear := part.get_submodule(row), DoraLinear):
                linear.add_up = lambda squares: all_reduce(squares, "sum", peers)
        biases = [f"{row}.bias" for row in rows]
        for key, _ in part.named_parameters():
            full = f"{name}.{key}"
            if key in cut:
                _split(build, full, cut[key])
            elif self.sequence or key not in biases:
                _partial(build, full)

    def _cut_ends(self, build: Build, peers: Peers) -> None:
        """Cut embedding and head along the vocabulary; what stands between sees slices."""
        model, vocab = build.model, build.config.vocab
        offset, count = share(vocab, peers.ranks, peers.place)
        model.embed.forward = _embed(model.embed, offset, count, peers)  # type: ignore[method-assign]
        if isinstance(model.pairs, PairEmbedding):
            table, (first, rows) = (
                model.pairs.embed,
                share(model.pairs.rows, peers.ranks, peers.place),
            )
            table.forward = _embed(table, first, rows, peers)  # type: ignore[method-assign]
        model.head.vocabulary = ShardedVocabulary(offset, count, vocab, peers)
        for name, _ in model.named_parameters():
            place = name.split(".")
            if name in ("embed.weight", "head.weight", "pairs.embed.weight"):
                _split(build, name, 0)
            elif place[0] == "value_embed":  # each rank has the values of its heads
                _split(build, name, 1)
            elif place[0] == "norm" or (place[0] == "blocks" and place[2] not in ("mixer", "mlp")):
                if self.sequence:
                    _partial(build, name)
            elif place[0] not in ("smear", "position", "blocks"):
                raise ConfigError(
                    f"{self.name()} does not know how the parameter {name!r} is used",
                    WHOLE,
                )

    def active(self, build: Build) -> Evidence:
        """Report this rank's rows of what is whole elsewhere, and parts that met peers."""
        world, model = build.world, build.model
        tokens: WholeTokens = build.notes[self.name()]
        split = {n: p for n, p in model.named_parameters() if AXIS in build.layouts[n].split}
        here = sum(p.numel() for p in split.values())
        whole = sum(torch.Size(build.layouts[n].shape).numel() for n in split)
        cut = all(tuple(p.shape) == build.layouts[n].offsets(world)[1] for n, p in split.items())
        ran = "in compiled code" if build.compiled else f"{tokens.calls} calls of collectives"
        works = tokens.calls > 0 or bool(build.compiled)
        numbers = {"held": here, "whole": whole, "calls": tokens.calls}
        if self.asynchronous:
            launched = since(build.notes[LAUNCHED], PREFIX)
            numbers |= {name: launched.get(name, 0) for name in (GATHERS, SCATTERS)}
            works = numbers[GATHERS] > 0 and numbers[SCATTERS] > 0
            ran += f"; {numbers[GATHERS]} matmuls ran while their input was gathered, and "
            ran += f"{numbers[SCATTERS]} while their result was scattered"
        return Evidence(
            active=cut and here < whole and works,
            detail=f"this rank holds {here:,} of {whole:,} numbers of {len(split)} split "
            f"parameters; {ran}",
            numbers=numbers,
        )


# --- layouts ---------------------------------------------------------------------------------


def _cuts(name: str, part: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield each parameter of a part that is cut, by its name there, and along which dimension."""
    for children, attribute, usual in (
        ("columns", "column_parameters", COLUMNS),
        ("rows", "row_parameters", ROWS),
    ):
        yield from getattr(part, attribute, {}).items()
        for child in getattr(part, children, ()):
            linear = part.get_submodule(child)
            known = {key for key, _ in linear.named_parameters()} <= set(COLUMNS)
            if not known and not hasattr(linear, attribute):
                raise ConfigError(
                    f"{name}.{child} ({type(linear).__name__}) does not say how its parameters "
                    "are split over mesh.tensor",
                    WHOLE,
                )
            for key, dim in getattr(linear, attribute, usual).items():
                yield f"{child}.{key}", dim


def _split(build: Build, name: str, dim: int) -> None:
    layout = build.layouts[name]
    build.layouts[name] = replace(layout, split={**layout.split, AXIS: dim})


def _partial(build: Build, name: str) -> None:
    layout = build.layouts[name]
    build.layouts[name] = replace(layout, partial={*layout.partial, AXIS})


def _nearest(model: ModelConfig, ranks: int) -> Remedy:
    """Return the largest split below `ranks` that fits, or else a model that does."""
    both = divisors(gcd(model.resolved_kv_heads, model.resolved_ffn))
    fit = max(n for n in both if n == 1 or n < ranks)
    if fit > 1:
        return mend(f"mesh.tensor={fit}")
    kv, ffn = model.resolved_kv_heads, model.resolved_ffn
    wide = [g for g in divisors(model.heads) if g % ranks == 0]
    if kv % ranks and not wide:
        return mend(f"model.heads={-(-model.heads // ranks) * ranks}")
    if kv % ranks:
        return mend(f"model.kv_heads={min(wide, key=lambda g: abs(g - kv))}")
    return mend(f"model.ffn={-(-ffn // ranks) * ranks}")


# --- forward passes --------------------------------------------------------------------------


def _around(part: nn.Module, tokens: WholeTokens) -> Callable[..., Tensor]:
    """Put the part's forward between collectives; its last bias is added once, after them."""
    forward = part.forward
    biased = [r for r in getattr(part, "rows", ()) if part.get_submodule(r).bias is not None]
    for child in biased:
        linear = part.get_submodule(child)
        if type(linear) not in (nn.Linear, LoraLinear, DoraLinear) or len(biased) > 1:
            raise ConfigError(
                f"the bias of {child!r} ({type(linear).__name__}) in {type(part).__name__} cannot "
                "be added after its parts are summed",
                mend("model.bias=false"),
            )
        linear.forward = _matmul_of(linear)  # type: ignore[method-assign]
    if not biased:
        return lambda x, *shared: tokens.add(forward(tokens.widen(x), *shared))
    last = part.get_submodule(biased[0])
    assert isinstance(last, nn.Linear)

    def with_bias(x: Tensor, *shared: Any) -> Tensor:
        y = tokens.add(forward(tokens.widen(x), *shared))
        return y + last.bias.to(y.dtype)  # rounded like the sum, as a linear does

    return with_bias


def _matmul_of(linear: nn.Linear) -> Callable[..., Tensor]:
    """Return what a linear computes but for its bias."""
    if isinstance(linear, LoraLinear):
        return linear.matmul
    return lambda x: F.linear(x, linear.weight)


def _embed(embed: nn.Embedding, offset: int, count: int, peers: Peers) -> Callable[..., Tensor]:
    """Embed ids of which this rank holds [offset, offset + count)."""

    def forward(ids_BT: Tensor) -> Tensor:
        place_BT = ids_BT - offset
        elsewhere_BT = (place_BT < 0) | (place_BT >= count)
        x_BTD = F.embedding(place_BT.masked_fill(elsewhere_BT, 0), embed.weight)
        return sum_forward(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0), peers)

    return forward


def _split_model(model: Any, tokens: WholeTokens) -> None:
    """Split what enters the decoder, and make whole what leaves it; heads keep their slopes."""
    enter, leave, share_, dim = model.enter, model.leave, model.share, model.config.dim

    def share_with_length(rows: Any, length: int, cache: Any = None) -> Any:
        tokens.length = length
        return share_(rows, length, cache)

    model.share = share_with_length
    model.mask = model.mask.of_heads(tokens.peers.place, tokens.peers.ranks)
    model.value_features //= tokens.peers.ranks
    model.enter = lambda ids, shared: tokens.split(enter(ids, shared))
    model.leave = lambda x: tokens.widen(leave(x))
    if isinstance(tokens, SplitTokens):
        model.wire_shape = lambda rows, length: (rows, local_length(length, tokens.peers), dim)
