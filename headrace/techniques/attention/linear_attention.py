"""Mix tokens through a decaying state instead of attention: work in proportion to the row.

Softmax attention compares every pair of tokens. Here each head keeps a matrix that forgets at its
own rate and is read by the queries: the work per token does not grow with the row, and sampling
keeps one state per layer instead of all keys. The rate is a gate of the token: log decay =
logsigmoid(w x) / 16, per head of keys and values (arXiv 2312.06635). What the queries read is
normalised per head, since nothing divides it as softmax would. Rotation, norms of queries and keys,
and the fused `qkv` stay as attention has them.

One of two rules says what a token writes. A `sum` adds k v^T (kernels/linear_attention). The gated
delta rule first takes out what the state answers to that key (kernels/gated_delta), by a strength
that is a second gate, sigmoid(w x); its keys have unit length, or it would not be stable. It costs
a triangular solve in each chunk, and its states follow each other in a loop. Left out of its paper
are the short convolutions, the output gate and the range of its decays.

A state cannot see a window or a prefix, so it fills the backend too and takes documents alone from
the mask: the index of each token's document, which resets the state exactly. It costs recall: a
state holds less than a row of keys. Compiled code fuses the decays; `kernels` = "fla" takes the
kernels of flash-linear-attention in place of torch's products (kernels/fla).
Sources: arXiv 2312.06635, 2405.21060, 2006.16236, 2412.06464, 2406.06484.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.adapters import ALONE, GATES
from headrace.costs.chunk_work import chunk_flops, chunked
from headrace.costs.count import FP32, instants_of
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.kernels import fla, gated_delta, linear_attention
from headrace.kernels.launches import since
from headrace.model.attention import Attend, SelfAttention, Shared
from headrace.model.mask import MaskSpec, Rows
from headrace.model.position import rotate
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

TEMPERATURE = 16.0
"""Root that is taken of a gate: a gate of 0.5 keeps 0.958 per token (arXiv 2312.06635, section
4.4)."""
EPS = 1e-6
"""Added to a key's squared length, as flash-linear-attention does (modules/l2norm.py)."""
INSTALL = "pip install 'flash-linear-attention>=0.6'"
OLDEST = (0, 6)
"""The release of fla-core that the calls were written for."""
WIDEST_HEAD = 256
"""Features of a head that its kernels take (fla-core 0.6.0, ops/common/chunk_delta_h.py)."""
WRONG, RIGHT = (3, 4, 0), (3, 7, 1)
"""Triton from the first version on, and before the second, compiles fla's backward pass for Hopper
to wrong numbers (fla-core 0.6.0, ops/common/chunk_o.py)."""


class Mix(NamedTuple):
    """A rule is computed by this function."""

    run: Callable[..., tuple[Tensor, Tensor | None]]
    """(q, k, v, the gates, mask, state_BGKV=) -> mixed values, the state after the last token."""
    tokens: int
    """Most tokens of a chunk."""


class Documents:
    """It fills the backend's place: a state needs each token's document of the mask, no more."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Tensor | None:
        """Return the documents' indices [B, T], or None when they are not masked.

        Raises:
            ConfigError: the mask is more than causal and by document.
        """
        if replace(spec, document=False) != MaskSpec():
            raise ConfigError(
                f"a state cannot see the mask {spec}: it knows causal and document",
                mend("-linear_attention"),
            )
        return rows.segments_BT if spec.document else None

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Raise NotImplementedError: the mixer reads its state and calls no backend."""
        raise NotImplementedError("linear attention has no scores to mask")


class Lengths(Documents):
    """It prepares documents for kernels that take them laid end to end."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Tensor | None:
        """Return where each document begins, and the end, int64 [S + 1]; or None."""
        segments = super().prepare(spec, rows, length)
        return None if segments is None else fla.ends_of(segments)


class LinearMixer(SelfAttention):
    """It puts attention's projections around a decaying state."""

    columns = ("qkv", "decay")
    rows = ("out",)

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, mix: Mix) -> None:
        super().__init__(config, layer, attend)
        self.units, self.mix = self.groups, mix
        self.decay = nn.Linear(config.dim, self.groups, bias=False)
        self.longest_chunk = 0

    def keys(self, k_BTGK: Tensor) -> Tensor:
        """Return the keys under which a state is written."""
        return k_BTGK

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return the logarithm of what each head of keys keeps at each token, fp32 [B, T, G]."""
        return (F.logsigmoid(self.decay(x_BTD).float()) / TEMPERATURE,)

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Mix tokens of each row; returns [B, T, D]."""
        B, T, _ = x_BTD.shape
        K = self.head_dim
        grouped = self.qkv(x_BTD).view(B, T, -1, self.queries + 2, K)
        q, k, v = grouped.split([self.queries, 1, 1], dim=3)
        q_BTHK = rotate(q.reshape(B, T, -1, K), shared.rotation, self.q_norm)
        k_BTGK = self.keys(rotate(k.squeeze(3), shared.rotation, self.k_norm))
        cache = shared.cache
        documents = shared.mask if isinstance(shared.mask, Tensor) else None
        self.longest_chunk = min(self.mix.tokens, T)
        mixed, state = self.mix.run(
            q_BTHK.unflatten(2, (-1, self.queries)),
            k_BTGK,
            self.value(v.squeeze(3), shared),
            *self.gates(x_BTD),
            documents,
            state_BGKV=None if cache is None else cache.states.get(self.layer),
        )
        if cache is not None and state is not None:
            cache.states[self.layer] = state
        even = F.rms_norm(mixed.float() * K**-0.5, (K,)).to(mixed.dtype)
        return self.out(even.reshape(B, T, -1))


class DeltaMixer(LinearMixer):
    """It puts them around a state that is overwritten by the gated delta rule."""

    columns = ("qkv", "decay", "strength")

    def __init__(self, config: ModelConfig, layer: int, attend: Attend, mix: Mix) -> None:
        super().__init__(config, layer, attend, mix)
        self.strength = nn.Linear(config.dim, self.groups, bias=False)

    def keys(self, k_BTGK: Tensor) -> Tensor:
        """Return keys of unit length."""
        wide = k_BTGK.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(k_BTGK.dtype)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return the sum's gate, and which share of a key's value is replaced, fp32 [B, T, G]."""
        return *super().gates(x_BTD), self.strength(x_BTD).float().sigmoid()


class LinearAttention(Technique[Build]):
    """Mix tokens through a decaying state instead of attention: work in proportion to the row."""

    chunk_tokens: int = Field(default=64, ge=1, le=4096)
    """Tokens whose pairs are computed at once, by torch's kernels; tuner range 32 to 256."""
    rule: Literal["sum", "gated_delta"] = "sum"
    """What a token writes: more of its key and value, or what the state does not know of them."""
    kernels: Literal["torch", "fla"] = "torch"
    """Who computes a chunk; fla's kernels take 64 tokens and factors in bf16."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.mixer", "parts.attend")
    excludes: ClassVar[Mapping[str, str]] = {
        "sliding_window": "a state forgets by decay and has no window (arXiv 2312.06635)"
    }
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys="work per token and a state in sampling that do not grow with the row (derived)",
        costs=(
            "recall from far back: K x K numbers per head hold less than all keys (arXiv "
            "2402.18668; 2412.06464)"
        ),
        helps="long rows, and generating long texts",
        hurts="short rows, where attention is one fused kernel",
        source="arXiv 2312.06635; arXiv 2405.21060; arXiv 2412.06464",
    )

    def multiplies_fp32(self) -> bool:
        """Return whether it is the delta rule by torch's kernels, whose errors pass on."""
        return self.rule == "gated_delta" and self.kernels == "torch"

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support random weights and whole rows; fla's kernels need its package, bf16 and a GPU."""
        plan = context.plan
        if plan.model.pretrained:
            return Unsupported("the weights of model.pretrained are attention's", "leave it out")
        if plan.mesh.context > 1:
            return Unsupported(
                f"its state runs along whole rows, and mesh.context = {plan.mesh.context} cuts "
                "them",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return Supported() if self.kernels == "torch" else self._supports_fla(context)

    def _supports_fla(self, context: Context) -> Supported | Unsupported:
        torchs = mend("techniques.linear_attention.kernels=torch")
        width = context.plan.model.resolved_head_dim
        for compiler in context.plan.techniques.values():
            if "compiled" in compiler.composes and getattr(compiler, "fullgraph", True):
                return Unsupported(
                    "fla leaves its kernels out of compiled graphs, and fullgraph asks for one",
                    mend(f"techniques.{compiler.name()}.fullgraph=false").otherwise(torchs),
                    RefusalKind.COMBINATION,
                )
        if context.device != "cuda":
            return Unsupported(
                f"fla's kernels need an NVIDIA GPU, not {context.device}",
                torchs,
                RefusalKind.DEVICE,
            )
        if not context.has_triton:
            return Unsupported(
                "fla's kernels are compiled by Triton", "pip install triton", RefusalKind.PACKAGE
            )
        if context.precision != "bf16":
            return Unsupported(
                f"fla's kernels take bf16, and the precision is {context.precision}",
                mend("model.precision=bf16").otherwise(torchs),
            )
        if width > WIDEST_HEAD:
            return Unsupported(
                f"heads of {width} features: fla's kernels take {WIDEST_HEAD} at most", torchs
            )
        installed = _installed()
        if installed is None:
            return Unsupported(
                "flash-linear-attention is not installed", INSTALL, RefusalKind.PACKAGE
            )
        if (context.capability or (0, 0))[0] == 9 and (triton := _miscompiles(self.rule)):
            instead = Remedy(text="pip install tilelang, whose kernels fla takes instead")
            return Unsupported(
                f"Triton {triton} compiles fla's gated backward pass for Hopper to wrong numbers "
                "(flash-linear-attention#640)",
                torchs if self.rule == "sum" else instead.otherwise(torchs),
                RefusalKind.VERSION,
            )
        if tuple(int(n) for n in re.findall(r"\d+", installed)[:2]) < OLDEST:
            return Unsupported(
                f"fla-core {installed} is older than {OLDEST[0]}.{OLDEST[1]}",
                INSTALL,
                RefusalKind.VERSION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Replace attention's matmuls by the state's and the dense mask by what chunks keep."""
        sizes = ledger.sizes
        layers, dim, groups = int(sizes["layers"]), sizes["dim"], sizes["kv_heads"]
        gates = ("decay",) if self.rule == "sum" else ("decay", "strength")
        more = layers * dim * groups * len(gates)
        for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            line = ledger.memory[name]
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes + FP32 * copies * more))
        for layer in range(layers):
            for name, count in self._kept(sizes, f"{layer}/qk_norm" in ledger.memory)[0].items():
                ledger = ledger.with_line(f"{layer}/{name}", Line(count, instants_of(layer), layer))
        how = self.rule, self.kernels, self._chunks(sizes)[0]
        forward, backward = (layers * flops for flops in chunk_flops(sizes, *how))
        old = sizes["attention_flops"]
        ledger = ledger.with_flops("forward", forward + 2 * more - old)
        ledger = ledger.with_flops("backward", backward + 4 * more - 2 * old)
        dense = [n for n in ledger.memory if n == "mask" or n.endswith("/mask_copy")]
        facts = {
            "block_flops": sizes["block_flops"] + 2 * more,
            "attention_flops": forward,
            "mask": 0.0,
            "mask_copy": 0.0,
            GATES: self._kept(sizes, normed=False)[1],
            ALONE: sizes["activation_bytes"] * sizes["tokens"] * sizes["mixer.out/in"],
        }
        names = [f"blocks.{n}.mixer.{gate}.weight" for n in range(layers) for gate in gates]
        ledger = ledger.with_matrices(dict.fromkeys(names, Matrix((int(groups), int(dim)))))
        return chunked(replace(ledger.without(dense), sizes={**sizes, **facts}), *how)

    def _chunks(self, sizes: Mapping[str, float]) -> tuple[int, int]:
        """Return tokens of a chunk, and chunks of a row."""
        chunk = min(self._tokens(), int(sizes["length"]))
        return chunk, -(-int(sizes["length"]) // chunk)

    def _tokens(self) -> int:
        return self.chunk_tokens if self.kernels == "torch" else fla.CHUNK

    def _kept(self, sizes: Mapping[str, float], normed: bool) -> tuple[dict[str, float], float]:
        """Return bytes that a layer's mixer keeps, by what they are, and those for gates alone.

        Queries, keys and values are copied into chunks; the fused matmul's result is kept beside
        them only by the norms of queries and keys. A gate's gradient needs what it multiplies.
        """
        G, K, H, N = (sizes[n] for n in ("kv_heads", "head_dim", "heads", "tokens"))
        (C, Z), B, size = self._chunks(sizes), sizes["rows"], sizes["activation_bytes"]
        padded = B * Z * C
        fused = size * N * (H + 2 * G) * K if normed else 0.0
        gates, read = FP32 * 2 * N * G, FP32 * N * H * K
        if self.rule == "gated_delta":
            gates += FP32 * N * (2 * G + G * K)  # the strength, and keys with their lengths
        if self.kernels == "fla":
            inside = FP32 * N * H + (size * C + FP32) * N * H * (self.rule == "gated_delta")
            return {
                "qkv": fused + size * N * H * K,
                "attention_input": 2 * size * N * H * K,
                "states": gates + inside,
                "read": read,
            }, 0.0
        if self.rule == "sum":
            inside = padded * C * (FP32 * G + 2 * size * H) + FP32 * padded * G
            inside += B * G * (FP32 * (Z + 1) ** 2 + size * (2 * Z + 1) * K * K)
            inside += size * padded * (G + H) * K
            alone = FP32 * 2 * N * G + size * (padded * H * (C + K) + B * G * (Z + 1) * K * K)
        else:
            size = FP32
            alone = FP32 * (3 * N * G + padded * (G + H) * (C + K))
            inside = FP32 * padded * (C * (3 * G + 2 * H) + 2 * G)  # triangles, scores, gates
            inside += FP32 * padded * K * ((5 if Z > 1 else 4) * G + H)
            inside += FP32 * B * Z * G * K * K * (3 if Z > 1 else 1)  # moves, states, their stack
        return {
            "qkv": fused + size * padded * G * K,
            "attention_input": size * padded * (H + G) * K,
            "states": gates + inside,
            "read": read,
        }, alone

    def apply(self, build: Build) -> None:
        """Fill the mixer and the backend that it does without."""
        build.notes[self.name()] = since({}, "fla_")
        run: Any
        if self.kernels == "torch":
            ours = {"sum": linear_attention.chunked, "gated_delta": gated_delta.chunked}
            build.parts.attend, run = Documents(), partial(ours[self.rule], chunk=self.chunk_tokens)
        else:
            theirs = {"sum": fla.decayed_sum, "gated_delta": fla.gated_delta}
            build.parts.attend, run = Lengths(), torch.compiler.disable(theirs[self.rule])
        mix = Mix(run, self._tokens())
        mixer = LinearMixer if self.rule == "sum" else DeltaMixer
        build.parts.mixer = lambda config, layer, attend: mixer(config, layer, attend, mix)

    def active(self, build: Build) -> Evidence:
        """Read the longest chunk that blocks computed, and which kernels did."""
        mixers = [block.mixer for block in build.model.blocks.values()]
        mine = [mixer for mixer in mixers if isinstance(mixer, LinearMixer)]
        # A layer whose block was left out of every step so far has computed none.
        chunks = [mixer.longest_chunk for mixer in mine if mixer.longest_chunk]
        if not chunks and mine == mixers:
            return Evidence(None, "this rank holds no block that mixed tokens")
        longest = max(chunks, default=0)
        overwrite = sum(isinstance(mixer, DeltaMixer) for mixer in mixers)
        counts = since(build.notes[self.name()], "fla_")
        launched = {name: count for name, count in counts.items() if count}
        wanted = fla.SUM if self.rule == "sum" else fla.GATED_DELTA
        by = " and ".join(f"{n} x {c}" for n, c in launched.items()) or "torch's products"
        return Evidence(
            active=mine == mixers
            and 0 < longest <= self._tokens()
            and overwrite == (len(mixers) if self.rule == "gated_delta" else 0)
            and set(launched) == ({wanted} if self.kernels == "fla" else set()),
            detail=f"{len(chunks)} of {len(mixers)} layers mixed tokens in chunks of at most "
            f"{longest} by {by}; {overwrite} overwrite what their states hold",
            numbers={
                "longest_chunk": longest,
                "layers": len(mixers),
                "overwrite": overwrite,
                **launched,
            },
        )


def _miscompiles(rule: str) -> str:
    """Return the version of a Triton whose code for Hopper fla itself refuses; "" if it does not.

    Tilelang's kernel takes states in bf16, and those of a sum are fp32 (ops/common/backends).
    """
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return ""
    numbers = tuple(int(n) for n in re.findall(r"\d+", installed)[:3])
    mended = rule != "sum" and find_spec("tilelang") is not None
    return installed if WRONG <= numbers < RIGHT and not mended else ""


def _installed() -> str | None:
    """Return the version of the installed fla-core; None where there is none."""
    try:
        return version("fla-core") if find_spec("fla") else None
    except PackageNotFoundError:
        return None
