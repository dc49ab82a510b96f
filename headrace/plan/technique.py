"""Define a technique: one optimization, in one file, with the methods everything else calls.

A technique is a frozen pydantic model. Its fields are its knobs, and its docstring's first line is
its line in the catalogue. It acts while the Build is made, at its stage, and never in the loop.
This module does not import torch: `Technique` is generic over the Build.
"""

import importlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from headrace.core.command import renamed
from headrace.core.errors import ConfigError, RefusalKind, alike
from headrace.core.known import describe_known
from headrace.core.remedy import Remedy, as_remedy, mend
from headrace.core.strict import Strict
from headrace.costs.ledger import Ledger
from headrace.plan.discovery import defined_in, modules_of
from headrace.plan.receipts import Ratio, Receipt
from headrace.plan.symptoms import LoopChange

B = TypeVar("B")


class Stage(IntEnum):
    """Say when a technique acts. The order here is the order of application."""

    DESIGN = 0
    PARTS = 1
    MODEL = 2
    LINEAR = 3
    TENSOR = 4
    PIPELINE = 5
    FREEZE = 6
    CHECKPOINT = 7
    COMPILE = 8
    GATE = 9
    MATERIALIZE = 10
    OPTIMIZER = 11
    SCHEDULE = 12
    DATA = 13
    STEP = 14


Effect = Literal["exact", "approximate", "learning"]
Rounds = Literal["operands", "state", "other"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""What a change may do to the gradients, the mildest first."""


@dataclass(frozen=True)
class Card:
    """A card says what a technique is for, in a reader's words, with what was measured of it.

    Args:
        buys: what it gains, derived or with a citation; several parts, the shortest first.
        costs: what is paid for that, derived or with a citation; several parts, the shortest first.
        helps: when to take it.
        hurts: when to leave it.
        source: the paper or the package.
        receipts: measurements, which `discover` reads from a file beside the techniques.
    """

    buys: str | tuple[str, ...]
    costs: str | tuple[str, ...]
    helps: str
    hurts: str
    source: str
    receipts: tuple[Receipt, ...] = ()

    def measured(self, field: str) -> list[str]:
        """Return the receipts of a field as texts; the first names the hardware."""
        matching = [receipt for receipt in self.receipts if receipt.field == field]
        texts = [receipt.text for receipt in matching]
        return (
            [f"{matching[0].hardware.removeprefix('NVIDIA ')}, {texts[0]}", *texts[1:]]
            if texts
            else []
        )

    def parts(self, field: str) -> tuple[str, ...]:
        """Return the parts of a field's own text, without receipts."""
        own_text: str | tuple[str, ...] = getattr(self, field)
        return (own_text,) if isinstance(own_text, str) else own_text

    def shown(self, field: str) -> str:
        """Return a field as text for a reader, with its receipts.

        Receipts come first, but last in the field `hurts`.
        """
        own_text, *more = self.parts(field)
        for part in more:
            own_text += f". {part}" if part[:1].isupper() else f"; {part}"
        measured = self.measured(field)
        return "; ".join([own_text, *measured] if field == "hurts" else [*measured, own_text])

    def whole(self) -> dict[str, str]:
        """Return every field -> its text for a reader."""
        return {name: self.shown(name) for name in ("buys", "costs", "helps", "hurts", "source")}


@dataclass(frozen=True)
class Context:
    """Hold where a plan would run; `supports` decides by it."""

    plan: Any
    device: str
    device_name: str
    capability: tuple[int, int] | None
    torch: tuple[int, int]
    has_triton: bool
    has_compiler: bool
    ranks: int
    precision: Literal["fp32", "bf16", "fp16"]

    @property
    def capability_text(self) -> str:
        """Return the compute capability as text like "8.0", or "unknown"."""
        return ".".join(map(str, self.capability or ("unknown",)))

    @property
    def has_ring(self) -> bool:
        """Return whether a technique of the plan attends to parts of rows by itself."""
        on = self.plan.techniques.values()
        return any("context" in t.axes and "parts.attend" in t.composes for t in on)

    def whole(self, *axes: str) -> Remedy:
        """Return the changes after which the model is split along none of `axes` of the mesh."""
        mesh, on, words = self.plan.mesh, self.plan.techniques, list[str]()
        if "context" in axes and "expert" not in axes and mesh.data // mesh.replicate % mesh.expert:
            axes = (*axes, "expert")  # the ranks that are left cannot divide the experts
        for axis in axes:
            words += [f"mesh.{axis}=1", *(f"-{n}" for n, t in on.items() if axis in t.axes)]
        return mend(*words)

    def lacks_triton(self) -> "Unsupported | None":
        """Return why a kernel of Triton's cannot run here; None where it can."""
        if self.device != "cuda":
            return Unsupported(
                f"its kernels need an NVIDIA GPU, not {self.device}",
                mend("device=cuda"),
                RefusalKind.DEVICE,
            )
        if not self.has_triton:
            return Unsupported(
                "its kernels are compiled by Triton", "pip install triton", RefusalKind.PACKAGE
            )
        return None


@dataclass(frozen=True)
class Supported:
    """The answer that a technique can run here."""


@dataclass(frozen=True, init=False)
class Unsupported:
    """The answer that a technique cannot run here, with the reason and what would mend it.

    Args:
        reason: what is so, with numbers.
        remedy: what mends it; a plain text where no change of the plan does.
        kind: kind of the reason.
    """

    reason: str
    remedy: Remedy
    kind: RefusalKind

    def __init__(
        self, reason: str, remedy: Remedy | str, kind: RefusalKind = RefusalKind.PLAN
    ) -> None:
        for name, value in (("reason", reason), ("remedy", as_remedy(remedy)), ("kind", kind)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Doubt:
    """Say why a plan, or a loss that was measured, may not be what its user means.

    Args:
        reason: what is so, with numbers.
        remedy: keys, flags or a command with which the plan means something.
        meaningless: whether nothing can come of the plan, so that no run begins with it.
        changes: overrides that make a run learn that diverged for this reason.
        kind: what makes a validation loss doubtful; "" for a doubt about a plan.
        numbers: name -> number of the reason.
    """

    reason: str
    remedy: Remedy
    meaningless: bool = False
    changes: tuple[str, ...] = ()
    kind: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Return the doubt and its remedy in one line."""
        return f"{self.reason}; try: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Return the doubt as JSON values."""
        if self.kind:
            named = {"kind": self.kind, "sentence": self.reason, "remedy": self.remedy.text}
            return {**named, **self.numbers}
        return {
            "reason": self.reason,
            "remedy": self.remedy.text,
            "meaningless": self.meaningless,
            "changes": list(self.changes),
        }


@dataclass(frozen=True)
class Evidence:
    """Hold proof, read from tensors, graphs or counters, of whether a technique is in force."""

    active: bool | None
    """Whether the technique is in force; None where this rank holds nothing that could show it, as
    a stage without a head."""
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Technique(Strict, Generic[B]):
    """A technique is one optimization. This is the base class of all of them."""

    room: ClassVar[str] = ""
    stage: ClassVar[Stage]
    claims: ClassVar[tuple[str, ...]] = ()
    """Sockets that the technique owns alone."""
    composes: ClassVar[tuple[str, ...]] = ()
    """Sockets that the technique adds to, in stage order."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Axes of the mesh along which the technique splits the model."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Name of each technique that this one cannot stand beside -> the cited reason."""
    equality: ClassVar[Effect] = "exact"
    """How its gradients compare with the baseline's. `exact`: they are the same; `learning`:
    another rule; `approximate`: they are within `band`."""
    band: ClassVar[float] = 0.0
    """Largest relative distance from the baseline's gradients that `approximate` may show."""
    card: ClassVar[Card]
    rest: ClassVar[bool] = False
    """Whether its optimizer takes what no other technique's takes; it is predicted last."""
    runs_rest: ClassVar[tuple[str, ...]] = ()
    """Names of techniques with `rest` that may stand beside this one: it runs their updates too."""
    timed: ClassVar[bool] = False
    """Whether `predict` also covers what it does to a step's time, be it nothing."""
    rounds: ClassVar[Rounds] = "other"
    """What an `approximate` technique rounds: `operands` of products, each relative to itself and
    anew in each step; `state` that stays from step to step; or something else."""
    follows_horizon: ClassVar[bool] = False
    """Whether what a step does depends on where the schedule ends, beside the learning rate. Then
    a state of a shorter run is none of a longer one."""
    halves: ClassVar[bool] = False
    """Whether it multiplies in 16 bits or fewer, which some processors only emulate."""
    symptoms: ClassVar[tuple[str, ...]] = ()
    """Findings of the doctor that the technique is a remedy for, in the words of symptoms.py."""
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ()
    """Changes of another trainer's loop that do the same, in the words of symptoms.py."""
    token_share: ClassVar[float] = 1.0
    """Share of the tokens to a loss that the technique needs, by its card's source; 1 claims
    nothing. A tuner first tries what promises most by this share and by the time of a step."""
    unsaid: ClassVar[Mapping[str, Any]] = {}
    """Knob -> its value in runs from before it was one, where today's default is another."""
    usual_rate: ClassVar[float | None] = None
    """Usual `optimizer.lr` of what it trains instead of the model's weights; None for these."""
    settled: ClassVar[tuple[str, ...]] = ()
    """Names of knobs that no search changes: for tests, or for what a user accepts."""
    blocks: ClassVar[str] = ""
    """Kernel by which a ring computes its attention (kernels/block_attention); "" for none."""
    images: ClassVar[bool] = False
    """Whether it means the same for a network that tells images apart, where no tokens are."""

    @classmethod
    def name(cls) -> str:
        """Return the technique's name in plans, which is its module's name."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def line(cls) -> str:
        """Return the technique's line in the catalogue."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return the keys of the plan that it rewrites -> their new values.

        An example of a key is `model.kv_heads`. A plan that sets one of them otherwise is an error.
        """
        return {}

    def batch_stages(self, plan: Any) -> Sequence[tuple[int, int]]:
        """Return (first step, tokens of a step) of each stage of a batch that it lets grow."""
        return ()

    def micro_group(self, plan: Any) -> int:
        """Return the number whose multiples a step's micro-batches must be on each rank."""
        return 1

    def saves_by(self, often: int) -> int:
        """Return the number whose multiples about `often` steps between checkpoints must be."""
        return 1

    def reads(self) -> Mapping[str, str]:
        """Return knob -> the folder of weights that it reads and that no checkpoint holds.

        An empty name of a knob stands for the weights that the run starts from.
        """
        return {}

    def multiplies_fp32(self) -> bool:
        """Return whether it multiplies matrices in fp32 in a run of half precision on a GPU."""
        return False

    def is_noisy(self) -> bool:
        """Return whether the model computes something else with gradients than without."""
        return False

    def supports(self, context: Context) -> Supported | Unsupported:
        """Return whether it can run in `context`, before anything optional is imported."""
        raise NotImplementedError

    def doubt(self, plan: Any) -> Doubt | None:
        """Return why it may mean nothing in `plan`, by what its card says; None where it does.

        It is asked when a run begins or a change is proposed, not where a plan is only predicted.
        """
        return None

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger with this technique in force, and leave the given one as it is."""
        raise NotImplementedError

    def apply(self, build: B) -> None:
        """Fill or compose the declared sockets."""
        raise NotImplementedError

    def active(self, build: B) -> Evidence:
        """Return proof from the run, after one step, of whether the technique is in force."""
        raise NotImplementedError

    def reached(self, build: B) -> Mapping[str, bool]:
        """Return whether each part that it adds has learned anything, at a run's end, by name."""
        return {}


LIST = "headrace list"
"""Command that prints every technique."""


@dataclass(frozen=True)
class Catalogue:
    """Hold every technique by name, and every model family as defaults for `model.*`."""

    techniques: Mapping[str, type[Technique[Any]]]
    families: Mapping[str, Mapping[str, Any]]

    def find(self, name: str, option: str = "") -> type[Technique[Any]]:
        """Return the class of the technique called `name`.

        Args:
            name: as it was written.
            option: option that it stood behind, as --with; "" where it is a table's name.

        Raises:
            ConfigError: there is no such technique; the message names the nearest.
        """
        if name in self.techniques:
            return self.techniques[name]
        known, problem = describe_known(name), f"there is no technique {name!r}"
        if known is not None:
            message, near = known
            if "=" in near:
                other = renamed(name, "", shlex.quote(near))
                raise ConfigError(message, Remedy(text=other) if other else mend(near))
            raise ConfigError(message, f"headrace explain {near}" if near else LIST)
        words = [word.strip() for word in re.split(r"[,;\s]+", name)]
        parts = [word.removeprefix("techniques.").partition("=")[0].lower() for word in words]
        suggestions = [part.replace("-", "_") for part in parts if part]
        if not suggestions or not {*suggestions} <= {*self.techniques}:
            near = alike(name, self.techniques)
            suggestions = [near] if near else []
        if not suggestions:
            like = "nor one of a like name" if self.techniques else "and none installed"
            raise ConfigError(f"{problem}, {like}", LIST)
        first, *others = suggestions
        more = [f"{option} {one}" for one in others]
        raise ConfigError(
            f"{problem}; did you mean {' and '.join(suggestions)}?",
            renamed(name, first, *more) or f"[techniques.{first}] in place of [techniques.{name}]",
        )

    def with_family(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table `model` over the defaults of its family.

        Raises:
            ConfigError: there is no such family.
        """
        family = model.get("family", "headrace")
        if not isinstance(family, str) or family not in self.families:
            near = alike(str(family), self.families)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(self.families)}"
            raise ConfigError(
                f"there is no model family {family!r}; {hint}",
                mend(f"model.family={near or 'headrace'}"),
            )
        return {**self.families[family], **model}


def discover(package: ModuleType) -> dict[str, type[Technique[Any]]]:
    """Import every module of `package` and collect the techniques that they define.

    A technique's module carries its name; there is no registry to edit. Cards get the receipts
    that a file beside the package's techniques holds.
    """
    classes: dict[str, type[Technique[Any]]] = {}
    for module in modules_of(package):
        for technique in defined_in(module, Technique):
            if "card" in vars(technique):
                classes[technique.name()] = technique
    for name, receipts in read_receipts(Path(package.__path__[0], RECEIPTS)).items():
        if name in classes and classes[name].card.receipts is not receipts:
            classes[name].card = replace(classes[name].card, receipts=receipts)
    return dict(sorted(classes.items()))


RECEIPTS = "receipts.json"
"""Name of the file of a package of techniques that holds what was measured of them."""


def read_receipts(file: Path) -> dict[str, tuple[Receipt, ...]]:
    """Return technique -> its receipts in a file; empty where there is no file."""
    try:
        state = file.stat()
    except FileNotFoundError:
        return {}
    return _receipts_as_of(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _receipts_as_of(file: Path, changed_ns: int, bytes: int) -> dict[str, tuple[Receipt, ...]]:
    """Return the receipts in a file as it was last changed: every verb asks for them."""
    by_name: dict[str, tuple[Receipt, ...]] = {}
    for row in json.loads(file.read_text()):
        ratios = tuple(Ratio(**ratio) for ratio in row["ratios"])
        words = {key: row[key] for key in ("field", "hardware", "where", "note")}
        known = by_name.get(row["technique"], ())
        by_name[row["technique"]] = (*known, Receipt(**words, ratios=ratios))
    return by_name


def installed() -> Catalogue:
    """Return the catalogue of every technique and model family of this package.

    Their modules are imported by name in this function, since the core stands below them.
    """
    techniques = importlib.import_module("headrace.techniques")
    zoo = importlib.import_module("headrace.model.zoo")
    return Catalogue(discover(techniques), zoo.families())


def check_claims(techniques: Iterable[Technique[Any]]) -> None:
    """Refuse techniques of which two own one socket, or one excludes another.

    Raises:
        ConfigError: the clash; it names both techniques and the flag that resolves it.
    """
    owners: dict[str, str] = {}
    active = list(techniques)
    names = {t.name(): t for t in active}
    for technique in active:
        for socket in technique.claims:
            if socket in owners:
                first = owners[socket]
                raise ConfigError(
                    f"{first} and {technique.name()} both own the socket {socket!r}",
                    _leaving(names[first]) | _leaving(technique),
                )
            owners[socket] = technique.name()
        for other, reason in technique.excludes.items():
            if other in names:
                raise ConfigError(
                    f"{technique.name()} cannot stand beside {other}: {reason}",
                    _leaving(names[other]) | _leaving(technique),
                )


def _leaving(technique: Technique[Any]) -> Remedy:
    """Return the changes that remove a technique, and set the axes that it splits along to 1."""
    return mend(*(f"mesh.{axis}=1" for axis in technique.axes), f"-{technique.name()}")
