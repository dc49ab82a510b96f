"""What each rank of the ring's tests does: many cases in one world, against whole rows in fp64.

Runs in a file of its own, so that a forked process can be told to call its functions.
"""

import itertools
import json
import random
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from headrace.kernels.block_attention import Kernel
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.parallel.ring import Ring, RingMask, ring_attention

K = 8


class Case(NamedTuple):
    """A case is one attention over whole rows."""

    rows: int
    chunk: int
    """tokens of a chunk; a row has two for every rank"""
    heads: int
    groups: int
    spec: MaskSpec
    every: int = 5
    """tokens of a document"""


CAUSAL, DOCUMENT = MaskSpec(), MaskSpec(document=True)
CASES = {
    "causal": Case(2, 6, 4, 4, CAUSAL),
    "grouped": Case(3, 5, 6, 2, CAUSAL),
    "one token a chunk": Case(1, 1, 2, 1, CAUSAL),
    "documents across chunks": Case(3, 6, 4, 2, DOCUMENT, every=8),
    "short documents": Case(2, 7, 2, 2, DOCUMENT, every=3),
    "narrow window": Case(2, 6, 4, 2, MaskSpec(window=3)),
    "window of a chunk": Case(1, 6, 2, 1, MaskSpec(window=6)),
    "wide window": Case(1, 5, 3, 3, MaskSpec(window=13)),
    "window and documents": Case(5, 4, 2, 1, MaskSpec(window=6, document=True), every=9),
    "window of two tokens": Case(1, 4, 2, 1, MaskSpec(window=2)),
    "both ways": Case(2, 3, 2, 2, MaskSpec(causal=False)),
    "both ways in a window": Case(2, 5, 2, 1, MaskSpec(causal=False, window=4)),
    "both ways in documents": Case(2, 5, 2, 1, MaskSpec(causal=False, document=True), every=7),
}


class Inputs(NamedTuple):
    """Whole rows in fp64, the same on every rank, and what attention gives and takes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    segments_BT: Tensor


def make(case: Case, ranks: int, seed: int = 0) -> Inputs:
    """Make the rows of a case."""
    draw = torch.Generator().manual_seed(seed)
    T = 2 * ranks * case.chunk
    q, k, v, do = (
        torch.randn(case.rows, T, heads, K, generator=draw, dtype=torch.float64)
        for heads in (case.heads, case.groups, case.groups, case.heads)
    )
    shift_B1 = torch.arange(case.rows)[:, None]
    return Inputs(q, k, v, do, ((torch.arange(T)[None] + shift_B1) // case.every).int())


def whole(case: Case, inputs: Inputs) -> list[Tensor]:
    """Compute ordinary attention over whole rows: output, and gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    T = q.size(1)
    mask = allowed(case.spec, Rows(torch.arange(T)[None], inputs.segments_BT), T)
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    out.backward(inputs.do)
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def part(x_BT: Tensor, rank: int, ranks: int) -> Tensor:
    """Return this rank's two chunks, the zig-zag by hand."""
    chunks = x_BT.chunk(2 * ranks, 1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 1)


def mask_of(ring: Ring, case: Case, inputs: Inputs) -> RingMask:
    """The ring's mask; every rank brings its own documents only."""
    own = part(inputs.segments_BT, ring.rank, ring.ranks)
    segments = ring.gather(own) if case.spec.document else None
    return RingMask(case.spec.causal, case.spec.window, segments)


def around(
    ring: Ring,
    case: Case,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    attend: Callable[..., Tensor] = ring_attention,
    device: str = "cpu",
) -> list[Tensor]:
    """Return the ring's output and gradients on this rank."""
    mine = [part(x, ring.rank, ring.ranks).to(device, dtype) for x in inputs[:4]]
    q, k, v = (x.requires_grad_() for x in mine[:3])
    on_device = inputs._replace(segments_BT=inputs.segments_BT.to(device))
    out = attend(ring, q, k, v, mask_of(ring, case, on_device))
    out.backward(mine[3])
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def distance(found: list[Tensor], right: list[Tensor], ring: Ring) -> float:
    """Return the largest difference over the largest number, of the worst tensor."""
    worst = 0.0
    for x, y in zip(found, right, strict=True):
        assert x.isfinite().all()
        mine = part(y, ring.rank, ring.ranks)
        assert x.shape == mine.shape
        worst = max(worst, float((x.cpu() - mine).abs().max() / y.abs().max().clamp(min=1e-3)))
    return worst


# --- what is checked -------------------------------------------------------------------------


def equal(ring: Ring) -> dict[str, Any]:
    """Compare every case in fp32, twice."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        inputs = make(case, ring.ranks)
        once, again = (around(ring, case, inputs) for _ in range(2))
        found[name] = distance(once, whole(case, inputs), ring)
        same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        found[f"{name}, again"] = 0.0 if same else 1.0
    return found


def asked(ring: Ring) -> dict[str, Any]:
    """Compute blocks by the kernel that was asked for, and by no other."""
    case, found = CASES["grouped"], {}
    kernels: tuple[Kernel, ...] = ("plain", "flash_cpu")
    for kernel in kernels:
        own = Ring(ring.group, kernel)
        inputs = make(case, ring.ranks)
        found[f"by {kernel}"] = distance(around(own, case, inputs), whole(case, inputs), ring)
        found[f"by {kernel} alone"] = float(own.launched != {kernel})
    return found


def low_precision(ring: Ring) -> dict[str, Any]:
    """Compare fp32 inputs under autocast, and inputs in bf16."""
    found = {}
    for name in ("causal", "grouped", "documents across chunks", "wide window"):
        case = CASES[name]
        inputs, right = make(case, ring.ranks), whole(case, make(case, ring.ranks))
        with torch.autocast("cpu", torch.bfloat16):
            found[f"{name}, autocast"] = distance(around(ring, case, inputs), right, ring)
        found[f"{name}, bf16"] = distance(
            around(ring, case, inputs, dtype=torch.bfloat16), right, ring
        )
    return found


def without_gradient(ring: Ring) -> dict[str, Any]:
    """Evaluate: the output is the same, and nothing is kept."""
    case = CASES["grouped"]
    inputs = make(case, ring.ranks)
    q, k, v = (part(x, ring.rank, ring.ranks).float().requires_grad_() for x in inputs[:3])
    with torch.no_grad():
        out = ring_attention(ring, q, k, v, mask_of(ring, case, inputs))
    assert not out.requires_grad
    return {"no gradient": distance([out], whole(case, inputs)[:1], ring)}


def layers(
    x: Tensor,
    weights: list[Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    wrap: Callable[..., Tensor],
) -> Tensor:
    """Stack several attention layers."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).chunk(3, -1)
        return x + attend(q, k, v)

    for weight in weights:
        x = wrap(layer, x, weight)
    return x


def deep(ring: Ring) -> dict[str, Any]:
    """Run three layers, two micro-batches in flight, with and without recomputation."""
    case, found = CASES["causal"], {}
    inputs = [make(case, ring.ranks, seed) for seed in (1, 2)]
    draw = torch.Generator().manual_seed(7)
    weights = [torch.randn(K, 3 * K, generator=draw, dtype=torch.float64) / 3 for _ in range(3)]

    def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def plain(f: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        return f(*arguments)

    def again(f: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        return checkpoint(f, *arguments, use_reentrant=False)  # type: ignore[return-value]

    def run(cut: Callable[[Tensor], Tensor], attend: Any, wrap: Any) -> list[Tensor]:
        mine = [cut(w).clone().requires_grad_() for w in weights]
        xs = [cut(i.q).clone().requires_grad_() for i in inputs]
        outs = [layers(x, mine, attend, wrap) for x in xs]
        for out, i in reversed(list(zip(outs, inputs, strict=True))):
            out.backward(cut(i.do))
        return [*(o.detach() for o in outs), *(x.grad for x in xs), *(w.grad for w in mine)]  # type: ignore[list-item]

    right = run(lambda x: x, ordinary, plain)

    def mine(x: Tensor) -> Tensor:
        return (part(x, ring.rank, ring.ranks) if x.ndim == 4 else x).float()

    for name, wrap in (("deep", plain), ("deep, recomputed", again)):
        before = ring.traffic.calls
        out = run(mine, lambda *qkv: ring_attention(ring, *qkv, RingMask()), wrap)
        for grad in out[4:]:
            dist.all_reduce(grad)
        found[name] = distance(out[:4], right[:4], ring)
        for x, y in zip(out[4:], right[4:], strict=True):
            found[name] = max(found[name], float((x - y).abs().max() / y.abs().max()))
        expected = 6 if wrap is plain else 12
        found[f"{name}, calls"] = abs(ring.traffic.calls - before - expected)
    return found


def compiled(ring: Ring) -> dict[str, Any]:
    """Compile one graph without a break, and compare its numbers with eager code."""
    found: dict[str, Any] = {}
    for name in ("grouped", "window and documents"):
        case = CASES[name]
        inputs = make(case, ring.ranks)
        torch.compiler.reset()

        def attend(r: Ring, q: Tensor, k: Tensor, v: Tensor, mask: RingMask) -> Tensor:
            return 2 * ring_attention(r, q.sin(), k, v * 2, mask)

        how = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
        before = ring.traffic.calls
        fast = around(ring, case, inputs, attend=torch.compile(attend, **how))  # type: ignore[call-overload]
        found[f"{name}, compiled calls"] = abs(ring.traffic.calls - before - 1)
        slow = around(ring, case, inputs, attend=attend)
        same = all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(fast, slow, strict=True))
        found[f"{name}, compiled"] = 0.0 if same else 1.0
    return found


def out_of_step(ring: Ring) -> dict[str, Any]:
    """Let ranks arrive at any time: they neither deadlock nor mix their blocks."""
    case, late = CASES["documents across chunks"], random.Random(ring.rank)
    worst = 0.0
    for seed in range(12):
        inputs = make(case, ring.ranks, seed)

        def attend(*arguments: Any) -> Tensor:
            time.sleep(late.random() / 50)
            return ring_attention(*arguments)

        worst = max(
            worst, distance(around(ring, case, inputs, attend=attend), whole(case, inputs), ring)
        )
    return {"out of step": worst}


def traffic(ring: Ring) -> dict[str, Any]:
    """What was sent and computed is what the shapes say."""
    case = CASES["causal"]
    inputs, mine = make(case, ring.ranks), Ring(ring.group)
    around(mine, case, inputs)
    t, R = 2 * case.chunk, ring.ranks
    kv = 2 * case.rows * t * case.groups * K * 4
    wanted = (R - 1) * kv + (R - 1) * kv + R * kv  # forward, again backward, their gradients
    found: dict[str, Any] = {"bytes": abs(mine.traffic.bytes_sent - wanted)}
    found["blocks"] = abs(mine.traffic.blocks - 2 * R) + mine.traffic.skipped
    narrow = Ring(ring.group)
    case = CASES["narrow window"]  # reaches into the chunk before only
    around(narrow, case, make(case, ring.ranks))
    seen = {ring.rank + d for d in (-1, 0, 1)} & set(range(R))
    found["skipped"] = abs(narrow.traffic.skipped - 2 * (R - len(seen)))
    return found


CHECKS = (equal, asked, low_precision, without_gradient, deep, compiled, out_of_step, traffic)


def on_gpus(ring: Ring) -> dict[str, Any]:
    """Run every case through NCCL and the GPU's kernels, in fp32 and bf16, eager and compiled."""
    torch.cuda.set_device(ring.rank)
    found: dict[str, Any] = {}
    how = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
    compiled = torch.compile(ring_attention, **how)  # type: ignore[call-overload]
    for name, case in CASES.items():
        inputs = make(case, ring.ranks)
        right = whole(case, inputs)
        for dtype, attend in itertools.product((torch.float32, torch.bfloat16), range(2)):
            torch.compiler.reset()
            out = around(
                ring,
                case,
                inputs,
                dtype=dtype,
                device="cuda",
                attend=compiled if attend else ring_attention,
            )
            key = f"{name}, {str(dtype).split('.')[1]}{', compiled' if attend else ''}"
            found[key] = distance(out, right, ring)
    asked: tuple[Kernel, ...] = ("cudnn", "flash")
    for kernel in asked:
        own, case = Ring(ring.group, kernel), Case(2, 64, 4, 2, CAUSAL)
        inputs = make(case, ring.ranks)
        out = around(own, case, inputs, dtype=torch.bfloat16, device="cuda")
        found[f"by {kernel}, bfloat16"] = distance(out, whole(case, inputs), ring)
        assert own.launched == {kernel}
    return found


def check_gpus(folder: str) -> None:
    """`on_gpus` on as many GPUs; rank r writes `gpu-r.json`."""
    _check(folder, "cpu:gloo,cuda:nccl", [on_gpus], "gpu")


def check(folder: str) -> None:
    """Run all checks; rank r writes `RANKS-r.json`: a number for each, 0 where all is well."""
    _check(folder, "gloo", CHECKS, "")


def _check(folder: str, backend: str, checks: Sequence[Any], name: str) -> None:
    dist.init_process_group(backend)
    ring = Ring(dist.group.WORLD)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for function in checks:
        try:
            found |= function(ring)
        except Exception:
            found[function.__name__] = traceback.format_exc()
    Path(folder, f"{name or ring.ranks}-{ring.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
