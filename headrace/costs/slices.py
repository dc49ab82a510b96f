"""Divide a model's bytes into the groups that FSDP2 gathers, and whose gradients it scatters.

A block is a group, and so are the embedding and the head where each has a table of its own: they
then travel beside blocks. What is left is the last group: the final norm, tied tables, and a head
whose call is compiled. Left out: a head whose weight is rounded before it is multiplied, which is
in that last group too.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.costs.count import FP32
from headrace.costs.float8 import FP8, is_fp8
from headrace.costs.ledger import Ledger
from headrace.costs.work import Beside, Work, collective

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


def gathered_groups(ledger: Ledger, *, narrow: bool, fp8: bool = False) -> GroupBytes:
    """Return the bytes of the groups when they are gathered.

    Args:
        ledger: of the model, with what experts take apart.
        narrow: whether weights are gathered in bf16, instead of as they are stored.
        fp8: whether weights of linears whose matmuls are fp8 are gathered in fp8.
    """
    apart, vectors = DividedExperts.of(ledger).apart, ledger.memory["parameters"].bytes
    bytes = dict[str, float]()
    for name, matrix in ledger.matrices.items():
        vectors -= matrix.stored * matrix.numbers
        if name not in apart:
            stored = FP8 if fp8 and is_fp8(ledger, name) else 2 if narrow else matrix.stored
            bytes[name] = stored * matrix.numbers
    own = min(vectors, FP32 * ledger.sizes["final_norm"])
    narrower = 0.5 if narrow else 1.0
    return _grouped(ledger, bytes, narrower * (vectors - own), narrower * own)


def learned_groups(ledger: Ledger) -> GroupBytes:
    """Return the bytes of the groups' gradients in fp32."""
    apart, learns = DividedExperts.of(ledger).apart, ledger.updates()
    bytes = {name: FP32 * matrix.numbers for name, matrix in learns.items()}
    vectors, norm = (
        ledger.memory["gradients"].bytes - sum(bytes.values()),
        ledger.sizes["final_norm"],
    )
    own = FP32 * norm * (vectors >= FP32 * norm)
    kept = {name: each for name, each in bytes.items() if name not in apart}
    return _grouped(ledger, kept, vectors - own, own)


def between_groups(
    sizes: Mapping[str, float], early: tuple[float, float], last: tuple[float, float]
) -> Iterator[tuple[str, Work]]:
    """Add up slices of the gradients over the groups, once a step; the last beside nothing.

    Args:
        sizes: the ledger's.
        early: bytes and count of the sums beside blocks.
        last: those of the sums beside nothing.
    """
    slices = sizes["slices_ranks"]
    parts: dict[str, tuple[float, float, Beside]] = {
        "sum": (*early, "blocks"),
        "sum_last": (*last, ""),
    }
    for name, (bytes, count, beside) in parts.items():
        if sizes["replicate_ranks"] > 1 and bytes and count:
            each = bytes / slices / count
            yield (
                f"shards/{name}",
                collective(
                    sizes,
                    "replicate",
                    "backward",
                    "all_reduce",
                    each,
                    count,
                    beside=beside,
                    last=True,
                ),
            )


def _grouped(ledger: Ledger, bytes: dict[str, float], inside: float, outside: float) -> GroupBytes:
    """Return matrices by group, with the vectors inside of blocks and outside."""
    apart, compiled = not ledger.sizes["tied"], "compiled_loss" in ledger.sizes
    blocks = sum(each for name, each in bytes.items() if name.startswith("blocks."))
    embedding = bytes.get(EMBEDDING, 0.0) * apart
    head = bytes.get(HEAD, 0.0) * (apart and not compiled)
    rest = sum(bytes.values()) - blocks - embedding - head
    return GroupBytes(blocks + inside, embedding, head, rest + outside)
