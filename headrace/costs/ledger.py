"""The cost model holds named lines that techniques edit.

A technique's `predict` takes a ledger and returns another. Because it edits *lines* and not totals,
interactions come out of which lines remain: chunked cross-entropy removes `logits`, checkpointing
moves a block's lines to recompute. Totals are read at named instants of a step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.costs.work import AROUND, CUSTOM, Attention, HostWork, Stream, Work

Instant = Literal["always", "backward", "loss", "turn", "optimizer"]
INSTANTS: tuple[Instant, ...] = ("backward", "loss", "turn", "optimizer")
WORDS = {
    "forward": "before the loss",
    "loss": "at the loss",
    "turn": "as the backward pass begins",
    "backward": "as the backward pass ends",
    "optimizer": "in the update",
}
"""Instant, or "forward" -> words for a reader."""
DERIVED = "derived"
"""Name of a size that is not 0 where a piece of work was derived, or was fitted to too few steps to
estimate its error: the step's time then has no interval."""
SAVES = "saves_every"
"""Name of the size that is the plan's steps between two checkpoints; 0 for none."""


@dataclass(frozen=True)
class Line:
    """A line is one named cost.

    Args:
        bytes: bytes that are held.
        instants: when they are held. "always" is every instant; "loss" is the peak at the head,
            with all activations kept; "turn" is the last block's backward pass, with all of them
            and its work; "backward" is the end of the backward pass, with all gradients and the
            first block's work; "optimizer" is the update.
        layer: the block it belongs to, or None.
        opaque: one operation made it whose parts a compiler does not see, so it does not choose to
            make it again.
    """

    bytes: float
    instants: tuple[Instant, ...]
    layer: int | None = None
    opaque: bool = False


@dataclass(frozen=True)
class Matrix:
    """A matrix is a parameter of two or more dimensions.

    Args:
        shape: of the whole.
        by: whose optimizer updates it: "adamw" is the baseline's, "" is nobody's.
        share: of it that a rank holds, before slices.
        stored: bytes of a number.
    """

    shape: tuple[int, ...]
    by: str = "adamw"
    share: float = 1.0
    stored: float = 4.0

    @property
    def numbers(self) -> float:
        """Return the count of its numbers that a rank holds, before slices."""
        return self.share * prod(self.shape)


def check_free(first: str | None, owner: str, name: str) -> None:
    """Check that nothing else owns a linear: it has one owner at most.

    Raises:
        ConfigError: it has another one already.
    """
    if first is not None:
        raise ConfigError(
            f"{owner} and {first} both replace the linear {name!r}",
            mend(f"-{owner}") | mend(f"-{first}"),
        )


@dataclass(frozen=True)
class Slicing:
    """It says how ranks gather slices of a model, and scatter those of its gradients.

    Args:
        whole: the ledger of the model before it was sliced.
        freed: whether a block's weights are gathered again for its backward pass.
        gathers_once: whether they are gathered once a step, not once a micro-batch.
        sends_each: whether gradients are scattered in every micro-batch, not once a step.
        narrow: whether weights are gathered in bf16, instead of as they are stored.
        fp8: whether those of linears whose matmuls are fp8 are gathered in fp8.
        summed: bytes of a number in which gradients are summed.
        pairs: whether those of a group are summed in the dtype of its weights.
    """

    whole: "Ledger"
    freed: bool
    gathers_once: bool
    sends_each: bool
    narrow: bool
    fp8: bool
    summed: float
    pairs: bool


@dataclass(frozen=True)
class Ledger:
    """A ledger holds memory lines by name, and FLOPs per trained token by phase.

    Phases are "forward", "backward" and others.
    """

    memory: dict[str, Line]
    flops: dict[str, float]
    sizes: dict[str, float] = field(default_factory=dict)
    """Facts that edits are made from, such as bytes of logits per token."""
    work: dict[str, Work] = field(default_factory=dict)
    """Pieces of a step by name, which a machine's rates price."""
    linears: dict[str, str] = field(default_factory=dict)
    """Linears of a block by name -> the technique that replaces them."""
    matrices: dict[str, Matrix] = field(default_factory=dict)
    """By the names of their parameters; what techniques add and freeze is here too."""
    sliced: "Slicing | None" = None
    """How ranks slice the model and what it was before, where they do."""

    def with_matrices(self, matrices: Mapping[str, Matrix]) -> "Ledger":
        """Return the same with matrices added or replaced."""
        return replace(self, matrices={**self.matrices, **matrices})

    def updated_by(self, owner: str, takes: Callable[[str, Matrix], bool]) -> "Ledger":
        """Return the same with an optimizer for what it takes of the baseline's matrices."""
        taken = {n: m for n, m in self.updates("adamw").items() if takes(n, m)}
        return self.with_matrices({n: replace(m, by=owner) for n, m in taken.items()})

    def updates(self, *owners: str) -> dict[str, Matrix]:
        """Return the matrices that these optimizers update; without owners, all that learn."""
        return {n: m for n, m in self.matrices.items() if m.by and (not owners or m.by in owners)}

    def experts(self) -> dict[str, Matrix]:
        """Return the matrices of experts by name: those of three dimensions in an MLP."""
        return {n: m for n, m in self.matrices.items() if ".mlp." in n and len(m.shape) == 3}

    def with_linears(self, owner: str, names: Iterable[str]) -> "Ledger":
        """Return the same with linears that a technique replaces.

        Raises:
            ConfigError: another technique already owns one of them.
        """
        names = list(names)
        for name in names:
            check_free(self.linears.get(name), owner, name)
        return replace(self, linears={**self.linears, **dict.fromkeys(names, owner)})

    def with_line(self, name: str, line: Line) -> "Ledger":
        """Return the same ledger with one line added or replaced."""
        return replace(self, memory={**self.memory, name: line})

    def updating(self, bytes: float) -> "Ledger":
        """Return the same with what an optimizer makes while it updates.

        Optimizers update one after another.
        """
        before = self.memory.get("update", Line(0.0, ()))
        return self.with_line("update", Line(max(bytes, before.bytes), ("optimizer",)))

    def without(self, names: Iterable[str]) -> "Ledger":
        """Return the same ledger without the named lines."""
        drop = set(names)
        return replace(self, memory={k: v for k, v in self.memory.items() if k not in drop})

    def scaled(self, match: Callable[[str], bool], factor: float) -> "Ledger":
        """Return the same with every matching line's bytes multiplied by `factor`."""
        edit = {
            k: replace(v, bytes=v.bytes * factor) if match(k) else v for k, v in self.memory.items()
        }
        return replace(self, memory=edit)

    def made_whole(self, name: str, edit: Callable[[float], float]) -> "Ledger":
        """Return the same where every line `name` of a block holds `edit(bytes)`.

        One operation makes it, without parts.
        """
        lines = {
            k: replace(v, bytes=edit(v.bytes), opaque=True) if k.endswith(f"/{name}") else v
            for k, v in self.memory.items()
        }
        return replace(self, memory=lines)

    def with_flops(self, phase: str, per_token: float) -> "Ledger":
        """Return the same ledger with `per_token` FLOPs added to a phase."""
        return replace(self, flops={**self.flops, phase: self.flops.get(phase, 0.0) + per_token})

    def reworked(self, edit: Callable[[str, Work], Work | None]) -> "Ledger":
        """Return the same with every piece of work as `edit` makes it.

        Pieces that it makes None are left out.
        """
        edited = {name: edit(name, piece) for name, piece in self.work.items()}
        return replace(self, work={n: piece for n, piece in edited.items() if piece is not None})

    def recompute(self, share: Callable[[str], float]) -> "Ledger":
        """Return the same with pieces of the forward pass computed once more in the backward pass.

        Args:
            share: name of a piece -> the share of its kernels that run again.
        """
        more = {
            f"{name}/again": replace(piece, phase="recompute", count=piece.count * part)
            for name, piece in self.work.items()
            if piece.phase == "forward"
            and not isinstance(piece, HostWork)
            and not name.startswith(AROUND)
            and (part := share(name))
        }
        return replace(self, work={**self.work, **more})

    def with_host(self, name: str, count: float, launch: float) -> "Ledger":
        """Return the same with so much work of the host in each micro-batch, `launch` long each."""
        waited = HostWork("forward", count, launch=launch)
        return replace(self, work={**self.work, name: waited})

    def made_one(
        self, name: str, *, forward: float = 1.0, backward: float = 1.0, launch: float = CUSTOM
    ) -> "Ledger":
        """Return the same with the streams `name` each as one kernel.

        The kernel moves so much of what a fused one moves.

        With a `launch` of 0 they are part of a kernel that counts elsewhere.
        """
        share = {f"{name}/forward": forward, f"{name}/backward": backward}

        def edit(key: str, piece: Work) -> Work:
            if key in share and isinstance(piece, Stream) and piece.fused is not None:
                return piece.whole(share[key] * piece.fused, launch)
            return piece

        return self.reworked(edit)

    def attended(self, kernel: str) -> "Ledger":
        """Return the same with attention by this kernel of costs/machine.py."""
        return self.reworked(
            lambda _, piece: (
                replace(piece, kernel=kernel) if isinstance(piece, Attention) else piece
            )
        )

    def at(self, instant: Instant) -> float:
        """Return the bytes held at one instant."""
        return sum(
            v.bytes for v in self.memory.values() if instant in v.instants or "always" in v.instants
        )

    def instants(self) -> dict[str, float]:
        """Return the bytes held before the head, and at every instant.

        The first are those at the end of the forward pass.
        """
        through = {"loss", "turn"}
        forward = sum(
            v.bytes
            for v in self.memory.values()
            if "always" in v.instants or through <= set(v.instants)
        )
        return {"forward": forward, **{instant: self.at(instant) for instant in INSTANTS}}

    def peak(self) -> tuple[Instant, float]:
        """Return the instant that needs most, and its bytes."""
        return max(((i, self.at(i)) for i in INSTANTS), key=lambda pair: pair[1])

    def owners(self) -> list[tuple[str, float]]:
        """Return the lines held at the peak, summed over layers, the largest first."""
        instant, _ = self.peak()
        sums: dict[str, float] = {}
        for name, line in self.memory.items():
            if instant in line.instants or "always" in line.instants:
                key = name.split("/")[-1] if line.layer is not None else name
                sums[key] = sums.get(key, 0.0) + line.bytes
        return sorted(sums.items(), key=lambda pair: -pair[1])

    def flops_per_token(self) -> float:
        """Return the FLOPs of a training step per token, recomputation included."""
        return sum(self.flops.values())
