"""The Build: every socket of a run, typed, in the order in which it is filled.

*Owned* sockets have one filler: the trunk's, or one technique's that claims it. *Composed* sockets
take additions in stage order. Techniques act here, while the build is made; the loop only calls
what stands here. `headrace explain PLAN` prints this page with who filled each.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig
from headrace.costs.ledger import Ledger, check_free
from headrace.data.loader import Loader, Micro
from headrace.data.order import Order
from headrace.data.prepared import Prepared
from headrace.data.rows import Packer
from headrace.model.decoder import Decoder, Parts
from headrace.model.head import Objective, cross_entropy
from headrace.model.init import Source
from headrace.model.mask import MaskSpec, Rows
from headrace.parallel.layout import Layout
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Technique


class Forward(Protocol):
    """A block's forward: (x [B, T, D], what layers share) -> [B, T, D]."""

    def __call__(self, x_BTD: Tensor, shared: Any) -> Tensor:
        """Run the block."""
        ...


class Optimizer(Protocol):
    """What a route makes: torch's optimizer protocol, and a masked update."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self) -> Any:
        """Update; leaves everything unchanged where `found_inf` is 1."""
        ...


@dataclass
class Route:
    """Which parameters one optimizer takes. First match wins; the trunk's AdamW takes the rest."""

    name: str
    takes: Callable[[str, nn.Parameter], bool]
    make: Callable[[Mapping[str, nn.Parameter]], Optimizer]
    rest: bool = False
    """whether it is asked after the others, in place of the trunk's; one route may be"""


class Work(NamedTuple):
    """A micro-batch on the device."""

    ids_BT: Tensor
    targets_BT: Tensor
    rows: Rows
    index_BT: Tensor
    """place of each token in the whole stream: its row's number x T + its place in the row"""
    extras: Mapping[str, Tensor] | None = None
    """what `enrich` adds for the objective by name, such as a teacher's logits: [B x T, ...]"""


def place(build: "Build", micro: Micro) -> Work:
    """The trunk's: a micro-batch moved to the device.

    Without documents positions count along the row, and one row of them serves all.
    """
    ids_BT = micro.ids_BT.to(build.device, non_blocking=True)
    targets_BT = micro.targets_BT.to(build.device, non_blocking=True)
    B, T = ids_BT.shape
    index_BT = torch.arange(B * T, device=build.device).view(B, T) + micro.first_token
    if micro.positions_BT is None or micro.segments_BT is None:
        positions_1T = torch.arange(T, device=build.device)[None]
        return Work(ids_BT, targets_BT, Rows(positions_1T), index_BT)
    positions_BT = micro.positions_BT.to(build.device, non_blocking=True)
    segments_BT = micro.segments_BT.to(build.device, non_blocking=True)
    return Work(ids_BT, targets_BT, Rows(positions_BT, segments_BT), index_BT)


@dataclass
class Pass:
    """One sweep over micro-batches of a step, and what absorbs its gradients."""

    name: str
    objective: Objective
    micros: Callable[[Sequence[Work]], Sequence[Work]]
    absorb: Callable[["Build", Tensor], None]
    """(build, finite flag on the device, fp32 1 or 0) -> None"""
    max_norm: float = 0.0
    """Largest norm of its gradients; 0 only measures it."""


class Stateful(Protocol):
    """What a technique keeps in the checkpoint: tensors by name, and JSON values."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that are saved, and filled in place on resume."""
        ...

    def values(self) -> dict[str, Any]:
        """JSON values that are saved."""
        ...

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what `values` gave."""
        ...


Engine = Callable[["Build", Sequence[Work], Objective, Tensor], Tensor]
"""(build, micro-batches on the device, objective, scale) -> this rank's scaled loss sum, after
forward and backward of all of them; under `torch.no_grad` it only runs forward."""


class Phases(Protocol):
    """Where the step says which phase begins; the signals' clock, or nothing."""

    def mark(self, phase: str) -> None:
        """Phase `phase` begins now."""
        ...


def _unheard(text: str) -> None:
    """Nobody listens."""


class Unwatched:
    """Phases that nobody times, as of a model that is only read."""

    def mark(self, phase: str) -> None:
        """Nothing."""


@dataclass
class RunNotes:
    """Hold what a run learns about itself, for its report and for a resume."""

    guard: dict[str, Any] | None = None
    """how far the first step was from the baseline's, or why the two were not compared"""
    timed_attention: dict[str, Any] | None = None
    """the times of the attention backends, where a plan wants them measured"""
    own_attention: dict[str, Any] | None = None
    """the kernels of torch's own attention, looked at after the first step"""
    start_s: dict[str, float] | None = None
    """the seconds of each part of the time before the end of the first step"""
    validation_targets: int | None = None
    """how many targets an evaluation counts"""
    frozen: dict[str, str] | None = None
    """the sha256 of the weights that the run trains beside, by the key that names their folder"""


@dataclass
class Build:
    """A run in the making, then the run."""

    plan: Plan
    context: Context
    world: World
    device: torch.device
    techniques: list[Technique[Any]]
    prepared: Prepared

    # Owned, in the order in which they are read.
    config: ModelConfig
    parts: Parts
    source: Source
    engine: Engine
    sync: Callable[["Build", bool], None]
    """(is it the last micro-batch) -> None, before each backward: whether it communicates"""
    reduce: Callable[["Build"], None]
    """what is left of gradient communication after the last backward"""
    loss_scale: Callable[["Build"], Tensor | None]
    """what the loss is multiplied by during the backward pass, on the device; None is 1"""
    clip: Callable[["Build", float], Tensor]
    """(largest norm, 0 is no limit) -> the norm before clipping, one over all meshes"""
    passes: Callable[["Build", int], Sequence[Pass]]
    pack: Callable[["Build", Sequence[Any]], Packer]
    order: Callable[["Build", Packer], Order]
    """the build, the packed rows -> which row stands where in the stream"""
    transport: Callable[["Build", Packer], Loader]
    place: Callable[["Build", Micro], Work]
    """a micro-batch on the host -> this rank's share of it on the device"""
    recover: Callable[["Build", int, Mapping[str, float]], None]
    """(step, its metrics) -> None, when a step's gradient was not finite and its update was
    masked; raises to end the run"""

    # Composed, in stage order.
    linear: dict[str, tuple[str, Callable[[nn.Linear], nn.Linear]]] = field(default_factory=dict)
    """full name of a linear -> (who replaces it, how); one owner per name"""
    mask: MaskSpec = field(default_factory=MaskSpec)
    storage: list[Callable[[str, Tensor], Tensor]] = field(default_factory=list)
    shard: list[Callable[[nn.Module], None]] = field(default_factory=list)
    """called for each block after its weights are real, then for the whole model"""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """how the ranks hold each parameter, by name"""
    frozen: list[Callable[[str], bool]] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    values: dict[str, Callable[[int], float]] = field(default_factory=dict)
    recut: list[Callable[["Build", Micro], Micro]] = field(default_factory=list)
    """the same tokens of a micro-batch in other rows, before `place`"""
    objective: Objective = cross_entropy
    """made of parts that a head's kernels can ask for (kernels/cross_entropy_objective)"""
    enrich: list[Callable[["Build", Sequence[Work]], Sequence[Work]]] = field(default_factory=list)
    terms: list[Objective] = field(default_factory=list)
    auxiliary: list[Callable[["Build"], Tensor]] = field(default_factory=list)
    """sums of losses that layers kept during a forward, taken and cleared before its backward"""
    targets_per_token: Tensor | float = 1.0
    """counted targets of a step's pass over its tokens, on all ranks: what is a sum over tokens,
    as an auxiliary loss, is multiplied by it, since the step divides by targets"""
    state: dict[str, Stateful] = field(default_factory=dict)
    weights_for_eval: list[Callable[["Build"], AbstractContextManager[None]]] = field(
        default_factory=list
    )
    runtime: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    after_update: list[Callable[["Build", Tensor], None]] = field(default_factory=list)
    block_forward: list[str] = field(default_factory=list)
    """names of the wraps that blocks wear, innermost first"""

    given: Mapping[str, Tensor] = field(default_factory=dict)
    """values on the device that come before `source`, by name: those of another build"""

    # Made by the trunk from the sockets above.
    model: Decoder = None  # type: ignore[assignment]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    routed: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    """the parameters of each optimizer, by name"""
    loader: Loader = None  # type: ignore[assignment]
    predicted: Callable[[Plan], Ledger] = None  # type: ignore[assignment]
    """what a plan like this one would cost here"""
    tell: Callable[[str], None] = _unheard
    """one line that is worth reading while the run goes"""
    phases: Phases = field(default_factory=Unwatched)
    compiled: list[str] = field(default_factory=list)
    """what of the model is compiled, by name"""
    now: dict[str, float] = field(default_factory=dict)
    """`values` at the step that runs"""
    filled: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """what a technique remembers between `apply` and `active`, by its name"""
    run_notes: RunNotes = field(default_factory=RunNotes)

    @property
    def dtype(self) -> torch.dtype:
        """What products and attention compute in."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return half.get(self.context.precision, torch.float32)

    def autocast(self) -> torch.autocast:
        """The arithmetic of a forward pass."""
        half = self.dtype is not torch.float32
        low = self.dtype if half else torch.bfloat16  # it takes no other
        return torch.autocast(self.device.type, low, enabled=half)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor from the part of parameter `name` that each rank holds; collective."""
        like = self.model.get_parameter(name)
        return self.layouts[name].whole(self.world, like, local)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's local part of a whole tensor that lies as parameter `name`."""
        return self.layouts[name].part(self.world, self.model.get_parameter(name), whole)

    def wrap_blocks(self, name: str, wrap: Callable[[Forward, int], Forward]) -> None:
        """Replace every block's forward by `wrap(forward, layer)`, outside of earlier wraps.

        Names of parameters and identities of blocks stay as they are.
        """
        for layer, block in self.model.blocks.items():
            block.forward = wrap(block.forward, int(layer))
        self.block_forward.append(name)

    def replace_linears(
        self, owner: str, names: Sequence[str], make: Callable[[nn.Linear], nn.Linear]
    ) -> None:
        """Ask for linears to be replaced at the end of the linear stage.

        Raises:
            ConfigError: another technique already owns one of them.
        """
        for name in names:
            check_free(self.linear[name][0] if name in self.linear else None, owner, name)
            self.linear[name] = (owner, make)


def auxiliary_loss(build: Build) -> Tensor | None:
    """The sum of losses that layers kept in the forward pass that has just run.

    Tensor ranks compute the same ones, and the backward pass adds up what they send to the states
    that they share: each sends its part of the gradient.
    """
    if not build.auxiliary:
        return None
    total = torch.stack([auxiliary(build) for auxiliary in build.auxiliary]).sum()
    part = total / build.world.size("tensor")
    return part + (total - part).detach()


OWNED = (
    "config", "source", "engine", "sync", "reduce", "loss_scale", "clip", "passes",
    "pack", "order", "transport", "place", "recover",
)  # fmt: skip
PARTS = tuple(f"parts.{f.name}" for f in fields(Parts))
COMPOSED = (
    "linear", "mask", "block_forward", "storage", "shard", "layouts", "frozen", "routes", "values",
    "recut", "objective", "enrich", "terms", "auxiliary", "state", "weights_for_eval", "runtime",
    "after_update", "compiled",
)  # fmt: skip
SOCKETS = (OWNED[0], *PARTS, *OWNED[1:], *COMPOSED)
