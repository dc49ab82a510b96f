"""Predict what the caching allocator would reserve for a plan: replay its ledger by tensors.

The ledger says which bytes are held at which instant of a step. Here they become tensors in the
order in which a step makes and frees them: block by block forward, the head, block by block
backward with gradients in the place of activations, the update. `costs/allocator.py` does with them
what torch's allocator would.

Three steps are replayed, since what a run reserves is decided in the second. The optimizer's state
comes into being at the end of the first, in the smallest free blocks that hold it: those of
activations. So the second forward pass has too few of them, and its last tensors are cut from the
largest segment that is free, which was the logits'. The logits then need another one. Reserved less
allocated bytes are so most of a logits tensor, less the state: 2.9 GiB at 160m, of 26.

What a step allocates beside the ledger's lines, for a moment or for good, is counted here:
workspaces of cuBLAS, which count as allocated, what eager operations make on their way, casts to 8
bits, and the tensors of torch's own loss. A recording of CUDA graphs has a pool of its own, which
nothing else may use: states do not break it up, and what its blocks hand back stays in it. Several
streams are left out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from headrace.costs.allocator import Allocator, MemoryBlock, OutOfMemory
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Attention, Stream

MIB = 2**20
WORKSPACES = 2
"""Workspaces of cuBLAS: one of the thread that goes forward, and one of autograd's."""
ORDER = (
    *("norm", "residual", "weight_cast", "qkv", "attention_input", "attention_input", ""),
    *("attention", "weight_cast", "norm", "residual", "weight_cast", "gate_up"),
    *("activation", "activation", "weight_cast"),
)
"""A block's lines as its forward pass makes them, a tensor at each place; "" is all others."""
STEPS = 3
"""Steps that are replayed: the third still needs up to 2% more than the second, a fourth no
more."""
MICRO_BATCHES = 2
"""Micro-batches that are replayed of a step that has more: from the second on all are alike."""


@dataclass(frozen=True)
class Reserved:
    """A replay finds what the allocator reserves.

    Args:
        bytes: most bytes reserved; of the capacity, where it ran out of memory.
        allocated: most bytes allocated for tensors; of the capacity, where it ran out of memory.
        spare: bytes among the allocated ones that blocks hold beyond their tensors.
        fits: whether every tensor found room.
        retries: how often all that was free had to be given back first, which is slow.
    """

    bytes: float
    allocated: float
    spare: float
    fits: bool
    retries: int


def reserve(
    ledger: Ledger, *, capacity: float, workspace: float, expandable: bool = False
) -> Reserved:
    """Replay a step's tensors.

    Args:
        ledger: of a plan, on a GPU.
        capacity: bytes that the allocator may take.
        workspace: of libraries, for good.
        expandable: segments grow.
    """
    pieces = ledger.work.values()
    asked = (
        *(tuple(ledger.memory.items()), tuple(ledger.sizes.items())),
        *(_is_eager(ledger), any(piece.recorded for piece in pieces)),
        *(capacity, workspace, expandable),
    )
    if asked not in _KNOWN:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[asked] = _reserve(ledger, capacity, workspace, expandable)
    return _KNOWN[asked]


_KNOWN: dict[tuple[object, ...], Reserved] = {}
"""What was replayed in this process, by all that a replay reads: a sweep asks for the same tensors
beside many kernels that are faster and hold as much."""
MOST_KNOWN = 1024
"""Replays whose outcome is remembered, some tens of megabytes."""


def _reserve(ledger: Ledger, capacity: float, workspace: float, expandable: bool) -> Reserved:
    allocator = Allocator(capacity, expandable=expandable)
    pool = allocator
    if any(piece.recorded for piece in ledger.work.values()):
        pool = Allocator(capacity, expandable=expandable)
    try:
        _Replay(ledger, allocator, pool, workspace).run()
    except OutOfMemory:
        return Reserved(capacity, capacity, 0.0, False, allocator.retries)
    both = {allocator, pool}
    whole = sum(one.reserved_peak for one in both)
    allocated = sum(one.allocated_peak for one in both)
    spare = sum(one.spare_at_peak for one in both)
    fits, most = whole <= capacity, min(allocated, capacity)
    return Reserved(min(whole, capacity), most, spare, fits, allocator.retries)


def _is_eager(ledger: Ledger) -> bool:
    """Return whether operations run one by one, so that each has its own result."""
    return any(
        isinstance(piece, Stream | Attention) and piece.fused is not None
        for piece in ledger.work.values()
    )


class _Replay:
    """One allocator and the tensors that it holds for a plan."""

    def __init__(
        self, ledger: Ledger, allocator: Allocator, pool: Allocator, workspace: float
    ) -> None:
        self.ledger, self.sizes, self.workspace = ledger, ledger.sizes, workspace
        self.plain, self.pool = allocator, pool
        """what everything lies in, and what a recording of the blocks does"""
        self.layers = int(self.sizes["layers"])
        self.eager = _is_eager(ledger)
        self.linears = {
            key[:-3]: (self.sizes[key], self.sizes[f"{key[:-3]}/out"])
            for key in self.sizes
            if key.endswith("/in")
        }
        self.lines: dict[int | None, dict[str, Line]] = {}
        self.whole: dict[str, Line] = {}
        for name, line in ledger.memory.items():
            if line.bytes > 0 and name not in ("parameters", "optimizer", "gradients"):
                self.lines.setdefault(line.layer, {})[name.split("/")[-1]] = line
                if line.layer is None:
                    self.whole[name] = line
        self.gradients: list[Tensor] = []
        self._passes: dict[tuple[tuple[str, float], ...], list[Lifetime]] = {}
        """what a block makes on its way forward, by its lines"""

    def run(self) -> None:
        """Replay the build and some steps."""
        self._hold(self._weights("parameters"))
        self._hold([x.bytes for x in self.whole.values() if "always" in x.instants])
        self._hold([self.workspace / WORKSPACES] * WORKSPACES)
        gradients = self.ledger.memory.get("gradients")
        adds_up = gradients is not None and "always" in gradients.instants
        micro_batches = MICRO_BATCHES if adds_up or self.sizes["micro_batches"] > 1 else 1
        for step in range(STEPS):
            _let_go(self.gradients)
            self.gradients = []
            for _ in range(micro_batches):
                self._micro_batch(first=not self.gradients)
            update = self._hold(self._only("optimizer").values())
            if step == 0:
                for bytes in self._weights("optimizer"):
                    self._hold(self._states(bytes))
            _let_go(update)

    def _micro_batch(self, *, first: bool) -> None:
        """Forward and backward; gradients are made in the first, and added to in the others."""
        shared = self._hold(
            [x.bytes for x in self.whole.values() if {"loss", "turn"} <= set(x.instants)]
        )
        kept = [self._forward(layer) for layer in range(self.layers)]
        stream = self._head(first)
        handed: list[Tensor] = []
        for block in reversed(kept):
            after = self._backward(block, first)
            handed += stream
            if self.pool is self.plain:  # else the next recording reads it where it lies
                _let_go(handed)
                handed = []
            stream = after
        self._gradient(self._shares[-2], first, self.plain)
        _let_go([*shared, *handed, *stream])

    def _forward(self, layer: int) -> "dict[str, list[Tensor]]":
        """Return what a block keeps, in the order in which it is made.

        What it needs beside has gone by then.
        """
        own = self.lines.get(layer, {})
        kept: dict[str, list[Tensor]] = {name: [] for name in (*ORDER, *own)}
        alike = tuple((name, line.bytes) for name, line in own.items())
        if alike not in self._passes:
            self._passes[alike] = self._made_by(own)
        stream = self._in_pool([self.sizes["residual"]])
        for name, passing, staying in self._passes[alike]:
            gone = self._in_pool(passing)
            if staying:
                kept[name] += self._in_pool(staying)
            _let_go(gone)
        for name, line in own.items():
            if "turn" not in line.instants:  # it waits elsewhere
                _let_go(kept.pop(name))
        _let_go(stream)
        return kept

    def _made_by(self, own: dict[str, Line]) -> "list[Lifetime]":
        """Return what the forward pass of a block makes, in order; every micro-batch repeats it."""
        made, linears = list[Lifetime](), iter(self.linears.items())
        lines, statistics = self._parted({name: line.bytes for name, line in own.items()})
        pieces = {name: self._pieces(name, bytes) for name, bytes in lines.items()}
        for name in ORDER:
            for other in [name] if name else [n for n in lines if n not in ORDER]:
                taken = pieces.get(other, [])[: 1 if name else None]
                pieces[other] = pieces.get(other, [])[len(taken) :]
                staying = [*taken, statistics.get(other, 0.0)] if taken else []
                made.append((other, self._beside(other, taken), staying))
            if name == "weight_cast" and (linear := next(linears, None)) is not None:
                made.append((name, self._casts(*linear), []))
                if linear[1][1] == self.sizes["dim"]:  # its result is added, and goes
                    made.append((name, [self.sizes["residual"]], []))
        return [one for one in made if one[1] or one[2]]

    def _backward(self, kept: "dict[str, list[Tensor]]", first: bool) -> "list[Tensor]":
        """Replay a block's backward pass; return the gradient that it hands on."""
        sizes, shares = self.sizes, self._shares
        recomputed = [
            piece
            for name, x in self.whole.items()
            if "turn" in x.instants
            and "loss" not in x.instants
            and name not in ("work", "head_weight_gradient")
            for piece in self._cut(x.bytes)
        ]
        made = self._in_pool(recomputed)
        one = self._one_activation()
        if not self.eager:
            _let_go(kept.pop("activation", []))
        gradient = self._in_pool([one])
        _let_go(kept.pop("activation", [])[::-1])
        if self.eager:
            _let_go(self._in_pool([one, one, one]))
        wide = self._in_pool(
            [max(one, self.whole["work"].bytes - sizes["residual"])] if "work" in self.whole else []
        )
        _let_go([*gradient, *kept.pop("gate_up", [])])
        for name, linear in reversed(self.linears.items()):
            _let_go(self._in_pool(self._casts(name, (linear[1], linear[0]))))
        for share in shares[len(self.linears) - 1 : 0 : -1]:
            self._gradient(share, first, self.pool)
        stream = self._in_pool([sizes["residual"]])
        _let_go(wide)
        if self.eager:
            _let_go(self._in_pool([2 * sizes["residual"]] * 2))
        turned = kept.get("attention_input", []) or kept.get("qkv", [])
        mixed = self._in_pool([block.size for _, block in turned])
        _let_go([block for name, blocks in kept.items() for block in blocks])
        self._gradient(shares[0], first, self.pool)
        _let_go([*mixed, *made])
        return stream

    def _head(self, first: bool) -> "list[Tensor]":
        """Replay the head's passes; return their gradient.

        The largest tensors come and go in them.
        """
        sizes, lines = self.sizes, self._only("loss")
        pool = self.pool if "compiled_loss" in sizes else self.plain
        own = sizes["logits_fused"] / 3
        wide = own * 4 / sizes["activation_bytes"]
        logits, after = lines.pop("logits", 0.0), lines.pop("head_gradients", 0.0)
        normed = lines.pop("final_norm", 0.0)
        result = self._hold([normed - sizes["residual"]] if normed else [])
        passing = self._hold([4 * sizes["tokens"] * sizes["dim"]] if wide > own else [])
        result += self._hold([sizes["residual"]] if normed else [])
        _let_go(passing)
        before = [*result, *self._hold(lines.values(), pool)]
        if logits < 1.5 * wide or "compiled_loss" in sizes:
            pieces = max(1, round(logits / own))
            blocks = self._hold([logits / pieces] * pieces, pool)
        else:  # as torch's own loss makes them: the weight_gradient's, cast, and log-probabilities
            cast = self._hold([own])
            if wide > own:
                result_16, cast = cast, self._hold([wide])
                _let_go(result_16)
            blocks = self._hold([wide] * max(1, round(logits / wide) - 2))
            _let_go(cast)
            gradients = self._hold([wide, wide])
            _let_go([*blocks, *gradients[:1]])
            blocks = self._hold([own] if wide > own else [])
            _let_go(gradients[1:])
        weight_gradient = min(after, sizes["activation_bytes"] * sizes["embedding"])
        made = self._hold([weight_gradient], pool)
        stream = self._hold([after - weight_gradient], pool)
        _let_go(blocks)
        share = self._shares[-1]
        if first and math.isclose(weight_gradient, share * self._bytes("gradients"), rel_tol=1e-6):
            self.gradients += made  # nothing casts it
            made = []
        else:
            self._gradient(share, first, pool)
        stream = stream or self._hold([sizes["residual"]], pool)
        _let_go([*before, *made])
        return stream

    # --- sizes --------------------------------------------------------------------------------

    def _parted(self, lines: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return lines without their statistics, and what those are at each place."""
        small = {}
        for name in ("norm", "attention"):
            whole = lines.get(name, 0.0)
            main = whole // self.sizes["residual"] * self.sizes["residual"]
            small[name] = (whole - main) / ORDER.count(name)
            lines = {**lines, name: main}
        return lines, small

    def _pieces(self, name: str, bytes: float) -> list[float]:
        """Return a block's line as its tensors."""
        if name == "weight_cast":
            whole = sum(i * o for i, o in self.linears.values())
            return [bytes * i * o / whole for i, o in self.linears.values()]
        if name == "attention_input":
            heads, kv_heads = self.sizes["heads"], self.sizes["kv_heads"]
            return [bytes * n / (heads + kv_heads) for n in (heads, kv_heads)]
        count = max(1, ORDER.count(name))
        if name == "activation":
            count = min(count, max(1, round(bytes / self._one_activation())))
        return [bytes / count] * count

    def _beside(self, name: str, taken: list[float]) -> list[float]:
        """Return what eager operations make before a tensor that is kept."""
        if not self.eager or not taken:
            return []
        wider = 4 / self.sizes["activation_bytes"]
        if name == "residual":  # a norm's result in fp32
            return [wider * taken[0]] if wider > 1 else []
        if name == "attention_input":  # in fp32, halves of its products with sine and cosine, again
            half = wider * taken[0] / 2
            return [half, half, half, *([2 * half, 2 * half] if wider > 1 else [])]
        return [] if name in ORDER else [max(taken)]

    def _casts(self, name: str, ends: tuple[float, float]) -> list[float]:
        """Return the bytes of an 8-bit linear's operands, which eager operations round in fp32."""
        if f"{name}/fp8" not in self.sizes:
            return []
        inner, outer = ends
        read = self.sizes["tokens"] * inner
        return [*([4 * read, 4 * read] if self.eager else []), read, inner * outer]

    def _cut(self, bytes: float) -> list[float]:
        """Return something of a block that was recomputed, in tensors as large as its parts."""
        one, pieces = 2 * self._one_activation(), []
        while bytes >= 1:
            one = one if one <= bytes else one / 2 if one > self.sizes["residual"] else bytes
            pieces.append(min(one, bytes))
            bytes -= pieces[-1]
        return pieces

    def _one_activation(self) -> float:
        """Return the bytes of the MLP's widest tensor but for gate and up together.

        They are of all its tokens.
        """
        if "mlp_piece" in self.whole:
            return self.whole["mlp_piece"].bytes / 3
        return self.sizes["tokens"] * self.sizes["ffn"] * self.sizes["activation_bytes"]

    def _only(self, instant: str) -> dict[str, float]:
        """Return the lines without a block that are held then and at no other instant."""
        return {name: x.bytes for name, x in self.whole.items() if x.instants == (instant,)}

    def _bytes(self, name: str) -> float:
        line = self.ledger.memory.get(name)
        return 0.0 if line is None else line.bytes

    @cached_property
    def _shares(self) -> list[float]:
        """Return shares of the weights: a block's linears and the rest, embedding, head."""
        linears = [inner * outer for inner, outer in self.linears.values()]
        rest = self.sizes["unsplit"] / self.layers
        head = 0.0 if self.sizes["tied"] else self.sizes["embedding"]
        counts = [*linears, rest, self.sizes["tables"], head]
        return [count / self._numbers for count in counts]

    @cached_property
    def _numbers(self) -> float:
        """Return the count of all numbers of the weights."""
        sizes = self.sizes
        linears = sum(inner * outer for inner, outer in self.linears.values())
        head = 0.0 if sizes["tied"] else sizes["embedding"]
        return self.layers * linears + sizes["unsplit"] + sizes["tables"] + head

    def _weights(self, name: str) -> list[float]:
        """Return as many bytes as the line has, in tensors as large as the weights."""
        *block, table, head = [self._bytes(name) * share for share in self._shares]
        return [table, *(block * self.layers), head]

    def _states(self, bytes: float) -> list[float]:
        """Return a weight's moments, and what bf16 leaves of it."""
        left = (
            0.0
            if self._numbers * 8 >= self._bytes("optimizer")
            else bytes * (1 - self._numbers * 8 / self._bytes("optimizer"))
        )
        return [(bytes - left) / 2, (bytes - left) / 2, left]

    # --- blocks -------------------------------------------------------------------------------

    def _gradient(self, share: float, first: bool, pool: Allocator) -> None:
        """Replay a weight's gradient, or what is added to it and goes."""
        made = self._hold([self._bytes("gradients") * share], pool)
        if first:
            self.gradients += made
        else:
            _let_go(made)

    def _in_pool(self, sizes: Iterable[float]) -> "list[Tensor]":
        return self._hold(sizes, self.pool)

    def _hold(self, sizes: Iterable[float], pool: Allocator | None = None) -> "list[Tensor]":
        pool = pool or self.plain
        return [(pool, pool.allocate(size)) for size in sizes if size >= 1]


Tensor = tuple[Allocator, MemoryBlock]
"""A tensor's memory, and what it lies in."""
Lifetime = tuple[str, list[float], list[float]]
"""A line's name, bytes of the tensors that come and go while one of it is made, and its bytes."""


def _let_go(tensors: Iterable[Tensor]) -> None:
    for pool, block in tensors:
        pool.release(block)
