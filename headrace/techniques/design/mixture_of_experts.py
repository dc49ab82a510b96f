"""Give each token a few of many small MLPs: more parameters for the same work per token.

Every block's MLP becomes `experts` MLPs and a router, and each token goes through the `top_k` that
its router likes best (model/moe). With `expert_ffn` = the dense MLP's hidden features / top_k, a
token costs the same products as before while the model holds experts / top_k times the MLP
parameters. No token is dropped and no expert is padded: the groups are as large as they come.

Costs: memory of parameters, gradients and optimizer state; every choice copies its token's row; the
experts' work is uneven until the balance loss evens it. On a GPU the grouped product needs Hopper
and bf16; elsewhere a loop over experts stands for it, which a GPU would wait for, so it is refused
there. `expert_parallel` divides the experts over ranks. Ranks that share rows (`mesh.context`) tell
each other how often each expert was chosen in each row, so that the balance loss stays that of
whole rows. Left out: capacity, shared experts, and biases.
Source: arXiv 2101.03961 (Switch), 2211.15841 (MegaBlocks), 2412.19437 (DeepSeek-V3).
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from headrace.assemble.row_parts import AXIS
from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.core.strict import Wrong
from headrace.costs.count import FP32, instants_of
from headrace.costs.expert_work import Routed, routed_work
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.work import collective
from headrace.kernels.grouped_linear import OLDEST
from headrace.model.moe import ExpertLayer
from headrace.parallel.tensor import Peers, peers_of
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

UNIT = 8
"""Hidden features come in multiples of 8: 16 bytes of bf16, as the grouped matmul requires."""
INT64 = 8


class MixtureOfExperts(Technique[Build]):
    """Give each token a few of many small MLPs: more parameters for the same work per token."""

    experts: int = Field(default=8, ge=2, le=4096)
    """MLPs of each block."""
    top_k: int = Field(default=2, ge=1, le=4096)
    """MLPs that a token goes through; tuner range 1 to 8."""
    expert_ffn: int = Field(default=0, ge=0, le=1 << 20)
    """Hidden features of an expert; 0 means the dense MLP's / top_k, rounded up to a multiple
    of 8."""
    balance: float = Field(default=0.01, ge=0, le=1)
    """Weight of the balance loss in nats; tuner range 1e-4 to 1e-1."""
    norm_topk: bool = True
    """The weights of a token's choices add up to 1, whatever the router gave to the others."""

    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mlp",)
    composes: ClassVar[tuple[str, ...]] = ("auxiliary",)
    equality: ClassVar = "learning"
    timed: ClassVar[bool] = True
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "experts / top_k times the MLP parameters at the same products per token (derived)",
            "fewer tokens to the same loss (arXiv 2101.03961)",
        ),
        costs=(
            "their memory: 16 bytes a parameter with AdamW",
            "a copy of each row per choice",
        ),
        helps="runs that are bound by compute and have memory left",
        hurts="runs bound by memory; few tokens, of which each expert sees a share; small "
        "micro-batches, whose groups are thin products",
        source="arXiv 2101.03961; arXiv 2211.15841; arXiv 2412.19437, eq. 17-20",
    )

    @model_validator(mode="after")
    def _check(self) -> "MixtureOfExperts":
        if self.top_k > self.experts:
            raise Wrong(
                f"top_k = {self.top_k} is more than experts = {self.experts}; the nearest is "
                f"top_k={self.experts}",
                mend(f"techniques.mixture_of_experts.top_k={self.experts}"),
            )
        return self

    def multiplies_fp32(self) -> bool:
        """Return True: the router's scores."""
        return True

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a router that sends every token to all experts."""
        if self.top_k < self.experts:
            return None
        fewer = f"techniques.{self.name()}.top_k={max(1, self.experts // 4)}"
        return Doubt(
            f"techniques.{self.name()}.top_k = {self.top_k} sends every token to all "
            f"{self.experts} experts: a dense MLP for the price of a router",
            mend(fewer),
            changes=(fewer,),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights without biases, and a CPU or a GPU since Hopper."""
        plan = context.plan
        if plan.model.pretrained:
            return Unsupported(
                "the weights of model.pretrained are dense MLPs", mend('model.pretrained=""')
            )
        if plan.model.bias:
            return Unsupported("experts have no biases", mend("model.bias=false"))
        if context.device == "cuda":
            return self._supports_gpu(context)
        return Supported()

    def _supports_gpu(self, context: Context) -> Supported | Unsupported:
        if (context.capability or (0, 0)) < OLDEST:
            return Unsupported(
                f"{context.device_name} is older than Hopper and has no grouped product",
                "leave it out",
                RefusalKind.DEVICE,
            )
        if context.precision != "bf16":
            return Unsupported("the grouped product takes bf16 only", mend("model.precision=bf16"))
        for key, value in (
            ("model.dim", context.plan.model.dim),
            ("techniques.mixture_of_experts.expert_ffn", self.expert_ffn),
        ):
            if value % UNIT:
                return Unsupported(
                    f"{key} = {value} is not a multiple of {UNIT}, as the grouped product needs",
                    mend(f"{key}={max(UNIT, round(value / UNIT) * UNIT)}"),
                )
        return Supported()

    def width(self, dense_ffn: int) -> int:
        """Return the hidden features of an expert."""
        return self.expert_ffn or -(-dense_ffn // (self.top_k * UNIT)) * UNIT

    def predict(self, ledger: Ledger) -> Ledger:
        """Add parameters with gradients and state, and rows and hidden features per choice.

        The work of a step is that of `headrace.costs.expert_work`.
        """
        sizes = ledger.sizes
        layers, dim, tokens = int(sizes["layers"]), sizes["dim"], sizes["tokens"]
        size = sizes["activation_bytes"]
        gates = ledger.memory["0/gate_up"].bytes / (size * tokens * sizes["ffn"])
        width = self.width(int(sizes["ffn"]))
        one = (gates + 1) * dim * width
        dense, router = (gates + 1) * dim * sizes["ffn"], dim * self.experts
        more = layers * (self.experts * one + router - dense)
        routed = Routed(self.experts, self.top_k, width, round(gates), more)
        ledger = routed_work(ledger, routed)
        for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            line = ledger.memory[name]
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes + FP32 * copies * more))
        choices = tokens * self.top_k
        kept = {
            "gate_up": size * choices * width * gates,
            "activation": size * choices * width * gates,
            "routed": 2 * size * choices * dim,  # the rows, and what the experts made of them
            "router": self._router_bytes(tokens, size),
        }
        if "0/weight_cast" in ledger.memory:
            cast = ledger.memory["0/weight_cast"].bytes
            kept["weight_cast"] = cast + 2 * (self.experts * one - dense)
            kept["router"] += FP32 * tokens * dim  # the router's own copy of the input
        for layer in range(layers):
            for name, count in kept.items():
                ledger = ledger.with_line(f"{layer}/{name}", Line(count, instants_of(layer), layer))
        work = layers * (self.top_k * one + router - dense)
        ledger = ledger.with_flops("forward", 2 * work).with_flops("backward", 4 * work)
        facts = {
            "block_flops": sizes["block_flops"] + 2 * work,
            "down_flops": 2 * layers * self.top_k * dim * width,
        }
        matrices = self._matrices(ledger, int(dim), width)
        pieces = dict(ledger.work)
        if sizes[f"{AXIS}_ranks"] > 1:
            counts = INT64 * sizes["rows"] * self.experts
            pieces["router/choices"] = collective(
                sizes, AXIS, "forward", "all_reduce", counts, layers
            )
        facts = {**ledger.sizes, **facts}
        return replace(ledger, sizes=facts, matrices=matrices, work=pieces)

    def _matrices(self, ledger: Ledger, dim: int, width: int) -> dict[str, Matrix]:
        """Return the MLPs' matrices as one for all experts, and the routers'."""
        matrices = dict[str, Matrix]()
        for name, matrix in ledger.matrices.items():
            block, mlp, what = name.partition(".mlp.")
            if not mlp:
                matrices[name] = matrix
            elif what == "down.weight":
                matrices[f"{block}.mlp.down"] = Matrix((self.experts, dim, width))
            else:
                wide = 2 * width if what == "gate_up.weight" else width
                matrices[f"{block}.mlp.router.weight"] = Matrix((self.experts, dim))
                matrices[name.removesuffix(".weight")] = Matrix((self.experts, wide, dim))
        return matrices

    def _router_bytes(self, tokens: float, size: float) -> float:
        """Return the bytes of probabilities, weights, indices and the two orders."""
        choices = tokens * self.top_k
        weights = FP32 * (choices * (2 if self.norm_topk else 1) + tokens * self.norm_topk)
        low = size * choices if size != FP32 else 0
        return FP32 * tokens * self.experts + weights + low + 3 * INT64 * choices

    def apply(self, build: Build) -> None:
        """Fill the MLP, and read its balance loss after each forward pass."""
        shared = build.world.group(AXIS)
        build.parts.mlp = partial(_layer, self, None if shared is None else peers_of(shared))
        build.auxiliary.append(balance_loss)

    def active(self, build: Build) -> Evidence:
        """Report the choices that each expert got in its layer's last pass, none dropped.

        They are those of whole rows, of which this rank may have had a part.
        A layer whose block was left out of every step so far has none yet.
        """
        layers = _layers(build)
        routed = [layer.routed_E for layer in layers if layer.routed_E is not None]
        if not routed:
            nothing = None if not len(build.model.blocks) else False
            return Evidence(nothing, "no block routed a token")
        counts_LE = torch.stack(routed).float()
        whole = {layer.top_k for layer in layers} == {self.top_k}
        tokens = counts_LE.sum(1) / self.top_k
        share = counts_LE / counts_LE.sum(1, keepdim=True)
        return Evidence(
            active=whole and bool((tokens == tokens[0]).all()),
            detail=f"{len(routed)} of {len(layers)} layers gave each of {tokens[0]:.0f} tokens "
            f"{self.top_k} of {self.experts} experts; an expert took {share.min():.1%} to "
            f"{share.max():.1%}",
            numbers={
                "tokens": float(tokens[0]),
                "smallest_share": float(share.min()),
                "largest_share": float(share.max()),
            },
        )


def _layer(
    knobs: MixtureOfExperts, sharers: Peers | None, config: ModelConfig, layer: int
) -> ExpertLayer:
    return ExpertLayer(
        config,
        layer,
        experts=knobs.experts,
        top_k=knobs.top_k,
        ffn=knobs.width(config.resolved_ffn),
        balance=knobs.balance,
        norm_topk=knobs.norm_topk,
        sharers=sharers,
    )


def _layers(build: Build) -> list[ExpertLayer]:
    mlps = (block.mlp for block in build.model.blocks.values())
    return [mlp for mlp in mlps if isinstance(mlp, ExpertLayer)]


def balance_loss(build: Build) -> Tensor:
    """Return the balance loss that this rank's layers kept in the last forward pass.

    Every token is routed, and the step divides by counted targets: the ratio makes it the mean over
    tokens.
    """
    total = torch.zeros((), device=build.device)
    for layer in _layers(build):
        kept = layer.take_balance()
        total = total if kept is None else total + kept
    return total * build.targets_per_token
