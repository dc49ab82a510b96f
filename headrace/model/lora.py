"""Adapt a frozen linear by a trained correction of low rank (arXiv 2106.09685).

W x becomes W x + s B (A x). Only A [rank, in] and B [out, rank] learn: gradients and optimizer
state are those of rank x (in + out) numbers instead of in x out. B starts at zero, so the adapted
model starts as the model that it adapts. The frozen weight may be stored in any way that a linear
can multiply with (kernels/quantized_weight).

DoRA (arXiv 2402.09353) learns how long each row of W + s B A is beside where it points:
m (W + s B A) x / |W + s B A|, row by row, with m = |W| at first. No gradient goes through the
lengths (section 4.3 there), which are found without making W + s B A:
|w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b for a row w and its b.

Dropout leaves out input features of the correction, the same for all tokens of a step (the columns
of A that arXiv 2404.09610 drops): the mask is a vector for each linear, a pure function of (seed,
step, linear, feature), so it costs no memory and is one under every layout, recomputation and cut.

Shapes: R rank.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.errors import ConfigError, nearest
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.adapters import ADAPTERS, LENT, AdapterSizes, targeted
from headrace.kernels.autocast import compute_dtype
from headrace.kernels.blockwise_8bit import LEAST_SCALE
from headrace.kernels.quantized_weight import QuantizedWeight, adapted_matmul
from headrace.model.mask import mixed
from headrace.parallel.layout import local_of
from headrace.plan.technique import Doubt

MOMENTS = {
    "exp_avg": 0.0,
    "exp_avg_sq": 0.0,
    "momentum": 0.0,
    "exp_avg_scales": 2 * LEAST_SCALE,  # of 8 bits, whose code of zero is a number like any other
}
"""What optimizers keep of gradients, and the size above which it is of one other than zero."""
SHORTEST = 1e-30
"""Square of a row's length below which it counts as this, so that none divides by zero."""


class LoraLinear(nn.Linear):
    """A linear with a low-rank correction; `weight` and `bias` keep their names."""

    column_parameters: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0, "lora_b": 0}
    row_parameters: ClassVar[Mapping[str, int]] = {"weight": 1, "lora_a": 1}
    """which dimension of each parameter is cut where outputs, or inputs, are split over ranks"""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Take over `linear`'s parameters.

        Args:
            linear: what is adapted.
            rank: rows of `lora_a`.
            scale: what the correction is multiplied by.
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        self.scale = scale
        self.kept: Tensor | None = None
        """factors of the input features that this rank has, [in], while some are left out"""
        self.is_off = False
        """whether it computes what the frozen linear alone computes"""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if self.is_off:
            return super().forward(input)
        if isinstance(self.weight, QuantizedWeight):
            y = self.matmul(input)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        correction = self.correction(input)
        return self.added(input, correction if self.bias is None else correction + self.bias)

    def matmul(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out] without the bias, which is added where ranks' parts are."""
        if self.is_off:
            return F.linear(input, self.weight)
        if isinstance(self.weight, QuantizedWeight):
            return adapted_matmul(input, self.weight, self.first(), self.lora_b, self.scale)
        return self.added(input, self.correction(input))

    def added(self, input: Tensor, correction: Tensor) -> Tensor:
        """Add the frozen product to a correction [..., out], in one operation where there is one.

        The product's sum begins at the correction, so that what a checkpoint keeps is the whole
        result. The correction comes first: a block that runs again stops where it has all that it
        keeps.
        """
        if type(self.weight) not in (Tensor, nn.Parameter):  # one that multiplies in its own way
            return F.linear(input, self.weight) + correction
        dtype = compute_dtype(input)
        rows = correction.to(dtype).flatten(0, -2), input.to(dtype).flatten(0, -2)
        return torch.addmm(*rows, self.weight.to(dtype).t()).unflatten(0, input.shape[:-1])

    def first(self) -> Tensor:
        """Return the first matrix, without the input features that a step leaves out."""
        kept = self.kept if torch.is_grad_enabled() else None
        return self.lora_a if kept is None else self.lora_a * kept

    def correction(self, input: Tensor) -> Tensor:
        """Return what is added to the frozen product."""
        return F.linear(F.linear(input, self.first()) * self.scale, self.lora_b)

    def has_learned(self, optimizers: Iterable[Any]) -> bool:
        """Return whether any step's gradient of the second matrix was other than zero.

        An optimizer's state remembers it, whatever the last step's was. Where there is none, the
        matrix itself says so: it begins at zero.
        """
        kept = [state for one in optimizers if (state := one.state.get(self.lora_b))]
        return any(map(_has_moments, kept)) if kept else bool(local_of(self.lora_b).any())

    def effective(self) -> Tensor:
        """Return the plain weight [out, in] that computes the same, fp32; the adapter learns by it.

        What the correction leaves out in a step is left out here too.
        """
        with torch.autocast(self.weight.device.type, enabled=False):
            return plain(self.weight) + self.scale * (self.lora_b.float() @ self.first().float())

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the plain weight [out, in] that computes the same; the sum is made in fp32."""
        return self.effective()


class DoraLinear(LoraLinear):
    """This linear learns where its rows point by a low-rank correction, and how long each is."""

    column_parameters: ClassVar[Mapping[str, int]] = {**LoraLinear.column_parameters, "lora_m": 0}

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Take over `linear`'s parameters; see `LoraLinear`."""
        super().__init__(linear, rank=rank, scale=scale)
        self.lora_m = nn.Parameter(torch.empty(linear.out_features, device=linear.weight.device))
        self.add_up: Callable[[Tensor], Tensor] = _whole
        """adds up what ranks find of rows of which each has a part"""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        scaled = self.matmul(input)
        return scaled if self.bias is None else scaled + self.bias.to(scaled.dtype)

    def matmul(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out] without the bias."""
        turned = super().matmul(input)
        if self.is_off:
            return turned
        return turned * (self.lora_m / self.lengths()).to(turned.dtype)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """Return how long each row of the corrected weight is, fp32 [out]."""
        with torch.autocast(self.weight.device.type, enabled=False):
            weight, a, b = (plain(x) for x in (self.weight, self.lora_a, self.lora_b))
            squares = torch.linalg.vector_norm(weight, dim=1).square()
            squares = squares + 2 * self.scale * ((weight @ a.t()) * b).sum(1)
            squares = squares + self.scale**2 * ((b @ (a @ a.t())) * b).sum(1)
            return self.add_up(squares).clamp(min=SHORTEST).sqrt()

    def effective(self) -> Tensor:
        """Return the plain weight [out, in] that computes the same, fp32; the adapter learns by it.

        No gradient goes through the lengths of rows.
        """
        turned = super().effective()
        lengths = torch.linalg.vector_norm(turned.detach(), dim=1).clamp(min=SHORTEST**0.5)
        return turned * (self.lora_m.float() / lengths)[:, None]


def _whole(x: Tensor) -> Tensor:
    """Return `x`: this process has whole rows."""
    return x


class FeatureDropout:
    """Leaves out input features of corrections, other ones in each step.

    Args:
        linears: the adapted linears by their full names.
        offsets: the first input feature that this rank has of each, by the same names.
        rate: the chance of a feature to be left out.
        seed: the run's.
    """

    def __init__(
        self,
        linears: Mapping[str, LoraLinear],
        offsets: Mapping[str, int],
        rate: float,
        seed: int,
    ) -> None:
        self.linears, self.rate, self.seed = linears, rate, seed
        self.sizes = [linear.lora_a.shape[1] for linear in linears.values()]
        self.names = torch.cat(
            [
                torch.full((size,), zlib.crc32(name.encode()) & 0x7FFFFFFF)
                for name, size in zip(linears, self.sizes, strict=True)
            ]
        )
        self.features = torch.cat(
            [
                torch.arange(size) + offsets[name]
                for name, size in zip(linears, self.sizes, strict=True)
            ]
        )

    def draw(self, step: int, device: torch.device) -> None:
        """Give every linear the factors of a step, in the place of those of the step before."""
        self.names, self.features = self.names.to(device), self.features.to(device)
        place = mixed(self.names, torch.full_like(self.names, step), self.seed)
        drawn = mixed(place, self.features, self.seed)
        kept = (drawn >= self.rate * 2**32).float() / (1 - self.rate)
        for linear, factors in zip(self.linears.values(), kept.split(self.sizes), strict=True):
            if linear.kept is None:
                linear.kept = factors
            else:  # the same storage, which a recorded graph reads
                linear.kept.copy_(factors)


def has_adapters(model: nn.Module) -> bool:
    """Return whether any linear of a model has an adapter."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute what its frozen weights alone compute."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_off = True
    try:
        yield
    finally:
        for module in adapted:
            module.is_off = False


def plain(weight: Tensor) -> Tensor:
    """Return a weight as plain numbers, fp32, whatever it is stored in."""
    made = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    return made.detach().float()


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by its name without adapters; their corrections are in the weights.

    The model must be whole on this process, as it is when it was opened from a run's folder.
    """
    state = {
        name: plain(parameter)
        for name, parameter in model.named_parameters()
        if not name.endswith(ADAPTERS)
    }
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            state[f"{name}.weight"] = module.merged()
    return state


class StorageErrors(NamedTuple):
    """Hold what storage in few bits costs, as shares of the norm of the adapted weights."""

    stored: float
    """How far the stored weights are from those that were given."""
    learned: float
    """How far the adapters moved them."""
    requantized: float
    """How far the merged weights would be off if they were stored in as few bits again."""


@torch.no_grad()
def storage_errors(
    model: nn.Module, source: Callable[[str, torch.Size], Tensor]
) -> StorageErrors | None:
    """Return what storage costs, over all adapted linears; None where none is stored in few bits.

    Args:
        model: whole on this process.
        source: gives the weights as they were before they were stored.
    """
    squares = torch.zeros(4, dtype=torch.float64)
    for name, module in model.named_modules():
        if not isinstance(module, LoraLinear) or not isinstance(module.weight, QuantizedWeight):
            continue
        given = source(f"{name}.weight", module.weight.shape).float()
        before, after = plain(module.weight).cpu(), module.merged().cpu()
        requantized = type(module.weight).of(after).dequantize()
        moved = (given, before - given, after - before, requantized - after)
        squares += torch.stack([one.double().square().sum() for one in moved])
    if not squares[0]:
        return None
    return StorageErrors(*(squares[1:] / squares[0]).sqrt().tolist())


def over_random_weights(name: str, model: ModelConfig) -> Doubt | None:
    """Return the doubt about the adapters of technique `name` where the frozen weights are random.

    Args:
        name: the technique's.
        model: of the plan.
    """
    if model.pretrained:
        return None
    return Doubt(
        f"{name} freezes the weights that the run starts from and trains adapters beside them, and "
        "these weights are random: the plan names no model.pretrained",
        Remedy(
            text="model.pretrained=FOLDER of a trained model in Hugging Face format (of a run: "
            "headrace export RUN --to hf),"
        )
        | mend(f"-{name}", text=f"--without {name} to train all weights"),
        meaningless=True,
    )


def learns(name: str, tables: Sequence[str] = ()) -> bool:
    """Return whether the parameter of this name learns: an adapter's, or one of `tables`."""
    return name.endswith(ADAPTERS) or name in tables


def linears_of(model: nn.Module, targets: Sequence[str], owner: str = "lora") -> list[str]:
    """Return full names of the blocks' linears that `targets` name by their ends, or of all.

    Raises:
        ConfigError: a target names none.
    """
    names = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.startswith("blocks.") and not n.endswith(LENT)
    ]
    ends = list(dict.fromkeys(name.split(".", 2)[2] for name in names))
    for target in targets:
        if target not in ends:
            raise ConfigError(
                f"targets has {target!r}, and the blocks of this model have {', '.join(ends)}",
                targeted(owner, *nearest(target, ends).split(", ")),
            )
    return [name for name in names if not targets or name.split(".", 2)[2] in targets]


class Adaptable(Protocol):
    """A build whose linears can be replaced and whose parameters can be frozen."""

    frozen: list[Callable[[str], bool]]

    @property
    def model(self) -> nn.Module:
        """Return the model whose linears are adapted."""
        ...

    def replace_linears(
        self, owner: str, names: Sequence[str], make: Callable[[nn.Linear], nn.Linear]
    ) -> None:
        """Ask for linears to be replaced by what `make` returns of them."""
        ...


def adapt_linears(
    build: Adaptable,
    owner: str,
    adapters: AdapterSizes,
    scale: Callable[[int], float],
    tables: Sequence[str] = (),
) -> list[str]:
    """Put adapters beside the chosen linears, freeze all else, and return the linears' full names.

    Args:
        build: holds the model.
        owner: name of the technique that asks for it.
        adapters: their sizes, and which linears have them.
        scale: rank -> what a correction of that rank is multiplied by.
        tables: names of the parameters that learn whole beside them.

    Raises:
        ConfigError: a target names no linear, or another technique already owns one of them.
    """
    names = linears_of(build.model, adapters.targets, owner)
    kind = DoraLinear if adapters.magnitudes else LoraLinear
    for name in names:
        rank = adapters.rank_of(name.split(".", 2)[2])

        def make(linear: nn.Linear, rank: int = rank) -> LoraLinear:
            return kind(linear, rank=rank, scale=scale(rank))

        build.replace_linears(owner, [name], make)
    build.frozen.append(lambda name: not learns(name, tables))
    return names


def _has_moments(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state of a parameter remembers a gradient other than zero."""
    kept = ((local_of(state[key]), least) for key, least in MOMENTS.items() if key in state)
    return any(bool((moment.abs() > least).any()) for moment, least in kept)


def _was_reached(p: nn.Parameter, optimizers: Iterable[Any]) -> bool:
    """Return whether it has a gradient, or had one that an update freed and whose mean is kept."""
    if p.grad is not None:
        return bool(local_of(p.grad).any())
    return any(_has_moments(optimizer.state.get(p, {})) for optimizer in optimizers)


def adapter_evidence(
    model: nn.Module, optimizers: Iterable[Any], tables: Sequence[str] = ()
) -> tuple[bool, str, dict[str, float]]:
    """Return whether gradients reached adapters and nothing else, in words and in numbers.

    Args:
        model: the model.
        optimizers: its optimizers.
        tables: names of the parameters that learn whole beside adapters, which are to be reached.
    """
    adapted = [m for m in model.modules() if isinstance(m, LoraLinear)]
    named = dict(model.named_parameters())
    rest = [p for n, p in named.items() if not learns(n, tables)]
    touched = sum(p.requires_grad or p.grad is not None for p in rest)
    reached = sum(_was_reached(m.lora_b, optimizers) for m in adapted)
    trained = sum(p.numel() for n, p in named.items() if learns(n, tables))
    share = trained / (trained + sum(p.numel() for p in rest))
    whole = [name for name in tables if name in named and _was_reached(named[name], optimizers)]
    beside = f" and {', '.join(whole)}" * bool(whole)
    numbers: dict[str, float] = {
        "adapters": len(adapted),
        "reached": reached,
        "trained_numbers": trained,
    }
    return (
        reached > 0 and not touched and whole == [*tables],
        f"a gradient reached {reached} of {len(adapted)} adapters{beside}, {100 * share:.3g}% of "
        f"all numbers, and {touched} of {len(rest)} other parameters",
        {**numbers, "tables": len(whole)} if tables else numbers,
    )
