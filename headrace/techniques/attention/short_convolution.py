"""Mix tokens with their nearest neighbours in most layers, by a gated convolution of a few taps.

Much of what attention learns is local, and it pays for it with the whole row. Here one linear makes
three streams of the input, B, C and x: y = out(C * convolution(B * x)), a causal filter of `taps`
tokens for each feature between two gates by element. Its work per token does not grow with the row,
sampling keeps `taps` - 1 tokens per layer, and there are no positions to encode. Every few layers
stay attention, which carries what is further away: `between` convolutions, then one of them, as
LFM2 has ten beside six.

The convolution is torch's operator (model/convolution); under `document_packing` each tap is
multiplied by itself and reads its own document only. cuDNN would round fp32 operands to TF32
unasked, which is off while the run lasts. Taps start uniform within 1 / sqrt(taps), as torch's
convolutions do. The projections are grouped by key-value head, so tensor parallelism cuts them as
it cuts attention. Left out: biases, long filters, and rows that ranks share.
Sources: arXiv 2511.23404 (LFM2); 2212.14052 (H3), 2302.10866 (Hyena), 2312.00752 (Mamba).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.adapters import targeted
from headrace.costs.count import FP32, instants_of
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.work import CUSTOM, Matmul, Phase, Stream, Work
from headrace.kernels.launches import since
from headrace.model.attention import Shared
from headrace.model.convolution import LAUNCH, CausalConvolution, libraries
from headrace.model.mask import MaskSpec
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

GATES: Mapping[Phase, tuple[float, float, float]] = {"forward": (8, 3, 6), "backward": (22, 8, 14)}
"""Streams of the model's width that gates and zeros before a row read and write: by eager torch, in
so many kernels, and fused. In the backward pass the filter's are among them."""
FILTERED = 2
"""Streams of the model's width that the filter, one custom operation, reads and writes."""
CONVOLVED = 125
"""Bytes of traffic that take as long as the gradient of one number of a convolution by cuDNN's
kernel: fitted to four rows of techniques.jsonl at 33b460d, which it predicts to 1.2%."""
TAPS = ".mixer.conv.weight"
"""How the names of filters end."""


class GatedConvolution(nn.Module):
    """It puts two gates around a short convolution, between attention's two projections."""

    columns, rows = ("bcx", "conv"), ("out",)

    def __init__(self, config: ModelConfig, layer: int, taps: int, documents: bool) -> None:
        super().__init__()
        self.layer, self.documents = layer, documents
        self.units = gcd(config.dim, config.resolved_kv_heads)
        self.width = config.dim // self.units
        self.bcx = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.conv = CausalConvolution(config.dim, taps)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.mixed = 0

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Mix tokens of each row; returns [B, T, D]."""
        B, T, _ = x_BTD.shape
        b, c, x = self.bcx(x_BTD).view(B, T, -1, 3, self.width).unbind(3)  # rows are in groups
        before, u_BSD = self.conv.taps - 1, (b * x).flatten(2)
        cache = shared.cache
        kept = None if cache is None else cache.states.get(self.layer)
        u_BSD = F.pad(u_BSD, (0, 0, before, 0)) if kept is None else torch.cat((kept, u_BSD), 1)
        if cache is not None:
            cache.states[self.layer] = u_BSD[:, -before:]
        self.mixed = B * T
        if self.documents:
            y_BTD = self.conv.inside_documents(u_BSD, shared.positions_BT)
        else:
            y_BTD = self.conv(u_BSD)
        return self.out((c * y_BTD.view_as(c)).flatten(2))


@contextmanager
def whole_fp32() -> Iterator[None]:
    """Compute convolutions of fp32 operands in fp32 while it lasts."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class ShortConvolution(Technique[Build]):
    """Mix tokens with their nearest neighbours in most layers, by a gated convolution."""

    taps: int = Field(default=3, gt=1, le=4096)
    """Tokens that a filter reads, the newest included; tuner range 3 to 5."""
    between: int = Field(default=2, ge=1, le=100_000)
    """Layers with a convolution between two with attention; tuner range 1 to 5."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mixer", "source")
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    excludes: ClassVar[Mapping[str, str]] = {
        "mup": "a filter has as many inputs in a wide model as in a narrow one, and would be "
        "scaled as a matrix whose inputs widen (arXiv 2203.03466, Table 3)"
    }
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys=(
            "no attention in `between` of `between` + 1 layers: their work does not grow with "
            "the row, and sampling keeps taps - 1 tokens instead of all keys (derived)"
        ),
        costs=(
            "4 dim^2 weights a layer, more than attention with few key-value heads",
            "what is further away is heard through the layers of attention only",
        ),
        helps="long rows, models for small devices (arXiv 2511.23404 chose it by search there), "
        "and sampling",
        hurts="recall of single tokens from far back, where too few layers are attention; eager "
        "rows with masked documents, which multiply tap by tap",
        source="arXiv 2511.23404; arXiv 2212.14052; arXiv 2302.10866; arXiv 2312.00752",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support random weights without biases, whole rows, and layers enough for both mixers."""
        plan = context.plan
        if plan.model.pretrained:
            return Unsupported("the weights of model.pretrained are attention's", "leave it out")
        if plan.model.bias:
            return Unsupported("its projections have no biases", mend("model.bias=false"))
        if plan.mesh.context > 1:
            return Unsupported(
                f"a filter reads the tokens before, and mesh.context = {plan.mesh.context} puts "
                "some of them on another rank",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        layers = plan.model.layers
        if self.between >= layers:
            return Unsupported(
                f"no layer of {layers} is attention after {self.between} with a convolution",
                mend(f"techniques.{self.name()}.between={layers - 1}")
                if layers > 1
                else mend(f"model.layers={self.between + 1}"),
            )
        return self._beside(plan.techniques, layers)

    def _beside(self, techniques: Mapping[str, Any], layers: int) -> Supported | Unsupported:
        """Return whether other techniques still find the attention that they change."""
        window = techniques.get("sliding_window")
        if window is not None:
            spec = MaskSpec(between=window.between)
            if all(self.convolves(n) or spec.is_open(n) for n in range(layers)):
                return Unsupported(
                    f"every layer of attention after {self.between} with a convolution is one that "
                    f"sliding_window.between = {window.between} leaves without the window",
                    mend("techniques.sliding_window.between=0"),
                )
        for name, other in techniques.items():
            for target in getattr(other, "targets", ()):
                if not _is_everywhere(target):
                    return Unsupported(
                        f"{name} adapts {target!r}, which some layers have and others do not, and "
                        "predicts adapters of all layers",
                        _without_mixers(name, other.targets),
                    )
        return Supported()

    def convolves(self, layer: int) -> bool:
        """Return whether `layer` has a convolution in the place of attention."""
        return (layer + 1) % (self.between + 1) != 0

    def predict(self, ledger: Ledger) -> Ledger:
        """Replace attention in its layers by three streams, and a filter's input and result."""
        sizes = dict(ledger.sizes)
        layers, dim = int(sizes["layers"]), sizes["dim"]
        chosen = [layer for layer in range(layers) if self.convolves(layer)]
        normed = "0/qk_norm" in ledger.memory
        less = sum(sizes[f"mixer.{n}/in"] * sizes[f"mixer.{n}/out"] for n in ("qkv", "out"))
        matrices = len(chosen) * (4 * dim * dim - less)
        norms = len(chosen) * 2 * sizes["head_dim"] * normed
        more = matrices + len(chosen) * self.taps * dim - norms
        for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            line = ledger.memory[name]
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes + FP32 * copies * more))
        for layer in chosen:
            for name, count in self._kept(sizes).items():
                ledger = ledger.with_line(f"{layer}/{name}", Line(count, instants_of(layer), layer))
            cast = ledger.memory.get(f"{layer}/weight_cast")
            if cast is not None:
                count = cast.bytes + 2 * (4 * dim * dim - less + self.taps * dim)
                ledger = ledger.with_line(f"{layer}/weight_cast", replace(cast, bytes=count))
            ledger = ledger.without([f"{layer}/qk_norm", f"{layer}/mask_copy"])
        filters = len(chosen) * 2 * self.taps * dim
        attention = filters - sizes["attention_flops"] * len(chosen) / layers
        forward = 2 * matrices + attention
        ledger = ledger.with_flops("forward", forward).with_flops("backward", 2 * forward)
        sizes["block_flops"] += 2 * matrices
        sizes["attention_flops"] += attention
        sizes["unsplit"] -= norms
        ledger = replace(ledger, sizes=sizes, matrices=self._matrices(ledger, int(dim)))
        return self._worked(ledger, len(chosen))

    def _matrices(self, ledger: Ledger, dim: int) -> dict[str, Matrix]:
        """Return all matrices, those of its layers' mixers in the place of attention's."""
        matrices = dict[str, Matrix]()
        for name, matrix in ledger.matrices.items():
            block, mixer, what = name.partition(".mixer.")
            if not mixer or not self.convolves(int(block.removeprefix("blocks."))):
                matrices[name] = matrix
            elif what == "out.weight":
                matrices[name] = Matrix((dim, dim))
            else:
                matrices[f"{block}.mixer.bcx.weight"] = Matrix((3 * dim, dim))
                matrices[block + TAPS] = Matrix((dim, 1, self.taps))
        return matrices

    def _worked(self, ledger: Ledger, chosen: int) -> Ledger:
        """Replace matmuls in the chosen layers, and add a convolution between two gates."""
        sizes, more = ledger.sizes, dict[str, Work]()
        dim, tokens, left = int(sizes["dim"]), int(sizes["tokens"]), 1 - chosen / sizes["layers"]
        outs = {"mixer.qkv": 3 * dim, "mixer.out": dim}
        for name, piece in ledger.work.items():
            linear, _, what = name.partition("/")
            if linear in outs and isinstance(piece, Matmul):
                outer = outs[linear]
                shape = {
                    "result": (tokens, outer, dim),
                    "input": (tokens, dim, outer),
                    "weight": (outer, dim, tokens),
                }[what]
                more[f"{linear}/convolved_{what}"] = replace(piece, count=chosen, sizes=shape)
            if linear in (*outs, "attention", "rope", "queries", "qk_norm"):
                more[name] = replace(piece, count=piece.count * left)
        stream = sizes["activation_bytes"] * tokens * dim
        for phase, (eager, kernels, fused) in GATES.items():
            more[f"gates/{phase}"] = Stream(phase, chosen, eager * stream, kernels, fused * stream)
        filters: Mapping[Phase, float] = {
            "forward": FILTERED * stream,
            "backward": CONVOLVED * tokens * dim,
        }
        for phase, bytes in filters.items():
            more[f"convolution/{phase}"] = Stream(phase, chosen, bytes, launch=CUSTOM)
        return replace(ledger, work={**ledger.work, **more})

    def _kept(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Return bytes that one layer keeps for its backward pass, by what they are."""
        row = sizes["activation_bytes"] * sizes["tokens"] * sizes["dim"]
        before = row / sizes["length"] * (self.taps - 1)  # a row begins with tokens that are zero
        return {"qkv": 3 * row, "attention": row, "attention_input": 2 * row + before}

    def apply(self, build: Build) -> None:
        """Fill the mixer of its layers, and start the filters at their own width."""
        attention, source = build.parts.mixer, build.source

        def mixer(config: ModelConfig, layer: int, attend: object) -> nn.Module:
            if not self.convolves(layer):
                return attention(config, layer, attend)  # type: ignore[arg-type]
            return GatedConvolution(config, layer, self.taps, build.mask.document)

        def with_filters(name: str, shape: torch.Size) -> Tensor:
            value = source(name, shape)
            if not name.endswith(TAPS):
                return value
            drawn = value / build.config.init_std  # normal; its distribution function is uniform
            return torch.special.ndtr(drawn).mul(2).sub(1) * self.taps**-0.5

        build.notes[self.name()] = since({}, LAUNCH)
        build.parts.mixer, build.source = mixer, with_filters
        build.runtime.append(whole_fp32)

    def active(self, build: Build) -> Evidence:
        """Read how many tokens the filters of this rank's blocks mixed in the last forward pass."""
        blocks = {int(name): block.mixer for name, block in build.model.blocks.items()}
        here = [mixer for layer, mixer in blocks.items() if self.convolves(layer)]
        if not here:
            return Evidence(None, "this rank holds no block with a convolution")
        tokens = min(getattr(mixer, "mixed", 0) for mixer in here)
        taps = {mixer.conv.taps for mixer in here if isinstance(mixer, GatedConvolution)}
        launched = libraries(build.notes[self.name()])
        how = f"convolutions of {' and '.join(launched)}" if launched else "products of each tap"
        return Evidence(
            active=tokens > 0 and taps == {self.taps},
            detail=f"{len(here)} of {len(blocks)} layers mixed {tokens} tokens by filters of "
            f"{self.taps} taps: {how}",
            numbers={"layers": len(here), "tokens": tokens, "launched": sum(launched.values())},
        )


def _without_mixers(name: str, targets: Sequence[str]) -> Remedy:
    """Return what leaves out the linears of attention, which not every layer has."""
    kept = [target for target in targets if _is_everywhere(target)]
    return targeted(name, *kept) if kept else mend(f"-{name}")


def _is_everywhere(target: str) -> bool:
    return target == "mixer.out" or not target.startswith("mixer.")
