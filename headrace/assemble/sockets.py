"""Define the Build, which has every socket of a run, typed, in the order of filling.

*Owned* sockets have one filler: the baseline's, or that of the one technique which claims it.
*Composed* sockets take additions in stage order. Techniques act here, while the build is made; the
training loop only calls what the sockets hold. `headrace explain PLAN` prints the sockets with who
filled each.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headrace.compress.fake import Rounding
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
from headrace.model.peft import GivenAdapters
from headrace.optim.stability import Spike
from headrace.parallel.layout import Layout
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Technique

FAKE = "fake_quantization"
"""The name in `values` of whether a step fake-quantizes: 1 or 0."""


class Forward(Protocol):
    """A block's forward pass is such a call: (x [B, T, D], what layers share) -> [B, T, D]."""

    def __call__(self, x_BTD: Tensor, shared: Any) -> Tensor:
        """Run the block."""
        ...


class Optimizer(Protocol):
    """An optimizer that a route makes has torch's protocol and can mask its update."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self) -> Any:
        """Update the parameters and state; change nothing where `found_inf` is 1."""
        ...


@dataclass
class Route:
    """Choose the parameters of one optimizer.

    The first route that matches a parameter takes it; the baseline's AdamW takes the rest.
    """

    name: str
    takes: Callable[[str, nn.Parameter], bool]
    make: Callable[[Mapping[str, nn.Parameter]], Optimizer]
    rest: bool = False
    """whether it is asked after the other routes, in place of AdamW; at most one route is"""
    compiled: bool = False
    """whether its update is compiled"""


class MicroBatch(NamedTuple):
    """Hold a micro-batch on the device."""

    ids_BT: Tensor
    targets_BT: Tensor
    rows: Rows
    index_BT: Tensor
    """index of each token in the whole stream: its sequence's number x T + its place in that"""
    extras: Mapping[str, Tensor] | None = None
    """what rows say beside tokens, and what `enrich` adds for the objective, such as a teacher's
    logits; by name, [B x T, ...]"""


def place(build: "Build", micro: Micro) -> MicroBatch:
    """Move a micro-batch to the device; this is the baseline's filler of `Build.place`.

    Without documents, positions count along the sequence, and one row of positions serves all. What
    `Build.annotate` says of whole rows is added here, before a filler around this one cuts them.
    """
    work = on_device(build, micro)
    for annotate in build.annotate:
        work = annotate(build, work)
    return work


def on_device(build: "Build", micro: Micro) -> MicroBatch:
    """Return the whole rows of a micro-batch on the device."""
    ids_BT = micro.ids_BT.to(build.device, non_blocking=True)
    targets_BT = micro.targets_BT.to(build.device, non_blocking=True)
    B, T = ids_BT.shape
    index_BT = torch.arange(B * T, device=build.device).view(B, T) + micro.first_token
    numbers = {
        name: values_BT.to(build.device, non_blocking=True).flatten(0, 1)
        for name, values_BT in (micro.numbers_BT or {}).items()
    }
    if micro.positions_BT is None or micro.segments_BT is None:
        rows = Rows(torch.arange(T, device=build.device)[None])
        return MicroBatch(ids_BT, targets_BT, rows, index_BT, numbers or None)
    positions_BT = micro.positions_BT.to(build.device, non_blocking=True)
    segments_BT = micro.segments_BT.to(build.device, non_blocking=True)
    rows = Rows(positions_BT, segments_BT)
    return MicroBatch(ids_BT, targets_BT, rows, index_BT, numbers or None)


@dataclass
class Pass:
    """A pass is one sweep over a step's micro-batches, with what uses its gradients."""

    name: str
    objective: Objective
    micros: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
    absorb: Callable[["Build", Tensor], None]
    """(build, on the device 1.0 if the gradients are finite, else 0.0) -> None"""
    max_norm: float = 0.0
    """largest norm of its gradients; 0 only measures the norm"""


class Stateful(Protocol):
    """A technique's state in the checkpoint has tensors by name, and JSON values."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved, and that a resume fills in place."""
        ...

    def values(self) -> dict[str, Any]:
        """Return the JSON values that are saved."""
        ...

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the JSON values that `values` returned."""
        ...


Engine = Callable[["Build", Sequence[MicroBatch], Objective, Tensor], Tensor]
"""(build, micro-batches on the device, objective, scale) -> this rank's scaled loss sum, after
forward and backward of all of them; under `torch.no_grad` it only runs forward."""


class Phases(Protocol):
    """The step reports here which phase begins: this is the signals' clock or `Unwatched`."""

    def mark(self, phase: str) -> None:
        """Note that the phase named `phase` begins now."""
        ...


def _unheard(text: str) -> None:
    """Ignore a line, because nobody reads it."""


class Unwatched:
    """Ignore the phases of a step that nobody times, as of a model that is only read."""

    def mark(self, phase: str) -> None:
        """Do nothing."""


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
    spikes: list[Spike] = field(default_factory=list)
    """what was noticed of spikes in the loss or the gradient norm, the earliest first"""
    copies: dict[str, int] | None = None
    """how often ranks compared what several of them hold, how many tensors that are, and after
    which step they were last equal"""
    frozen: dict[str, str] | None = None
    """the sha256 of the weights that the run trains beside, by the key that names their folder"""


@dataclass
class Build:
    """A build holds every socket of a run while it is made, and then while it runs."""

    plan: Plan
    context: Context
    world: World
    device: torch.device
    techniques: list[Technique[Any]]
    prepared: Prepared

    # Owned sockets, in the order in which they are read.
    config: ModelConfig
    parts: Parts
    source: Source
    engine: Engine
    sync: Callable[["Build", bool], None]
    """(build, is it the last micro-batch) -> None; before each backward pass it sets whether that
    pass communicates"""
    reduce: Callable[["Build"], None]
    """does what is left of gradient communication after the last backward pass"""
    loss_scale: Callable[["Build"], Tensor | None]
    """returns the factor of the loss in the backward pass, on the device; None is 1"""
    clip: Callable[["Build", float], Tensor]
    """(build, largest norm, where 0 is no limit) -> the norm before clipping, over all ranks"""
    passes: Callable[["Build", int], Sequence[Pass]]
    pack: Callable[["Build", Sequence[Any]], Packer]
    order: Callable[["Build", Packer], Order]
    """(build, packed sequences) -> the order of the sequences in the stream"""
    transport: Callable[["Build", Packer], Loader]
    place: Callable[["Build", Micro], MicroBatch]
    """(build, micro-batch on the host) -> this rank's share of it on the device"""
    recover: Callable[["Build", int, Mapping[str, float]], None]
    """(build, step, its metrics) -> None; called when a step's update was masked, as its gradient
    was not finite or a judge refused it; an exception ends the run"""

    # Composed sockets, in stage order.
    linear: dict[str, tuple[str, Callable[[nn.Linear], nn.Linear]]] = field(default_factory=dict)
    """full name of a linear -> (the technique that replaces it, how); one owner per name"""
    fake_quantized: dict[str, Rounding] = field(default_factory=dict)
    """full name of a matrix -> how every matmul with it rounds, in the steps in which
    `values["fake_quantization"]` is not 0"""
    mask: MaskSpec = field(default_factory=MaskSpec)
    storage: list[Callable[[str, Tensor], Tensor]] = field(default_factory=list)
    shard: list[Callable[[nn.Module], None]] = field(default_factory=list)
    """called for each block after its weights are real, then for the whole model"""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """how each parameter lies on the ranks, by name"""
    frozen: list[Callable[[str], bool]] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    rates: list[Callable[[str], float]] = field(default_factory=list)
    """each gives the parameter of a name a factor of its learning rate"""
    values: dict[str, Callable[[int], float]] = field(default_factory=dict)
    recut: list[Callable[["Build", Micro], Micro]] = field(default_factory=list)
    """each arranges a micro-batch's tokens in other sequences, before `place`"""
    annotate: list[Callable[["Build", MicroBatch], MicroBatch]] = field(default_factory=list)
    """each adds to a micro-batch what it says of whole rows, before ranks cut them in `place`"""
    objective: Objective = cross_entropy
    """the loss, made of parts that a head's kernels can use (kernels/cross_entropy_objective)"""
    enrich: list[Callable[["Build", Sequence[MicroBatch]], Sequence[MicroBatch]]] = field(
        default_factory=list
    )
    terms: list[Objective] = field(default_factory=list)
    auxiliary: list[Callable[["Build"], Tensor]] = field(default_factory=list)
    """each returns and clears a sum of losses that layers kept in a forward pass, before its
    backward pass"""
    targets_per_token: Tensor | float = 1.0
    """counted targets of a step's pass over its tokens, on all ranks. A sum over tokens, such as an
    auxiliary loss, is multiplied by it, because the step divides by targets."""
    state: dict[str, Stateful] = field(default_factory=dict)
    weights_for_eval: list[Callable[["Build"], AbstractContextManager[None]]] = field(
        default_factory=list
    )
    runtime: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    begins: list[Callable[["Build"], None]] = field(default_factory=list)
    """each is called once, when the weights that the run begins or goes on with are in the model; a
    signal ends it at once, so it keeps what it has"""
    before_step: list[Callable[["Build"], None]] = field(default_factory=list)
    """each acts on weights and states before a step's first forward pass"""
    judges: list[Callable[["Build", Tensor, Tensor], Tensor]] = field(default_factory=list)
    """(build, loss, gradient norm) -> on the device 1.0 where the step's update may be applied,
    else 0.0; the answer is the same on every rank"""
    measured: dict[str, Callable[["Build"], Tensor]] = field(default_factory=dict)
    """name in metrics.jsonl -> what it was in the newest step: a scalar on the device, the same on
    every rank"""
    evaluates: list[Callable[["Build", int | None], Mapping[str, float]]] = field(
        default_factory=list
    )
    """each measures the validation text beside its loss: (build, most tokens, or None for all) ->
    numbers by name, the same on every rank"""
    after_update: list[Callable[["Build", Tensor], None]] = field(default_factory=list)
    block_forward: list[str] = field(default_factory=list)
    """names of the wraps around each block's forward pass, innermost first"""

    given: Mapping[str, Tensor] = field(default_factory=dict)
    """values on the device by name, of another build, that are used in place of `source`"""

    adapters: GivenAdapters | None = None
    """those of `model.adapter` that a technique trains on"""

    # Made by the baseline from the sockets above.
    model: Decoder = None  # type: ignore[assignment]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    routed: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)
    """the parameters of each optimizer, by name"""
    before_change: list[Callable[[], None]] = field(default_factory=list)
    """what the next update calls, and drops, before it changes weights or optimizer state"""
    loader: Loader = None  # type: ignore[assignment]
    predicted: Callable[[Plan], Ledger] = None  # type: ignore[assignment]
    """predicts what a plan like this one would cost here"""
    note_line: Callable[[str], None] = _unheard
    """takes one line that is worth reading while the run goes"""
    phases: Phases = field(default_factory=Unwatched)
    compiled: list[str] = field(default_factory=list)
    """names of what is compiled of the model"""
    now: dict[str, float] = field(default_factory=dict)
    """the numbers of `values` at the step that runs now"""
    filled: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """what a technique remembers between `apply` and `active`, by its name"""
    run_notes: RunNotes = field(default_factory=RunNotes)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which matmuls and attention compute."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return half.get(self.context.precision, torch.float32)

    @property
    def change_hooks(self) -> list[Callable[[], None]] | None:
        """Return `before_change` where only the baseline's updates change what a checkpoint saves.

        It is None where a technique updates in the backward pass or in a second one, acts on
        weights before a step, evaluates others in their place, or saves a state of its own.
        """
        acts = (self.before_step, self.weights_for_eval, self.state)
        return None if any(acts) or "passes" in self.filled else self.before_change

    @property
    def rounds_now(self) -> bool:
        """Return whether the step that runs fake-quantizes."""
        return self.now.get(FAKE, 1.0) > 0

    def values_after(self, steps: int) -> dict[str, float]:
        """Return the numbers of `values` at the last of so many steps; before any, at the first."""
        return {name: value(max(0, steps - 1)) for name, value in self.values.items()}

    @property
    def is_eager(self) -> bool:
        """Return whether dispatch modes see a whole step: no model or update is compiled."""
        updates = (route.compiled for route in self.routes if route.name in self.optimizers)
        return not self.compiled and not any(updates)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a forward pass; it is off in fp32."""
        half = self.dtype is not torch.float32
        low = self.dtype if half else torch.bfloat16  # autocast takes no other
        return torch.autocast(self.device.type, low, enabled=half)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return the whole tensor from each rank's part of parameter `name`; a collective."""
        like = self.model.get_parameter(name)
        return self.layouts[name].whole(self.world, like, local)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that is split as parameter `name` is."""
        return self.layouts[name].part(self.world, self.model.get_parameter(name), whole)

    def wrap_blocks(self, name: str, wrap: Callable[[Forward, int], Forward]) -> None:
        """Replace every block's forward by `wrap(forward, layer)`, around the earlier wraps.

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
    """Return the sum of the losses that layers kept in the last forward pass, or None.

    Tensor ranks compute the same losses, and the backward pass adds up their gradients of the
    states that they share. So each rank contributes only its part of the gradient.
    """
    if not build.auxiliary:
        return None
    total = torch.stack([auxiliary(build) for auxiliary in build.auxiliary]).sum()
    part = total / build.world.size("tensor")
    return part + (total - part).detach()


OWNED = (
    "config",
    "source",
    "engine",
    "sync",
    "reduce",
    "loss_scale",
    "clip",
    "passes",
    "pack",
    "order",
    "transport",
    "place",
    "recover",
)
PARTS = tuple(f"parts.{f.name}" for f in fields(Parts))
COMPOSED = (
    "linear",
    "fake_quantized",
    "mask",
    "block_forward",
    "storage",
    "shard",
    "layouts",
    "frozen",
    "routes",
    "rates",
    "values",
    "recut",
    "annotate",
    "objective",
    "enrich",
    "terms",
    "auxiliary",
    "state",
    "weights_for_eval",
    "runtime",
    "begins",
    "before_step",
    "judges",
    "measured",
    "evaluates",
    "after_update",
    "compiled",
)
SOCKETS = (OWNED[0], *PARTS, *OWNED[1:], *COMPOSED)
