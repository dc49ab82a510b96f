"""Divide a model's bytes into the groups that FSDP2 gathers, and whose gradients it scatters.

A block is a group, and so are the embedding and the head where each has a table of its own: they
then travel beside blocks. What is left is the last group: the final norm, tied tables, and a head
whose call is compiled. Left out: a head whose weight is rounded before it is multiplied, which is
in that last group too.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from headrace.costs.count import FP32
from headrace.costs.float8 import FP8, is_fp8
from headrace.costs.ledger import Ledger, Slicing
from headrace.costs.links import CollectiveOperation
from headrace.costs.work import Beside, Phase, Stream, Work, collective

EMBEDDING, HEAD = "embed.weight", "head.weight"


class GroupBytes(NamedTuple):
    """Hold the bytes of a model by group."""

    blocks: float
    embedding: float
    """0 where the head shares its table"""
    head: float
    rest: float

    @property
    def total(self) -> float:
        """Return the bytes of all groups."""
        return sum(self)

    def ends(self, layers: float) -> tuple[float, int]:
        """Return the bytes and the count of the groups that nothing runs beside.

        They are the first to be gathered and the last to be scattered: the embedding, one of
        `layers` blocks, and what is left.
        """
        apart = self.embedding, self.rest
        return sum(apart) + self.blocks / layers, 1 + sum(map(bool, apart))

    def beside(self, layers: float) -> tuple[float, float]:
        """Return the bytes and the count of the groups that travel beside blocks."""
        return self.total - self.ends(layers)[0], layers - 1 + bool(self.head)


class DividedExperts(NamedTuple):
    """Hold what a rank has of experts that ranks divide, before they are sliced."""

    slices: float = 1.0
    """ranks that share them"""
    parameters: float = 0.0
    """bytes, as those of gradients and of the baseline's optimizer"""
    gradients: float = 0.0
    optimizer: float = 0.0
    routers: float = 0.0
    """bytes of gradients of the routers that stay whole beside them"""
    apart: frozenset[str] = frozenset()
    """names of matrices that are not sliced with their block"""

    @classmethod
    def of(cls, ledger: Ledger) -> "DividedExperts":
        """Return them for a ledger; nothing where no ranks divide experts."""
        if ledger.sizes.get("expert_ranks", 1.0) < 2:
            return cls()
        experts, slices = ledger.experts(), ledger.sizes["expert_slices_ranks"]
        routers = {n: m for n, m in ledger.matrices.items() if n.endswith(".mlp.router.weight")}
        left = routers if slices > 1 else {}
        learned = sum(m.numbers for m in experts.values() if m.by)
        return cls(
            slices,
            sum(m.stored * m.numbers for m in experts.values()),
            FP32 * learned,
            2 * FP32 * sum(m.numbers for m in experts.values() if m.by == "adamw"),
            FP32 * sum(m.numbers for m in left.values() if m.by),
            frozenset({*experts, *left}),
        )


def gathered_groups(how: Slicing, halves: Collection[str] = ()) -> GroupBytes:
    """Return the bytes of the groups when they are gathered.

    Args:
        how: how the model is sliced, with what experts take apart.
        halves: names of matrices that are stored in bf16; blocks have no others then, nor vectors.
    """
    whole, apart = how.whole, _apart(how.whole, halves)
    vectors, bytes = whole.memory["parameters"].bytes, dict[str, float]()
    for name, matrix in whole.matrices.items():
        vectors -= matrix.stored * matrix.numbers
        if name not in apart:
            stored = 2 if how.narrow or name in halves else matrix.stored
            bytes[name] = (FP8 if how.fp8 and is_fp8(whole, name) else stored) * matrix.numbers
    own = min(vectors, FP32 * whole.sizes["final_norm"])
    narrower = 0.5 if how.narrow else 1.0
    return _grouped(whole, bytes, narrower * (vectors - own), narrower * own, halves)


def learned_groups(how: Slicing, halves: Collection[str] = ()) -> GroupBytes:
    """Return the bytes of the groups' gradients; see `gathered_groups`."""
    whole, apart, norm = how.whole, _apart(how.whole, halves), how.whole.sizes["final_norm"]
    learns = whole.updates()
    vectors = whole.memory["gradients"].bytes - FP32 * sum(m.numbers for m in learns.values())
    own = FP32 * norm * (vectors >= FP32 * norm)
    bytes = {
        name: (2 if how.pairs and name in halves else how.summed) * matrix.numbers
        for name, matrix in learns.items()
        if name not in apart
    }
    share = how.summed / FP32
    return _grouped(whole, bytes, share * (vectors - own), share * own, halves)


def sliced_work(ledger: Ledger, halves: Collection[str] = ()) -> Iterator[tuple[str, Work]]:
    """Yield a step's gathers and scatters with their copies, and sums over copies of the slices.

    A block's weights travel while others compute, its neighbour's at least: torch gathers one ahead
    even where `prefetch` is 0. Beside what is outside of the blocks and the block next to it
    nothing runs. Left out: what pads a slice that does not come out even.

    Args:
        ledger: that says how the model is sliced.
        halves: see `gathered_groups`.
    """
    how, sizes, layers = ledger.sliced, ledger.sizes, max(1.0, ledger.sizes["layers"])
    assert how is not None
    weights, gradients = gathered_groups(how, halves), learned_groups(how, halves)
    early, last = gradients.beside(layers), gradients.ends(layers)
    calls: dict[str, tuple[Phase, CollectiveOperation, float, float, Beside]] = {
        "gather_first": ("forward", "all_gather", *weights.ends(layers), ""),
        "gather": ("forward", "all_gather", *weights.beside(layers), "blocks"),
        "gather_again": ("backward", "all_gather", how.freed * weights.blocks, layers, "blocks"),
        "scatter": ("backward", "reduce_scatter", *early, "blocks"),
        "scatter_last": ("backward", "reduce_scatter", *last, ""),
    }
    for name, (phase, operation, bytes, count, beside) in calls.items():
        if bytes and count:
            sent, each = operation == "reduce_scatter", bytes / count
            once = not how.sends_each if sent else how.gathers_once
            over = {"beside": beside, "last": once}
            yield (
                f"shards/{name}",
                collective(sizes, "slices", phase, operation, each, count, **over),
            )
            # Gathered weights are copied out of one buffer, gradients into one.
            copies = count / (sizes["micro_batches"] if once else 1)
            yield f"shards/{name}_copy", Stream(phase, copies, 2 * each)
    sums: dict[str, tuple[float, float, Beside]] = {
        "sum": (*early, "blocks"),
        "sum_last": (*last, ""),
    }
    for name, (bytes, count, beside) in sums.items():
        if sizes["replicate_ranks"] > 1 and bytes and count:
            each, over = bytes / sizes["slices_ranks"] / count, {"beside": beside, "last": True}
            yield (
                f"shards/{name}",
                collective(sizes, "replicate", "backward", "all_reduce", each, count, **over),
            )


def experts_work(ledger: Ledger, divided: DividedExperts) -> Iterator[tuple[str, Work]]:
    """Gather and scatter experts over the ranks that share them; sum what is left whole.

    Args:
        ledger: that says how the model is sliced.
        divided: what a rank has of the experts.
    """
    how, sizes, layers = ledger.sliced, ledger.sizes, ledger.sizes["layers"]
    assert how is not None
    gathered = divided.parameters * (0.5 if how.narrow else 1.0)
    scattered = divided.gradients * how.summed / FP32
    among, for_backward, apart = "expert_slices", how.freed * gathered, scattered / divided.slices
    calls: dict[str, tuple[Phase, str, CollectiveOperation, float, bool]] = {
        "gather_experts": ("forward", among, "all_gather", gathered, how.gathers_once),
        "gather_experts_again": ("backward", among, "all_gather", for_backward, False),
        "scatter_experts": ("backward", among, "reduce_scatter", scattered, not how.sends_each),
        "sum_experts": ("backward", "replicate", "all_reduce", apart, True),
    }
    for name, (phase, over, operation, bytes, last) in calls.items():
        if bytes and sizes[f"{over}_ranks"] > 1:
            yield (
                f"shards/{name}",
                collective(sizes, over, phase, operation, bytes / layers, layers, last=last),
            )
    if divided.routers:
        yield (
            "reduce/gradients",
            collective(sizes, "shard", "optimizer", "all_reduce", divided.routers),
        )


def beside_halves(ledger: Ledger, halves: Collection[str]) -> Ledger:
    """Return the ledger of slices whose matrices are stored in bf16, where they were in fp32.

    A group has one dtype. So what a block has beside such matrices is whole on every rank, as is
    the final norm beside a tied table, and its gradients are summed after the backward pass.

    Args:
        ledger: that says how the model is sliced, with the work of fp32 slices.
        halves: names of the matrices that are stored in bf16.
    """
    how, slices = ledger.sliced, ledger.sizes["slices"]
    assert how is not None
    work, plain = dict(sliced_work(ledger, halves)), replace(how, summed=FP32, pairs=False)
    apart = learned_groups(plain).total - learned_groups(plain, halves).total
    if apart:
        own = collective(ledger.sizes, "shard", "optimizer", "all_reduce", apart)
        work["shards/apart"] = own
    fewer = retained_bytes(how) - retained_bytes(how, halves)
    changes = {"parameters": apart, "gradients": apart, "optimizer": 2 * apart}
    changes = {name: bytes * (1 - 1 / slices) for name, bytes in changes.items()}
    for name, more in {**changes, "gathered": -fewer}.items():
        line = ledger.memory[name]
        ledger = ledger.with_line(name, replace(line, bytes=line.bytes + more))
    return replace(ledger, work={**ledger.work, **work})


def retained_bytes(how: Slicing, halves: Collection[str] = ()) -> float:
    """Return the bytes of gathered weights that a rank holds at once; see `gathered_groups`.

    These are all, or those outside of blocks and of two blocks; of experts that ranks share too.
    """
    share = 2 / max(1.0, how.whole.sizes["layers"]) if how.freed else 1.0
    divided, groups = DividedExperts.of(how.whole), gathered_groups(how, halves)
    experts = divided.parameters * (0.5 if how.narrow else 1.0) * (divided.slices > 1)
    return groups.total - groups.blocks + share * (groups.blocks + experts)


def _apart(whole: Ledger, halves: Collection[str]) -> frozenset[str]:
    """Return the names of matrices that are not sliced with their block."""
    learns = whole.updates() if halves else {}
    beside = {name for name in learns if name.startswith("blocks.") and name not in halves}
    return DividedExperts.of(whole).apart | beside


def _grouped(
    ledger: Ledger,
    bytes: dict[str, float],
    inside: float,
    outside: float,
    halves: Collection[str],
) -> GroupBytes:
    """Return matrices by group, with the vectors inside of blocks and outside."""
    if halves:
        inside, outside = 0.0, outside * (not ledger.sizes["tied"] or EMBEDDING not in halves)
    apart, compiled = not ledger.sizes["tied"], "compiled_loss" in ledger.sizes
    blocks = sum(each for name, each in bytes.items() if name.startswith("blocks."))
    embedding = bytes.get(EMBEDDING, 0.0) * apart
    head = bytes.get(HEAD, 0.0) * (apart and not compiled)
    rest = sum(bytes.values()) - blocks - embedding - head
    return GroupBytes(blocks + inside, embedding, head, rest + outside)
