"""Share what techniques do that freeze a model and train adapters beside its linears (model/lora).

Their knobs are one set: which linears, how wide, how the correction is scaled, at what rate its
second matrix learns, and how much of it is left out in a step. A subclass says how the frozen
weights are stored, or that the lengths of rows learn too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.core.strict import Wrong
from headrace.costs.adapters import AdapterSizes, StoredBytes, with_adapters_alone
from headrace.costs.ledger import Ledger
from headrace.model.adapter import read_config
from headrace.model.lora import (
    FeatureDropout,
    LoraLinear,
    adapt_linears,
    adapter_evidence,
    over_random_weights,
)
from headrace.model.peft import (
    GivenAdapters,
    check_continues,
    continuing,
    merging,
    read_adapters,
)
from headrace.plan.technique import (
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FASTER = ".lora_b"
"""How the names of the matrices end that LoRA+ gives a rate of their own."""


class AdapterTechnique(Technique[Build]):
    """A technique of this kind trains adapters of a frozen model instead of the model."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of an adapter; tuner range 8 to 256."""
    alpha: float = Field(default=32.0, gt=0, le=4096)
    """The correction is multiplied by alpha / rank, or by alpha / sqrt(rank) (`scaling`)."""
    targets: tuple[str, ...] = ()
    """Ends of names of the linears that are adapted, as in "mixer.qkv" or "mlp.down"; empty is all
    linears of the blocks, which learns best at a given size (arXiv 2305.14314, section 4)."""
    ranks: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = ()
    """The rank of each of `targets`, in the place of `rank`; empty is `rank` for all."""
    scaling: Literal["rank", "root_of_rank"] = "rank"
    """root_of_rank keeps what an adapter learns per step at large ranks (rsLoRA, arXiv 2312.03732);
    alpha means another number there."""
    b_rate: float = Field(default=1.0, ge=1, le=64)
    """Learning rate of an adapter's second matrix over that of its first (LoRA+, arXiv 2402.12354,
    which advises 16)."""
    dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Chance of an input feature to be left out of all corrections of a step (arXiv 2404.09610);
    evaluation leaves none out."""

    train_also: tuple[Literal["embedding", "head"], ...] = ()
    """What learns whole beside adapters, as for tokens that the base does not know; one table where
    both are tied. PEFT calls it `modules_to_save`."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.LINEAR
    composes: ClassVar[tuple[str, ...]] = ("linear", "frozen", "rates", "before_step")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:optimizer",
        "memory capacity:gradients",
        "forgetting",
    )
    """Adapters learn less than all weights do, and forget less (arXiv 2405.09673)."""
    usual_rate: ClassVar[float | None] = 2e-4
    """Rate of adapters (QLoRA, arXiv 2305.14314, appendix B)."""
    magnitudes: ClassVar[bool] = False
    """whether the lengths of the adapted weights' rows learn too"""

    @model_validator(mode="after")
    def _check_ranks(self) -> "AdapterTechnique":
        if self.ranks and len(self.ranks) != len(self.targets):
            many = len(self.targets)
            raise Wrong(
                f"ranks has {len(self.ranks)} numbers and targets {many} names: each target has "
                "its rank, or all have `rank`",
                mend(f"techniques.{self.name()}.ranks={[self.rank] * many}"),
            )
        return self

    @property
    def sizes(self) -> AdapterSizes:
        """Return the sizes of the adapters."""
        return AdapterSizes(self.targets, self.rank, self.ranks, self.magnitudes, self.train_also)

    def tables(self, config: ModelConfig) -> list[str]:
        """Return the names of the parameters that learn whole beside adapters."""
        return self.sizes.tables(tied=config.tied_embeddings)

    @property
    def stored(self) -> str:
        """Return how the frozen weights are stored where that is in few bits, or ""."""
        return ""

    def scale(self, rank: int) -> float:
        """Return what a correction of `rank` is multiplied by."""
        return self.alpha / (rank if self.scaling == "rank" else rank**0.5)

    def is_noisy(self) -> bool:
        """Leave input features out while training alone."""
        return self.dropout > 0

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere."""
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Refuse adapters of random weights, which stay random: there is nothing to adapt."""
        return over_random_weights(self.name(), plan.model)

    def predict(self, ledger: Ledger) -> Ledger:
        """Count gradients and state of the adapters alone; drop the matmuls of frozen gradients."""
        return self.predict_stored(ledger, None)

    def predict_stored(self, ledger: Ledger, stored: StoredBytes | None) -> Ledger:
        """Return the same with adapted weights of `stored(layer, inputs, outputs)` bytes."""
        return with_adapters_alone(ledger, self.name(), self.sizes, stored)

    def apply(self, build: Build) -> None:
        """Replace the chosen linears, and freeze all but the adapters."""
        self.adapt(build)

    def adapt(self, build: Build) -> list[str]:
        """Do what `apply` does, and return the full names of the adapted linears."""
        tables = self.tables(build.config)
        names = adapt_linears(build, self.name(), self.sizes, self.scale, tables)
        if build.adapters is not None:
            ranks = {name: self.sizes.rank_of(name.split(".", 2)[2]) for name in names}
            check_continues(
                build.adapters,
                ranks,
                self.name(),
                magnitudes=self.magnitudes,
                tables=tables,
                key="model.adapter",
            )
        if self.b_rate != 1:
            build.rates.append(lambda name: self.b_rate if name.endswith(FASTER) else 1.0)
        if self.dropout:
            build.before_step.append(self._leave_out)
        return names

    def _leave_out(self, build: Build) -> None:
        """Draw the features that corrections leave out in the step that begins."""
        drawn = build.notes.get(self.name())
        if drawn is None:
            linears = _adapted(build.model)
            offsets = {n: build.layouts[f"{n}.lora_a"].offsets(build.world)[0][1] for n in linears}
            drawn = FeatureDropout(linears, offsets, self.dropout, build.plan.seed)
            build.notes[self.name()] = drawn
        drawn.draw(int(build.now["step"]), build.device)

    def active(self, build: Build) -> Evidence:
        """Report adapters that got a gradient, and frozen weights that got none."""
        tables = self.tables(build.config)
        active, detail, numbers = adapter_evidence(build.model, build.optimizers.values(), tables)
        if self.b_rate != 1:
            ratio = _ratio_of_rates(build)
            active = active and abs(ratio / self.b_rate - 1) < 1e-9
            detail += f"; second matrices learn at {ratio:g} times the rate of first ones"
            numbers = {**numbers, "rate_ratio": ratio}
        if self.dropout:
            kept = [m.kept for m in _adapted(build.model).values() if m.kept is not None]
            left_out = sum(int((one == 0).sum()) for one in kept)
            count = sum(one.numel() for one in kept)
            active = active and len(kept) == len(_adapted(build.model))
            detail += f"; {left_out} of {count} input features were left out"
            numbers = {**numbers, "left_out": left_out}
        return Evidence(active, detail, numbers)

    def reached(self, build: Build) -> Mapping[str, bool]:
        """Return whether each adapter learned anything: its second matrix begins at zero."""
        optimizers = [*build.optimizers.values()]
        return {n: m.has_learned(optimizers) for n, m in _adapted(build.model).items()}


def _adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted linears by their full names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


def _ratio_of_rates(build: Build) -> float:
    """Return the smallest rate of second matrices over the largest of first ones."""
    rates: dict[Any, float] = {}
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            rates |= dict.fromkeys(group["params"], group["initial_lr"] * group["lr_factor"])
    linears = _adapted(build.model).values()
    second, first = (
        [rates[p] for p in parameters if p in rates]
        for parameters in ([m.lora_b for m in linears], [m.lora_a for m in linears])
    )
    return min(second) / max(first) if second and first else 0.0


def given_adapters(model: ModelConfig) -> GivenAdapters:
    """Return the adapters that a run begins with.

    Raises:
        ConfigError, UnsupportedError: see `read_adapters`.
    """
    base = Path(model.pretrained)
    return read_adapters(Path(model.adapter), base, read_config(base), "model.adapter")


def begin_with_adapters(build: Build) -> None:
    """Begin with given adapters: in the weights, or as what a technique trains on."""
    given = given_adapters(build.config)
    trains = [t for t in build.techniques if isinstance(t, AdapterTechnique)]
    if trains:
        build.adapters = given
        build.source = continuing(build.source, given, trains[0].scale)
    else:
        build.source = merging(build.source, given)
