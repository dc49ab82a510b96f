"""Divide a model's bytes into the groups that FSDP2 gathers, and whose gradients it scatters.

A block is a group, and so are the embedding and the head where each has a table of its own: they
then travel beside blocks. What is left, the final norm or tied tables, is the last group. Left out:
a head whose weight is rounded before it is multiplied, which is in that last group too.
"""

from typing import NamedTuple

from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger

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


def gathered_groups(ledger: Ledger, *, narrow: bool) -> GroupBytes:
    """Return the bytes of the groups when they are gathered.

    Args:
        ledger: of the model, with what experts take apart.
        narrow: whether weights are gathered in bf16, instead of as they are stored.
    """
    apart, vectors = DividedExperts.of(ledger).apart, ledger.memory["parameters"].bytes
    bytes = dict[str, float]()
    for name, matrix in ledger.matrices.items():
        vectors -= matrix.stored * matrix.numbers
        if name not in apart:
            bytes[name] = (2 if narrow else matrix.stored) * matrix.numbers
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


def _grouped(ledger: Ledger, bytes: dict[str, float], inside: float, outside: float) -> GroupBytes:
    """Return matrices by group, with the vectors inside of blocks and outside."""
    alone = () if ledger.sizes["tied"] else (EMBEDDING, HEAD)
    blocks = sum(each for name, each in bytes.items() if name.startswith("blocks."))
    tables = [bytes.get(name, 0.0) if name in alone else 0.0 for name in (EMBEDDING, HEAD)]
    rest = sum(bytes.values()) - blocks - sum(tables)
    return GroupBytes(blocks + inside, *tables, rest + outside)
