"""Measure on a CPU, beside its rates, the operations of a small decoder's step.

On a CPU a norm, an activation or a loss is bound by its arithmetic as often as by memory, and a
small tensor stays in a cache. So the modules of a decoder themselves are timed, forward and
backward, at the sizes that small models have there, each beside the bytes that the ledger counts.
Whole steps of small decoders (probes/steps.py) come last.

Shapes: B rows, T tokens, N = B x T, D features, V entries of the vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core import kept_memory
from headrace.costs.rates import (
    Half,
    LinearMatmul,
    MatmulPoint,
    PieceRates,
    Precision,
    StreamPoint,
)
from headrace.kernels.cpu_units import bf16_units
from headrace.model.mlp import SwiGLU
from headrace.model.norm import LayerNorm, RMSNorm
from headrace.model.position import RotaryPosition, rotate
from headrace.optim.adamw import clip_factor, gradient_norm, make_adamw, scale_gradients
from headrace.plan.plan import OptimizerConfig
from headrace.probes.points import (
    DTYPES,
    LINKED,
    MOVED,
    ROWS,
    SQUARES,
    Probe,
    Readings,
    attention_probe,
    grid,
    linking,
    matmul_probe,
    moving,
    precisions,
)
from headrace.probes.small_decoders import Small, decoder, random_ids, weighted
from headrace.probes.steps import step_probe, thread_counts

LINEAR_MATMULS: tuple[LinearMatmul, ...] = ("result", "input", "weight")
"""A linear layer's matmuls: its result, and the gradients of its input and of its weight."""
LINEARS = (
    (4096, 384, 128), (4096, 768, 256), (4096, 2048, 128), (1024, 128, 128), (4096, 128, 352),
    (2048, 1152, 384), (512, 704, 128), (2048, 256, 704), (1024, 192, 64), (2048, 4096, 256),
    (2048, 384, 1024), (512, 128, 512), (8192, 128, 128), (512, 2048, 384), (256, 256, 64),
    (1024, 8192, 384),
)  # fmt: skip
"""Tokens, features out and features in of timed linear layers, the most informative first."""
HALF_LINEARS = LINEARS[0], LINEARS[3], LINEARS[7], LINEARS[9], LINEARS[11]
"""The linear layers of `LINEARS` that are timed in bf16 too."""
HALVES: tuple[Half, ...] = ("autocast", "parameters")
LEAST = (64, 96, 32)
"""Tokens, features out and in of a linear layer whose time is mostly its fixed cost."""
WHOLE = ("embedding", "gradients", "clip", "update")
"""The pieces of a step that a compiler leaves as they are."""


SIZES = (
    Small(128, 4, 4, 2048, 32, 128), Small(64, 2, 2, 512, 8, 64), Small(384, 6, 6, 6144, 16, 128),
    Small(256, 4, 4, 1024, 8, 256),
)  # fmt: skip
"""The small decoders at whose sizes each piece is timed."""
STEPS = (
    Small(128, 2, 4, 2048, 32, 128), Small(256, 2, 4, 4096, 4, 256), Small(64, 2, 2, 1024, 16, 64),
    Small(384, 2, 6, 4096, 4, 128), Small(128, 2, 4, 2048, 1, 128), Small(256, 2, 4, 4096, 1, 256),
)  # fmt: skip
"""The small decoders whose whole steps are timed; the first and third are compiled too. The last
two have a row alone, as small micro-batches have, whose steps are the longest beside their pieces
(LOG.md)."""


def in_order(readings: Readings) -> Iterator[Probe]:
    """Yield all probes of a CPU, the most important first: its rates and a step's operations."""
    main, *others = precisions(readings)
    gpus = (f"attention by {kernel}" for kernel in ("cudnn", "efficient", "flash4"))
    readings.absent |= dict.fromkeys(gpus, "a kernel of NVIDIA GPUs")
    readings.absent["attention by flex"] = "on a CPU it has no backward pass"
    moved = [moving(readings, size) for size in MOVED["cpu"]]
    linked = [linking(readings, n, to_host) for n in LINKED["cpu"] for to_host in (True, False)]
    small, large = SQUARES["cpu"]
    for probe in (*moved[:2], *linked, matmul_probe(readings, main, small, small, small)):
        probe.must = True
        yield probe
    yield from (matmul_probe(readings, other, small, small, small) for other in others)
    rows = [attention_probe(readings, "flash", one, True) for one in ROWS["cpu"]]
    yield from (rows[0], *moved[2:])
    yield from _of_a_step(readings, rows[1:])
    yield attention_probe(readings, "flash", (8, *ROWS["cpu"][0][1:]), False)
    yield attention_probe(readings, "math", (8, *ROWS["cpu"][0][1:]), True)
    yield from (matmul_probe(readings, main, large, large, large), *grid(readings, main, 0))
    yield from (matmul_probe(readings, other, large, large, large) for other in others)


def _of_a_step(readings: Readings, attention: list[Probe]) -> Iterator[Probe]:
    """Yield a step's probes, the most important first: matmuls, attention, pieces and wholes."""
    yield from linear_probes(readings, *LINEARS[0])
    yield from _piece_probes(readings, SIZES[0])
    yield step_probe(readings, STEPS[0])
    for shape in (*LINEARS[1:8], LEAST):
        yield from linear_probes(readings, *shape)
    yield from attention[:3]
    for small in SIZES[1:]:
        yield from _piece_probes(readings, small)
    for small in STEPS[1:]:
        yield step_probe(readings, small)
    yield from _of_halves(readings)
    yield step_probe(readings, STEPS[0], compiled=True)
    keeping = STEPS[:2] if kept_memory.CAN_KEEP else ()
    yield from (step_probe(readings, small, keeps=True) for small in keeping)
    yield from (step_probe(readings, STEPS[0], threads=count) for count in thread_counts())
    yield from attention[3:]
    for shape in LINEARS[8:]:
        yield from linear_probes(readings, *shape)
    yield step_probe(readings, STEPS[2], compiled=True)


def _of_halves(readings: Readings) -> Iterator[Probe]:
    """Yield the probes of bf16; none where the CPU only emulates it, which is slower."""
    if not bf16_units():
        return
    for shape in HALF_LINEARS:
        yield from linear_probes(readings, *shape, "bf16")
    for small in (STEPS[0], STEPS[3], STEPS[2]):
        yield from (step_probe(readings, small, half=half) for half in HALVES)


# --- matmuls ---------------------------------------------------------------------------------


def linear_probes(
    readings: Readings, tokens: int, outer: int, inner: int, precision: Precision = "fp32"
) -> Iterator[Probe]:
    """Yield the probes of a linear layer's three matmuls, each laid out as by autograd."""
    dtype = DTYPES[precision]

    def probe(matmul: LinearMatmul, sizes: tuple[int, int, int]) -> Probe:
        def run() -> None:
            sides = ((tokens, inner), (outer, inner), (tokens, outer))
            x, w, g = (readings.random(*side, dtype=dtype) for side in sides)
            calls: dict[LinearMatmul, Callable[[], Tensor]] = {
                "result": lambda: F.linear(x, w),
                "input": lambda: g @ w,
                "weight": lambda: g.t() @ x,
            }
            point = MatmulPoint(*sizes, readings.clock.seconds(calls[matmul]))
            readings.linears.setdefault((matmul, precision), []).append(point)

        work, needed = 2.0 * tokens * outer * inner, 8.0 * tokens * (outer + inner)
        label = "x".join(map(str, sizes))
        beside = "" if precision == "fp32" else f" in {precision}"
        return Probe(f"linears' {matmul}s{beside}", label, work, needed, run)

    yield probe("result", (tokens, outer, inner))
    yield probe("input", (tokens, inner, outer))
    yield probe("weight", (outer, inner, tokens))


# --- pieces ----------------------------------------------------------------------------------


def _piece_probes(readings: Readings, small: Small) -> Iterator[Probe]:
    """Yield a probe for each kind of operation beside the matmuls; it times all its phases."""
    for name, make in MAKERS.items():

        def run(name: str = name, make: Maker = make) -> None:
            for phase, call in make(readings, small).items():
                moved = StreamPoint(small.bytes_of(f"{name}/{phase}"), readings.clock.seconds(call))
                readings.pieces.setdefault(f"{name}/{phase}", []).append(moved)

        at = f"{small.tokens} tokens of {small.dim}, vocabulary {small.vocab}"
        work = float(small.bytes_of(f"{name}/{PHASES.get(name, 'forward')}"))
        yield Probe(f"steps' {name}", at, work, 4 * work, run)


Calls = dict[str, Callable[[], Any]]
"""Phase of a step -> the call that is timed for it."""
Maker = Callable[[Readings, Small], Calls]
PHASES = {"gradients": "backward", "clip": "optimizer", "update": "optimizer"}
"""Piece that has a single phase other than forward and backward -> that phase."""


def _both(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Calls:
    """Return a forward pass that keeps what its backward pass needs, and the latter alone."""
    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return {"forward": forward, "backward": backward}


def _norms(readings: Readings, small: Small) -> Calls:
    return _normed(readings, small, RMSNorm(small.dim, 1e-5))


def _layer_norms(readings: Readings, small: Small) -> Calls:
    return _normed(readings, small, LayerNorm(small.dim, 1e-5))


def _normed(readings: Readings, small: Small, module: nn.Module) -> Calls:
    norm = weighted(readings, module)
    x = readings.random(small.rows, small.length, small.dim).requires_grad_()
    return _both(lambda: norm(x), [x, *norm.parameters()])


def _qk_norm(readings: Readings, small: Small) -> Calls:
    """Return the norm of queries and keys as one call, since both have as many heads."""
    head = small.config().resolved_head_dim
    norm = weighted(readings, RMSNorm(head, 1e-5))
    x = readings.random(small.rows, small.length, 2 * small.heads, head).requires_grad_()
    return _both(lambda: norm(x), [x, norm.weight])


def _residual(readings: Readings, small: Small) -> Calls:
    """Return the sum of a residual; backward sums the two gradients that meet there."""
    x, delta = (readings.random(small.tokens, small.dim) for _ in range(2))
    return {"forward": lambda: x + delta, "backward": lambda: x + delta}


def _rope(readings: Readings, small: Small) -> Calls:
    """Return the rotation of queries and keys, cut from one matmul's result as in the mixer."""
    config, B, T = small.config(), small.rows, small.length
    head, heads = config.resolved_head_dim, config.heads
    grouped = readings.random(B, T, heads, 3, head).requires_grad_()
    rotation = RotaryPosition(config).prepare(torch.arange(T)[None])

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = grouped.split([1, 1, 1], dim=3)
        turned = rotate(q.reshape(B, T, -1, head), rotation)
        return turned, rotate(k.squeeze(3), rotation), v.squeeze(3)

    out = forward()
    given = [torch.randn_like(x) for x in out]
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, grouped, given, retain_graph=True),
    }


def _activation(readings: Readings, small: Small) -> Calls:
    mlp = SwiGLU(small.config(), 0)
    mlp.gate_up, mlp.down = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    x = readings.random(small.rows, small.length, 2 * small.config().resolved_ffn).requires_grad_()
    return _both(lambda: mlp(x), [x])


def _plain_activation(readings: Readings, small: Small) -> Calls:
    """Return the calls of GPT-2's activation, which has no gate."""
    x = readings.random(small.rows, small.length, small.config().resolved_ffn).requires_grad_()
    return _both(lambda: F.gelu(x), [x])


def _loss(readings: Readings, small: Small) -> Calls:
    logits = readings.random(small.tokens, small.vocab).requires_grad_()
    targets = random_ids(readings, small, small.tokens)
    return _both(lambda: F.cross_entropy(logits, targets, reduction="sum"), [logits])


def _embedding(readings: Readings, small: Small) -> Calls:
    weight = readings.random(small.vocab, small.dim).requires_grad_()
    ids = random_ids(readings, small, small.rows, small.length)
    return _both(lambda: F.embedding(ids, weight), [weight])


def _gradients(readings: Readings, small: Small) -> Calls:
    """Return the call that adds a later micro-batch's gradients to those there are."""
    accumulators = [readings.random(*p.shape) for p in decoder(readings, small).parameters()]
    more = [x.clone() for x in accumulators]

    def add() -> None:
        for x, y in zip(accumulators, more, strict=True):
            x.add_(y)

    return {"backward": add}


def _clip(readings: Readings, small: Small) -> Calls:
    grads = [readings.random(*p.shape) for p in decoder(readings, small).parameters()]
    return {"optimizer": lambda: scale_gradients(grads, clip_factor(gradient_norm(grads), 1.0))}


def _update(readings: Readings, small: Small) -> Calls:
    model = decoder(readings, small)
    for parameter in model.parameters():
        parameter.grad = readings.random(*parameter.shape)
    return {"optimizer": make_adamw(OptimizerConfig(), dict(model.named_parameters())).step}


MAKERS: dict[str, Maker] = {
    "norms": _norms, "activation": _activation, "rope": _rope, "loss": _loss, "qk_norm": _qk_norm,
    "residual": _residual, "update": _update, "clip": _clip, "embedding": _embedding,
    "gradients": _gradients, "layer_norms": _layer_norms, "plain_activation": _plain_activation,
}  # fmt: skip
"""Piece, by the name of its work in costs/decoder_work.py -> what makes its timed calls."""
ALIKE = {"residual": "residual_out"}
"""A timed piece -> another piece, which is priced with the same times."""


def pieces_of(readings: Readings) -> tuple[PieceRates, ...]:
    """Return the rates of each measured piece, by "piece/phase"."""
    points = dict(readings.pieces)
    for name, twin in ALIKE.items():
        points |= {
            f"{twin}/{phase}": points[f"{name}/{phase}"]
            for phase in ("forward", "backward")
            if f"{name}/{phase}" in points
        }
    return tuple(
        PieceRates(name, name.partition("/")[0] in WHOLE, tuple(moved))
        for name, moved in points.items()
    )
