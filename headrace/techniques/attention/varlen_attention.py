"""Compute attention over packed documents as one sequence with cumulative lengths.

SDPA takes a mask of documents as a dense tensor of rows x length^2, computes every score and loses
its flash kernel. Here rows are laid end to end, and the flash kernel is told where each document
begins: scores between documents are never computed and there is no mask. A window is a number that
the kernel takes too. Nothing is generated, so a new shape does not compile a kernel.

The kernel wants the documents' number and their longest on the host, so each forward pass waits
once for the device. Both are rounded up to powers of two and only grow: torch.compile sees few
shapes, and what is too many are documents of no tokens, which return at once. The backward pass
takes a workspace of 128 tokens in fp32 for each document, those included (torch's flash_api.cpp).

While sampling, one query over a longer cache sees all of it, and SDPA serves that. Left out: a
prefix that sees both ways. Source: arXiv 2307.08691; torch.nn.attention.varlen.

Shapes: B rows, T tokens, H query heads, G key-value heads, K features of a head, S documents.
"""

import inspect
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RunError, UnsupportedError
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model.attention import Sdpa, equal_scores, kernels_of
from headrace.model.backend_needs import lacks
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

HEAD_MULTIPLE = 8
"""Number that must divide a head's features for its kernels (torch's flash_api.cpp)."""
MOST_DOCUMENTS = 65_535
"""Most documents of a micro-batch: CUDA's largest grid along the axis that they lie on."""
SHORTEST = 2
"""Least tokens given as the longest document: 1 would select the kernel's decoding path."""
OPERATION, KERNEL = "torch_attn::_varlen_attn", "flash_fwd"


class Sequences(NamedTuple):
    """Documents of rows that are laid end to end lie at these places.

    Args:
        starts_S1: int32, first token of each document and the end of the last; documents of no
            tokens follow. None where every row is one.
        longest: at least the tokens of the longest.
        window: how many tokens a query sees to its left and to its right; -1 is all.
    """

    starts_S1: Tensor | None
    longest: int
    window: tuple[int, int]


def cumulative_lengths(segments_BT: Tensor) -> Tensor:
    """Return where each document begins in the flattened rows, and the last ends; int32 [S + 1].

    A document begins at each row's first token and wherever the index of a segment changes.
    """
    first_B1 = torch.ones_like(segments_BT[:, :1], dtype=torch.bool)
    begins_BT = torch.cat((first_B1, segments_BT[:, 1:] != segments_BT[:, :-1]), dim=1)
    starts_S = begins_BT.flatten().nonzero().squeeze(1)
    end = starts_S.new_full((1,), segments_BT.numel())
    return torch.cat((starts_S, end)).int()


def window_of(spec: MaskSpec) -> tuple[int, int]:
    """Return the mask's causality and window as the kernel takes them.

    Raises:
        UnsupportedError: the mask says more than that and documents.
    """
    if not replace(spec, causal=True, document=False, window=None).is_plain_causal:
        raise UnsupportedError(
            f"varlen_attention has no mask for {spec}",
            mend("-varlen_attention", "+flex_attention"),
        )
    reach = -1 if spec.window is None else spec.window - 1
    return reach, 0 if spec.causal else reach


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


class VarlenBackend(Sdpa):
    """A backend that calls torch's varlen_attn over the documents of all rows."""

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn  # loads half of the compiler

        self.run: Any = varlen_attn
        asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
        self.groups = {"enable_gqa": True} if asks else {}
        """The option for fewer key-value heads, which torch 2.11 takes without one."""
        self.room = self.longest = 1
        """Documents and tokens of the longest that were needed so far, as powers of two."""
        self.forwards = 0
        self.starts_S1: Tensor | None = None
        """Where documents of the last forward pass begin, without empty documents."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Sequences:
        """Return where documents begin; the host waits for their number where there are any.

        Raises:
            UnsupportedError: the kernel has no such mask.
            RunError: the micro-batch has more documents than the kernel takes.
        """
        window = window_of(spec)
        self.forwards += 1
        if not spec.document or rows.segments_BT is None:
            self.starts_S1 = None
            return Sequences(None, max(SHORTEST, length), window)
        self.starts_S1 = starts_S1 = cumulative_lengths(rows.segments_BT)
        documents = len(starts_S1) - 1
        if documents > MOST_DOCUMENTS:
            raise RunError(
                f"a micro-batch holds {documents:,} documents, and varlen_attention takes "
                f"{MOST_DOCUMENTS:,}",
                mend(f"batch.micro_sequences={len(rows.segments_BT) // 2}")
                if len(rows.segments_BT) > 1
                else mend("-varlen_attention"),
            )
        self.room = min(MOST_DOCUMENTS, max(self.room, power_of_two(documents)))
        self.longest = max(self.longest, power_of_two(int(starts_S1.diff().max())))
        end = rows.segments_BT.numel()
        padded_S1 = F.pad(starts_S1, (0, self.room - documents), value=end)
        return Sequences(padded_S1, max(SHORTEST, min(self.longest, length)), window)

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Compute attention; one query over a longer key sequence sees all of it."""
        if q_BTHK.size(1) != k_BTGK.size(1):
            return super().__call__(q_BTHK, k_BTGK, v_BTGK, None)
        assert isinstance(mask, Sequences), "prepare makes one for every forward pass"
        B, T, _, K = q_BTHK.shape
        starts_S1 = mask.starts_S1
        if starts_S1 is None:
            starts_S1 = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q_BTHK.device)
        # Autocast does not know this operation; values come out of a product, in its precision.
        q, k, v = (x.to(v_BTGK.dtype).flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
        if K % HEAD_MULTIPLE:  # zeros add nothing to a score
            q, k, v = (F.pad(x, (0, -K % HEAD_MULTIPLE)) for x in (q, k, v))
        out: Any = self.run(
            q,
            k,
            v,
            starts_S1,
            starts_S1,
            mask.longest,
            mask.longest,
            scale=K**-0.5,
            window_size=mask.window,
            **self.groups,
        )
        return out[..., :K].unflatten(0, (B, T))


class VarlenAttention(Technique[Build]):
    """Compute attention over packed documents as one sequence with cumulative lengths."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention", "memory bandwidth:attention")
    card: ClassVar[Card] = Card(
        buys="the scores between documents, and the dense mask of rows x length^2 (derived)",
        costs=(
            "the host waits for the device once per forward pass with documents",
            "128 tokens of fp32 queries per document while attention runs backward (torch's "
            "flash_api.cpp)",
        ),
        helps="packed documents and sliding windows, above all many short documents in long rows",
        hurts="plain causal rows, where the flash and cuDNN kernels need no lengths",
        source="arXiv 2307.08691; torch.nn.attention.varlen",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support NVIDIA GPUs of compute capability 8.0 or later, in bf16 or fp16."""
        return lacks(context, self.name()) or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Remove the dense mask, whoever composes it; attention keeps what a flash kernel keeps."""
        dense = [n for n in ledger.memory if n == "mask" or n.endswith("/mask_copy")]
        facts = {"mask": 0.0, "mask_copy": 0.0}
        ledger = replace(ledger.without(dense), sizes={**ledger.sizes, **facts})
        return ledger.attended("varlen")

    def apply(self, build: Build) -> None:
        """Fill the backend."""
        build.parts.attend = VarlenBackend()

    def active(self, build: Build) -> Evidence:
        """Read the documents of the last forward pass, and the kernel that two documents launch."""
        backend: Any = build.model.attend
        forwards, starts_S1 = getattr(backend, "forwards", 0), getattr(backend, "starts_S1", None)
        dtype = torch.float16 if build.context.precision == "fp16" else torch.bfloat16
        q, k = equal_scores(build.config, build.device, dtype)
        length = q.size(1)
        places_BT = torch.arange(length, device=build.device)[None]
        rows = Rows(places_BT, (places_BT >= length // 3).int())
        mask = backend.prepare(MaskSpec(document=True), rows, length)
        names = kernels_of(backend, q, k, k, mask)
        used = [n for n in names if KERNEL in n]
        described, numbers = "rows without documents", {}
        if starts_S1 is not None:
            lengths_S = starts_S1.diff()
            numbers = {
                "documents": float(len(lengths_S)),
                "longest_tokens": float(lengths_S.max()),
            }
            described = f"{len(lengths_S)} documents of at most {int(lengths_S.max())} tokens"
        return Evidence(
            active=forwards > 0 and OPERATION in names and bool(used),
            detail=f"launched {', '.join(used[:2]) or 'none of its kernels'}; the last forward "
            f"pass had {described}",
            numbers=numbers,
        )
