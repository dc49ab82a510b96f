"""Compute the loss in chunks of tokens, so that the logits never exist whole.

Logits are tokens x vocabulary numbers in fp32, and their gradient as many again: at 8 x 4,096
tokens and 128,256 entries that is 31 GiB, more than the model, its gradients and its optimizer
together. This head takes `chunk_tokens` at a time through matmul, objective and gradient (kernels/
chunked_loss), so one chunk of logits exists at a time. The objective and its terms are untouched:
they are sums over tokens, and the chunks add up. Where the objective is cross-entropy, plain,
smoothed or with a z-loss, on a GPU with Triton, two kernels read a chunk's logits twice and write
their gradient over them (kernels/fused_cross_entropy); else autograd finds it, compiled where the
plan compiles. Both cap the logits where `model.logit_cap` asks for it. Plain cross-entropy in fp32
is torch's own from 2.13 on (`native`), on a CPU unasked: it was the quickest there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Matmul, Stream, Work
from headrace.kernels.autocast import compute_dtype
from headrace.kernels.chunked_loss import chunked_loss, has_native, native_loss
from headrace.kernels.cross_entropy_objective import kernel_arguments
from headrace.kernels.fused_cross_entropy import loss_and_gradient_
from headrace.kernels.launches import COUNTS, since
from headrace.model.head import IGNORED, Head, Objective, Vocabulary, capped, cross_entropy
from headrace.plan.plan import Plan
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FP32 = 4
"""Bytes of a number in fp32."""
ADDED = 6
"""Bytes of each number of a sum in fp32 that a matmul adds to, beyond a result in bf16."""


class ChunkedHead(Head):
    """The default head computes logits of `chunk_tokens` tokens at a time here."""

    compilable = False
    """Its gradients come from autograd inside the forward pass, which a compiler cannot trace."""

    def __init__(
        self, config: ModelConfig, chunk_tokens: int, fused: bool = False, native: bool = False
    ) -> None:
        super().__init__(config)
        self.chunk_tokens, self.fused, self.native = chunk_tokens, fused, native
        self.most_logits = 0
        self.most_tokens = 0
        self.native_calls = 0
        self.loss: Callable[..., Tensor] = _loss

    def compile_inside(self, compile: Callable[[Any], Any]) -> None:
        """Fuse a chunk's loss and gradient, unless ranks share its vocabulary and talk inside."""
        if type(self.vocabulary) is Vocabulary:
            self.loss = compile(_loss)

    def forward(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        extras: Any,
        objective: Objective,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Return the objective's sum over all tokens, times `scale`; a scalar."""

        def loss(logits_nV: Tensor, targets_n: Tensor, extras_n: Any) -> Tensor:
            self.most_logits = max(self.most_logits, len(logits_nV))
            given = logits_nV, targets_n, extras_n
            return self.loss(objective, self.vocabulary, self.cap, *given)

        self.most_tokens = max(self.most_tokens, len(hidden_ND))
        if self.is_native(objective) and compute_dtype(hidden_ND) == torch.float32:
            self.native_calls += 1
            self.most_logits = max(self.most_logits, min(self.chunk_tokens, len(hidden_ND)))
            tokens = hidden_ND, weight_VD, targets_N
            return native_loss(*tokens, IGNORED, self.chunk_tokens, scale=scale)
        asked = self.asked(objective)
        both = None if asked is None else partial(self._both, asked)
        given = hidden_ND, weight_VD, targets_N, extras
        return chunked_loss(*given, loss, self.chunk_tokens, scale=scale, both=both)

    def asked(self, objective: Objective) -> dict[str, Any] | None:
        """Return the kernels' arguments for an objective, if they compute it on whole rows."""
        fused = self.fused and type(self.vocabulary) is Vocabulary
        return kernel_arguments(objective, cross_entropy) if fused else None

    def is_native(self, objective: Objective) -> bool:
        """Return whether torch's own function computes it: cross-entropy of whole rows alone."""
        whole = type(self.vocabulary) is Vocabulary
        return self.native and whole and objective is cross_entropy and not self.cap

    def _both(
        self, asked: dict[str, Any], logits_nV: Tensor, targets_n: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's loss and its gradient, by the kernels."""
        self.most_logits = max(self.most_logits, len(logits_nV))
        how = {"ignored": IGNORED, "softcap": self.cap, **asked}
        return loss_and_gradient_(logits_nV, targets_n, scale, **how)


def _loss(
    objective: Objective,
    vocabulary: Vocabulary,
    cap: float,
    logits: Tensor,
    targets: Tensor,
    extras: Any,
) -> Tensor:
    """Return a chunk's loss, in fp32 from the logits on."""
    return objective(capped(logits.float(), cap), targets, extras, vocabulary)


class ChunkedCrossEntropy(Technique[Build]):
    """Compute the loss in chunks of tokens, so that the logits never exist whole."""

    chunk_tokens: int = Field(default=2048, ge=1, le=1 << 20)
    """Tokens whose logits exist at once; tuner range 256 to 16384."""
    fused: bool | None = None
    """Whether kernels compute a chunk's loss and gradient, where the objective is cross-entropy,
    plain, smoothed or with a z-loss. Left open: on a GPU that has Triton."""
    native: bool | None = None
    """Whether torch's own `linear_cross_entropy` computes it, of torch 2.13 and in fp32. Left open:
    on a CPU, where the objective is cross-entropy and nothing else."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.head",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:logits",)
    card: ClassVar[Card] = Card(
        buys=(
            "the memory of logits and their gradient: 8 bytes x tokens x vocabulary (derived)",
            "on a CPU in fp32 time too (techniques.jsonl, tiny)",
        ),
        costs=(
            "a fp32 gradient of the output matrix in the forward pass, which each chunk adds to"
        ),
        helps="large vocabularies and long or many rows per micro-batch",
        hurts="small vocabularies, where one large product is faster than several",
        source="arXiv 2411.09009; arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support every device; its kernels need an NVIDIA GPU with Triton."""
        if self.fused and context.lacks_triton():
            return Unsupported(
                "fused = true needs an NVIDIA GPU and Triton",
                mend("techniques.chunked_cross_entropy.fused=false")
                | ("pip install triton" if context.device == "cuda" else ""),
                RefusalKind.PACKAGE,
            )
        if self.fused and (why := _other_loss(context.plan)):
            return Unsupported(
                f"fused = true computes the loss of whole rows of logits by kernels, and {why}",
                mend("techniques.chunked_cross_entropy.fused=false"),
            )
        if self.native and (why := self._not_native(context)):
            return Unsupported(
                f"native = true is torch's linear_cross_entropy, and {why}",
                mend(f"techniques.{self.name()}.native=false"),
            )
        if (plan := context.plan) is None:
            return Supported()
        tokens = plan.micro_rows * plan.data.sequence_length // plan.mesh.context
        by_kernels = self._by_kernels(not context.lacks_triton()) and not _other_loss(plan)
        if by_kernels or self.chunk_tokens < tokens:  # kernels save memory in one chunk too
            return Supported()
        return Unsupported(
            f"chunk_tokens = {self.chunk_tokens} cuts nothing of a micro-batch of {tokens} tokens: "
            "all logits are held, and beside them what the baseline makes in the backward pass",
            mend(f"techniques.{self.name()}.chunk_tokens={-(-tokens // 2)}"),
        )

    def _by_kernels(self, can: bool) -> bool:
        """Return whether this project's kernels compute it, where they can."""
        return can and not self.native if self.fused is None else self.fused

    def _not_native(self, context: Context) -> str:
        """Return why torch's own function cannot compute this loss, or an empty text."""
        if not has_native():
            return f"torch {torch.__version__} has none: 2.13 has"
        if self.fused:
            return "fused = true asks for this project's kernels"
        if context.precision != "fp32":
            return f"in {context.precision} it would return the loss rounded to that"
        return "" if context.plan is None else _more_than_cross_entropy(context.plan)

    def predict(self, ledger: Ledger) -> Ledger:
        """Shrink logits to one chunk, and count the output matrix's gradient at the loss.

        A chunk's logits stay as the leaf of its own backward pass, beside the head's tensors.
        torch's own holds a chunk once; on a CPU it runs unasked wherever it knows the objective.
        """
        sizes, logits = ledger.sizes, ledger.memory.get("logits")
        if logits is None or "logits_per_token" not in sizes:
            return ledger
        chunk, each = min(sizes["tokens"], self.chunk_tokens), sizes["logits_per_token"]
        leaf = sizes["activation_bytes"] * sizes["vocab"]
        fused = sizes["logits_fused"] * chunk / sizes["tokens"]
        plain = not sizes.get("other_loss") and sizes.get("tensor_ranks", 1) == 1
        by_kernels = self._by_kernels(bool(sizes["on_gpu"])) and plain
        native = self._runs_native(sizes)
        copy = sizes["head_gradients"] if native else 0  # scaled into others in the backward pass
        if by_kernels or native:  # in place
            each, leaf = sizes["vocab"] * sizes["activation_bytes"], 0
            fused = chunk * each
        ledger = ledger.with_line("logits", Line(max(chunk * (each + leaf), copy), ("loss",)))
        ledger = ledger.with_line("head_gradients", Line(sizes["head_gradients"], ("loss",)))
        facts = {"logits_fused": fused, "logits_per_token": each, "loss_forward": 1.0}
        facts |= {"logits_leaf": leaf, "loss_by_kernels": float(by_kernels)}
        ledger = replace(ledger, sizes={**sizes, **facts})
        return self._worked(ledger, int(chunk), by_kernels)

    def _runs_native(self, sizes: Mapping[str, float]) -> bool:
        """Return whether torch's own would compute it, asked for or not."""
        if self.native is not None:
            return self.native
        other = sizes.get("other_loss") or sizes.get("other_objective")
        plain = not other and sizes.get("tensor_ranks", 1) == 1
        half = sizes["activation_bytes"] != FP32
        return has_native() and not sizes["on_gpu"] and plain and not half

    def _worked(self, ledger: Ledger, chunk: int, by_kernels: bool) -> Ledger:
        """Move all of the head forward, a chunk at a time, and add up its matrix's gradient."""
        sizes = ledger.sizes
        chunks, V, D = sizes["tokens"] / chunk, int(sizes["vocab"]), int(sizes["dim"])
        matmuls = {"result": (chunk, V, D), "input": (chunk, D, V), "weight": (V, D, chunk)}
        if by_kernels:  # as fused_cross_entropy counts them
            ledger = ledger.made_one("loss", forward=0.5, backward=0.74)

        def edit(name: str, piece: Work) -> Work | None:
            what, _, part = name.partition("/")
            if isinstance(piece, Matmul) and what == "head":
                return replace(piece, phase="forward", count=chunks, sizes=matmuls[part])
            if what == "loss":
                return replace(piece.divided(chunks), phase="forward", count=chunks)
            return None if name == "head_cast/backward" else piece

        # Beyond what a matmul in half precision writes: the sum is read, and written in fp32.
        added = Stream("forward", chunks, ADDED * V * D)
        ledger = ledger.reworked(edit)
        return replace(ledger, work={**ledger.work, "head/sum": added})

    def apply(self, build: Build) -> None:
        """Fill the head."""
        fused = self._by_kernels(build.context.lacks_triton() is None)
        quick = build.device.type == "cpu" and has_native()
        native = quick if self.native is None else self.native
        build.notes[self.name()] = COUNTS.copy()
        build.parts.head = lambda config: ChunkedHead(config, self.chunk_tokens, fused, native)

    def active(self, build: Build) -> Evidence:
        """Read the most tokens whose logits the head computed at once."""
        head = build.model.head
        if head is None:
            return Evidence(None, "the head is on another rank")
        most, tokens = getattr(head, "most_logits", 0), getattr(head, "most_tokens", 0)
        launched = sum(since(build.notes[self.name()], "cross_entropy_").values())
        fused = isinstance(head, ChunkedHead) and head.asked(build.objective) is not None
        calls = getattr(head, "native_calls", 0)
        by = "gradients by autograd"
        if calls or launched:
            by = f"launched {launched} kernels" if launched else f"torch's own, {calls} times"
        return Evidence(
            active=0 < most <= self.chunk_tokens
            and (launched > 0) == fused
            and (calls > 0 or not self.native)
            and (fused or most < tokens),
            detail=f"held the logits of at most {most} of {tokens} tokens at once, {by}",
            numbers={
                "most_logits_tokens": most,
                "micro_batch_tokens": tokens,
                "launches": launched,
                "native_calls": calls,
            },
        )


def _other_loss(plan: Plan) -> str:
    """Return what else reads the logits, or shares them among ranks; else an empty text."""
    others = [name for name, technique in plan.techniques.items() if "terms" in technique.composes]
    if others:
        return f"{' and '.join(others)} reads them too"
    return "mesh.tensor gives a rank a part of them" if plan.mesh.tensor > 1 else ""


def _more_than_cross_entropy(plan: Plan) -> str:
    """Return what the objective or the logits have beyond it; else an empty text."""
    others = [n for n, technique in plan.techniques.items() if "objective" in technique.composes]
    if others:
        return f"it knows nothing of {' and '.join(others)}"
    if plan.model.logit_cap:
        return f"it knows nothing of model.logit_cap = {plan.model.logit_cap:g}"
    return _other_loss(plan)
