"""Adapt a frozen linear by a trained correction of low rank (arXiv 2106.09685).

W x becomes W x + (alpha / rank) B (A x). Only A [rank, in] and B [out, rank] learn: gradients and
optimizer state are those of rank x (in + out) numbers instead of in x out. B starts at zero, so the
adapted model starts as the model that it adapts. The frozen weight may be stored in any way that a
linear can multiply with (kernels/quantized_weight).

Shapes: R rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from json import dumps
from math import prod
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.errors import ConfigError, nearest
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.decoder_work import adapted
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.work import Matmul
from headrace.kernels.quantized_weight import QuantizedWeight
from headrace.parallel.layout import local_of
from headrace.plan.technique import Doubt

ADAPTERS = (".lora_a", ".lora_b")
"""How the names of adapters' parameters end."""
LAST = "mlp.down/adapter_forward"
"""A sum that nothing needs again, nor the product with the frozen weight in it."""
PIECE = "mlp_piece"
"""The line of a ledger whose MLPs go in pieces that run again, each from its input."""
LENT = ".router"
"""How the name of a linear ends that lends its weight and is not called: what would replace it
would not learn."""

ALONE = "mixer.out/alone"
"""A size: bytes that a mixer keeps as its last linear's input and does not read itself."""
GATES = "mixer.gates/alone"
"""A size: bytes that a mixer's states keep for the gradients of its gates alone."""
AROUND, MLP = ("residual", "norm", "weight_cast"), ("gate_up", "activation", "routed", "router")
"""Lines of a block around its parts, and of its MLP; the others are its mixer's."""


class LoraLinear(nn.Linear):
    """A linear with a low-rank correction; `weight` and `bias` keep their names."""

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        """Take over `linear`'s parameters.

        Args:
            linear: what is adapted.
            rank: rows of `lora_a`.
            alpha: the correction is multiplied by alpha / rank.
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        self.scale = alpha / rank

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out].

        The correction comes first: a block that runs again stops where it has all that it keeps,
        and the product with a frozen weight keeps the weight alone.
        """
        low = F.linear(input, self.lora_a) * self.scale
        correction = F.linear(low, self.lora_b)
        return super().forward(input) + correction

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the plain weight [out, in] that computes the same; the sum is made in fp32."""
        return plain(self.weight) + self.scale * (self.lora_b.float() @ self.lora_a.float())


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


def is_frozen(name: str) -> bool:
    """Return whether the parameter of this name stands still: all but the adapters do."""
    return not name.endswith(ADAPTERS)


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
    build: Adaptable, owner: str, targets: Sequence[str], *, rank: int, alpha: float
) -> list[str]:
    """Put adapters beside the chosen linears, freeze all else, and return the linears' full names.

    Args:
        build: holds the model.
        owner: name of the technique that asks for it.
        targets: ends of names of the adapted linears; all without targets.
        rank: rows of an adapter.
        alpha: the correction is multiplied by alpha / rank.

    Raises:
        ConfigError: a target names no linear, or another technique already owns one of them.
    """
    names = linears_of(build.model, targets, owner)
    build.replace_linears(owner, names, lambda old: LoraLinear(old, rank=rank, alpha=alpha))
    build.frozen.append(is_frozen)
    return names


def adapted_ledger(
    ledger: Ledger,
    owner: str,
    targets: Sequence[str],
    rank: int,
    stored: Callable[[int, int], float] | None,
) -> Ledger:
    """Return the ledger of a model of which only adapters learn.

    Args:
        ledger: of the model that learns whole.
        owner: the technique.
        targets: ends of names of the adapted linears; all without targets.
        rank: of the adapters.
        stored: (features in, features out) -> bytes of an adapted weight; None leaves it fp32.

    Raises:
        ConfigError: the ledger knows none of the targets, or another technique replaces one.
    """
    sizes, layers = ledger.sizes, int(ledger.sizes["layers"])
    linears = {n: m.shape for n, m in ledger.matrices.items() if _is_linear(n, m)}
    chosen = _chosen(list(dict.fromkeys(_end(name) for name in linears)), targets, owner)
    ledger = ledger.with_linears(owner, chosen)
    taken = {name: shape for name, shape in linears.items() if _end(name) in chosen}
    adapters, memory = rank * sum(map(sum, taken.values())), ledger.memory
    quantized = {n: stored(inner, outer) for n, (outer, inner) in taken.items()} if stored else {}
    saved = sum(4 * prod(taken[name]) - bytes for name, bytes in quantized.items())
    for name, count in {
        "parameters": memory["parameters"].bytes + 4 * adapters - saved,
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
        # Frozen weights of norm and head need neither the normalised values nor the result; a GPU's
        # norm is one kernel that keeps its fp32 input.
        "final_norm": sizes["on_gpu"] * 4 * sizes["tokens"] * sizes["dim"],
    }.items():
        ledger = ledger.with_line(name, replace(memory[name], bytes=count))
    if stored:  # one weight at a time is made whole
        largest = max(map(prod, taken.values()))
        ledger = ledger.with_line("whole_weight", Line(4 * largest, ("backward",)))
    for layer in range(layers):
        ledger = _adapted_block(ledger, layer, taken, rank, bool(stored))
    # Forward: the adapters beside all. Backward: inputs' gradients through all, and adapters' own.
    # What lies before the first adapter of the first block needs no gradient at all.
    frozen = sizes["block_flops"] / 2 + sizes["embedding"]
    names = list(linears)
    first = names.index(next(iter(taken)))
    before = sum(prod(linears[name]) for name in names[: first + 1])
    unmoved = before + rank * linears[names[first]][1]
    attention = sizes["attention_flops"] * (1 - (first > 0) / layers)
    if PIECE in memory:  # of which each runs again
        in_mlp = sum(sum(shape) for name, shape in taken.items() if _end(name).startswith("mlp."))
        ledger = ledger.with_flops("recompute", 2 * rank * in_mlp)
    forward = ledger.flops["forward"] + 2 * adapters
    backward = 2 * (frozen + 2 * adapters - unmoved + attention)
    flops = {**ledger.flops, "forward": forward, "backward": backward}
    return replace(ledger, flops=flops, matrices=_with_adapters(ledger, taken, rank, quantized))


def with_adapters_alone(
    ledger: Ledger,
    owner: str,
    targets: Sequence[str],
    rank: int,
    stored: Callable[[int, int], float] | None = None,
) -> Ledger:
    """Return the memory and the work of a model of which only adapters learn.

    Args:
        ledger: of the model that learns whole.
        owner: the technique.
        targets: ends of names of the adapted linears; all without targets.
        rank: of the adapters.
        stored: (features in, features out) -> bytes of an adapted weight; None leaves it fp32.

    Raises:
        ConfigError: see `adapted_ledger`.
    """
    made = adapted_ledger(ledger, owner, targets, rank, stored)
    share = made.memory["gradients"].bytes / ledger.memory["gradients"].bytes
    return adapted(made.without(["head_weight_gradient"]), targets, rank, share)


def _with_adapters(
    ledger: Ledger, taken: Mapping[str, tuple[int, ...]], rank: int, quantized: Mapping[str, float]
) -> dict[str, Matrix]:
    """Return the ledger's matrices with adapters beside the taken ones, of which some are stored.

    Args:
        ledger: of the model without adapters.
        taken: shapes of the adapted weights by name.
        rank: of the adapters.
        quantized: bytes of the weights that are stored in few bits, by name.
    """
    matrices = {name: replace(matrix, by="") for name, matrix in ledger.matrices.items()}
    for name, bytes in quantized.items():
        matrices[name] = replace(matrices[name], stored=bytes / prod(taken[name]))
    for name, (outer, inner) in taken.items():
        for end, shape in zip(ADAPTERS, ((rank, inner), (outer, rank)), strict=True):
            matrices[name.removesuffix(".weight") + end] = Matrix(shape)
    return matrices


def recomputed_adapter_flops(ledger: Ledger, *matmuls: Literal["down", "up"]) -> float:
    """Return FLOPs per token of these matmuls of all adapters, where all blocks are recomputed."""
    ends = tuple(f"/adapter_{matmul}" for matmul in matmuls)
    return sum(
        piece.count * 2 * piece.sizes[1] * piece.sizes[2]
        for name, piece in ledger.work.items()
        if name.endswith(ends) and isinstance(piece, Matmul)
    )


def _is_linear(name: str, matrix: Matrix) -> bool:
    """Return whether the weight is one of a linear that can be adapted."""
    inside = name.startswith("blocks.") and not name.endswith(f"{LENT}.weight")
    return inside and len(matrix.shape) == 2


def _end(name: str) -> str:
    """Return what the linear of a weight is called in its block."""
    return name.split(".", 2)[2].removesuffix(".weight")


def targeted(owner: str, *targets: str) -> Remedy:
    """Return the override that adapts these linears."""
    return mend(f"techniques.{owner}.targets={dumps(targets)}")


def _chosen(every: Sequence[str], targets: Sequence[str], owner: str) -> list[str]:
    """Return those of a block's linears that are adapted, one at least."""
    chosen = [name for name in every if not targets or name in targets]
    if not chosen:
        raise ConfigError(
            f"none of targets = {list(targets)} is in a block of this model, which has "
            f"{', '.join(every)}",
            targeted(owner, *nearest(targets[0], every).split(", "))
            if targets
            else mend(f"-{owner}"),
        )
    return chosen


def _adapted_block(
    ledger: Ledger, layer: int, taken: Mapping[str, tuple[int, ...]], rank: int, quantized: bool
) -> Ledger:
    """Keep in a block the inputs of adapted linears and the results inside of adapters."""
    sizes, memory = ledger.sizes, ledger.memory
    here = {_end(n): shape for n, shape in taken.items() if n.startswith(f"blocks.{layer}.")}
    chosen = list(dict.fromkeys(_end(name) for name in taken))
    dim = sizes["mixer.qkv/in"]
    row = sizes["residual"] / dim  # bytes of one feature of all tokens
    less = {"norm": sizes["norm_products"], "qk_norm": sizes["qk_norm_products"]}
    less["norm"] += row * dim * (not _into_mixer(chosen))
    less["norm"] += row * dim * (not _is_kept_for_mlp(ledger, chosen))
    # A frozen linear keeps no input; experts, which are none, keep theirs.
    frozen = f"blocks.{layer}.mlp.down.weight" in ledger.matrices and "mlp.down" not in chosen
    less["activation"] = row * sizes["mlp.down/in"] * frozen
    less["attention"] = sizes.get(ALONE, 0.0) * ("mixer.out" not in chosen)
    less["weight_cast"] = 2 * sum(map(prod, here.values())) if quantized else 0
    less["residual"] = row * dim * (layer == 0)  # the embedding is frozen
    if layer == 0 and "mixer.qkv" not in chosen:
        less |= {name: float("inf") for name in ("qkv", "attention_input", "qk_norm")}
    for name, count in less.items():
        line = memory.get(f"{layer}/{name}")
        if line is not None:
            kept = replace(line, bytes=max(0.0, line.bytes - count))
            ledger = ledger.with_line(f"{layer}/{name}", kept)
    if layer == 0:
        ledger = _first_block(ledger, here, row)
    adapter = replace(memory[f"{layer}/residual"], bytes=len(here) * rank * row)
    return ledger.with_line(f"{layer}/adapters", adapter)


def _is_kept_for_mlp(ledger: Ledger, chosen: Iterable[str]) -> bool:
    """Return whether what enters the MLP is kept, by an adapted linear or by recomputed pieces."""
    return PIECE in ledger.memory or not {"mlp.gate_up", "mlp.up"}.isdisjoint(chosen)


def _first_block(ledger: Ledger, here: Mapping[str, tuple[int, ...]], row: float) -> Ledger:
    """Drop what lies before the first adapter, which no gradient reaches; keep the block's input.

    Args:
        ledger: with a first block into which a gradient goes.
        here: shapes of the adapted linears by what a block calls them.
        row: bytes of one feature of all tokens.
    """
    if into := _into_mixer(here):
        states = ledger.memory.get("0/states")
        if into == ["mixer.qkv"] and states is not None:  # gates of a frozen input are given
            left = replace(states, bytes=states.bytes - ledger.sizes.get(GATES, 0.0))
            ledger = ledger.with_line("0/states", left)
        return ledger
    lines = {n.removeprefix("0/"): line for n, line in ledger.memory.items() if line.layer == 0}
    kept = {name: 0.0 for name in lines if name not in (*AROUND, *MLP)}
    entered = "mlp.gate_up" in here or "mlp.up" in here
    result = row * ledger.sizes["dim"] * _is_kept_for_mlp(ledger, here)  # of the norm before it
    if "mixer.out" in here:
        kept["attention"] = row * here["mixer.out"][1]
        kept["norm"] = result + (lines["norm"].bytes - result) / 2
    else:
        kept |= {"residual": 0.0, "norm": result}
        if not entered:
            kept |= {"gate_up": 0.0, "activation": row * here["mlp.down"][1]}
    for name, count in kept.items():
        if name in lines:
            ledger = ledger.with_line(f"0/{name}", replace(lines[name], bytes=count))
    return ledger


def _into_mixer(names: Iterable[str]) -> list[str]:
    """Return those of a block's linears that read what its mixer reads."""
    return [name for name in names if name.startswith("mixer.") and name != "mixer.out"]


def _was_reached(p: nn.Parameter, optimizers: Iterable[Any]) -> bool:
    """Return whether it has a gradient, or had one that an update freed and whose mean is kept."""
    if p.grad is not None:
        return bool(local_of(p.grad).any())
    kept = (optimizer.state.get(p, {}).get("exp_avg") for optimizer in optimizers)
    return any(bool(local_of(mean).any()) for mean in kept if mean is not None)


def adapter_evidence(
    model: nn.Module, optimizers: Iterable[Any]
) -> tuple[bool, str, dict[str, float]]:
    """Return whether gradients reached adapters and nothing else, in words and in numbers."""
    adapted = [m for m in model.modules() if isinstance(m, LoraLinear)]
    rest = [p for n, p in model.named_parameters() if is_frozen(n)]
    touched = sum(p.requires_grad or p.grad is not None for p in rest)
    reached = sum(_was_reached(m.lora_b, optimizers) for m in adapted)
    trained = sum(m.lora_a.numel() + m.lora_b.numel() for m in adapted)
    share = trained / (trained + sum(p.numel() for p in rest))
    return (
        reached > 0 and not touched,
        f"a gradient reached {reached} of {len(adapted)} adapters, {100 * share:.3g}% of all "
        f"numbers, and {touched} of {len(rest)} other parameters",
        {"adapters": len(adapted), "reached": reached, "trained_numbers": trained},
    )
