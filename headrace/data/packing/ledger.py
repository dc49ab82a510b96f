"""Count, before a run, what each way of making rows does to a text: the packing ledger.

Four policies over the same documents and the same sequence length T, by the names of what makes
them:

- `cut`: the baseline's stream, cut every T tokens; documents of a row see each other.
- `document_packing`: the same rows, and documents do not see each other.
- `best_fit_packing`: only what is longer than T is cut, and the rest packed by best fit.
- `pad`: each document in rows of its own, padded to T. No technique makes it; it is what packing
  saves, and what many fine-tuning loops do.

Every number is exact: it is counted from the offsets of the documents, 8 bytes each, a window of
about a million documents at a time, and no token is read. Attention is counted in pairs of a query
and a key that a kernel which skips foreign documents computes; a dense mask computes as many as
`cut`. Padding attends to itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.data.packing.best_fit import windows
from headrace.data.packing.fit import fit
from headrace.data.shards import Shards

MOST_PADDING = 0.01
"""Share of padding above which best-fit packing is not the choice: fewer rows of a stream have as
many tokens. Chosen; nanochat kept its best-fit rows without padding at the cost of 35% of the
tokens (dev/LOG.md, 2026-01-13)."""
LEAST_CROPPED = 0.01
"""Share of the tokens that lose the beginning of their document needlessly, below which a cut
stream is as good. Chosen."""


class Policy(StrEnum):
    """Name a way to make rows; but for the first and the last they are names of techniques."""

    CUT = "cut"
    DOCUMENT_PACKING = "document_packing"
    BEST_FIT_PACKING = "best_fit_packing"
    PAD = "pad"


class Choice(StrEnum):
    """Say why a policy is the one to take."""

    WHOLE_DOCUMENTS = "whole documents"
    TOO_MUCH_PADDING = "too much padding"
    NOTHING_TO_SEPARATE = "nothing to separate"


@dataclass(frozen=True)
class PolicyCount:
    """Hold what one policy makes of a text, over one epoch.

    Args:
        rows: rows of an epoch.
        dropped_tokens: tokens that no row has, at the end of each source.
        cropped_tokens: tokens whose row lacks the beginning of their document.
        split_documents: documents that stand in more than one row.
        needless_splits: those of them that would fit one row.
        padding_tokens: inputs that are no token of the text.
        attention_pairs: pairs of a query and a key, in each layer and head.
    """

    rows: int = 0
    dropped_tokens: int = 0
    cropped_tokens: int = 0
    split_documents: int = 0
    needless_splits: int = 0
    padding_tokens: int = 0
    attention_pairs: int = 0

    def plus(self, other: "PolicyCount") -> "PolicyCount":
        """Return the sum of both."""
        mine, more = asdict(self), asdict(other)
        return PolicyCount(**{key: mine[key] + more[key] for key in mine})


@dataclass(frozen=True)
class PackingLedger:
    """Hold what each policy makes of a plan's training text.

    Args:
        sequence_length: T, tokens of a row.
        documents: documents of all sources.
        tokens: their tokens, document tokens included.
        longer_than_row: documents of more than T tokens.
        longest: tokens of the longest document.
        histogram: by the power of two that a length is below: documents and tokens.
        policies: by policy.
    """

    sequence_length: int
    documents: int
    tokens: int
    longer_than_row: int
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    policies: Mapping[Policy, PolicyCount]

    def padding_fraction(self, policy: Policy) -> float:
        """Return the share of a policy's inputs that are padding."""
        count = self.policies[policy]
        return count.padding_tokens / max(1, count.rows * self.sequence_length)

    def needlessly_cropped(self, policy: Policy) -> float:
        """Return the share of the tokens that are cropped beyond what any policy must crop."""
        least = self.policies[Policy.BEST_FIT_PACKING].cropped_tokens
        return max(0, self.policies[policy].cropped_tokens - least) / max(1, self.tokens)

    def choose(self) -> tuple[Policy, Choice]:
        """Return the policy to take, and why."""
        if self.needlessly_cropped(Policy.CUT) < LEAST_CROPPED:
            return Policy.CUT, Choice.NOTHING_TO_SEPARATE
        if self.padding_fraction(Policy.BEST_FIT_PACKING) > MOST_PADDING:
            return Policy.DOCUMENT_PACKING, Choice.TOO_MUCH_PADDING
        return Policy.BEST_FIT_PACKING, Choice.WHOLE_DOCUMENTS

    def in_force(self, techniques: Iterable[str]) -> Policy:
        """Return the policy of a plan with these techniques."""
        names = {*techniques}
        return next((policy for policy in self.makers() if policy in names), Policy.CUT)

    @staticmethod
    def makers() -> tuple[Policy, ...]:
        """Return the policies that are techniques, first the one that decides beside the other."""
        return Policy.BEST_FIT_PACKING, Policy.DOCUMENT_PACKING

    def useful_share(self, policy: Policy) -> float:
        """Return the share of a policy's inputs that are tokens of the text."""
        return 1 - self.padding_fraction(policy)

    def attention_flops(self, policy: Policy, layers: int, width: int) -> float:
        """Return the FLOPs of attention over an epoch, forward and backward.

        A pair takes two multiplications and two additions for each feature of the heads, in scores
        and again in values, and the backward pass twice as much.

        Args:
            policy: the policy.
            layers: layers with attention.
            width: features of all heads together.
        """
        return 12.0 * layers * width * self.policies[policy].attention_pairs

    def to_dict(self, layers: int, width: int) -> dict[str, Any]:
        """Return it as JSON values."""
        policy, why = self.choose()
        return {
            "sequence_length": self.sequence_length,
            "documents": self.documents,
            "tokens": self.tokens,
            "longer_than_row": self.longer_than_row,
            "longest": self.longest,
            "histogram": [
                {"below": below, "documents": documents, "tokens": tokens}
                for below, documents, tokens in self.histogram
            ],
            "policies": [
                {
                    "policy": str(one),
                    **asdict(count),
                    "padding_fraction": self.padding_fraction(one),
                    "needlessly_cropped": self.needlessly_cropped(one),
                    "attention_flops": self.attention_flops(one, layers, width),
                }
                for one, count in self.policies.items()
            ],
            "best": str(policy),
            "why": str(why),
        }


def packing_ledger(shards: Iterable[Shards], sequence_length: int) -> PackingLedger:
    """Count what each policy makes of these sources, which are packed each for itself.

    Args:
        shards: the training text, one set a source.
        sequence_length: T, tokens of a row.
    """
    counts = dict.fromkeys(Policy, PolicyCount())
    bins = np.zeros((64, 2), dtype=np.int64)
    documents = tokens = longer = longest = 0
    for part in shards:
        rows = max(0, part.tokens - 1) // sequence_length
        used = rows * sequence_length
        cut = PolicyCount(rows=rows, dropped_tokens=part.tokens - used)
        counts[Policy.DOCUMENT_PACKING] = counts[Policy.DOCUMENT_PACKING].plus(cut)
        cut = replace(cut, attention_pairs=used * (sequence_length + 1) // 2)
        counts[Policy.CUT] = counts[Policy.CUT].plus(cut)
        documents, tokens = documents + part.documents, tokens + part.tokens
        for _, bounds in windows(part):
            sizes = np.diff(bounds)
            longer += int((sizes > sequence_length).sum())
            longest = max(longest, int(sizes.max()))
            exponents = np.frexp(sizes.astype(np.float64))[1]  # the power of two that is above
            bins[:, 0] += np.bincount(exponents, minlength=64)
            np.add.at(bins[:, 1], exponents, sizes)
            window = _count(bounds, sequence_length, used)
            counts = {policy: counts[policy].plus(window[policy]) for policy in Policy}
    return PackingLedger(
        sequence_length,
        documents,
        tokens,
        longer,
        longest,
        tuple((1 << n, *bins[n].tolist()) for n in np.flatnonzero(bins[:, 0]).tolist()),
        counts,
    )


def _count(bounds: np.ndarray, length: int, used: int) -> dict[Policy, PolicyCount]:
    """Count a window of documents by each policy.

    Args:
        bounds: int64 [documents + 1], where each begins in the stream, and where the last ends.
        length: tokens of a row.
        used: tokens of the stream that its rows have. A stream's rows, what is dropped of it and
            the pairs of its whole rows are no part of this.
    """
    sizes = np.diff(bounds)
    begins, ends = np.minimum(bounds[:-1], used), np.minimum(bounds[1:], used)
    heads = np.minimum(ends, (begins // length + 1) * length) - begins
    cropped = ends - begins - heads
    split = cropped > 0
    cut = PolicyCount(
        cropped_tokens=int(cropped.sum()),
        split_documents=int(split.sum()),
        needless_splits=int((split & (sizes <= length)).sum()),
    )
    apart = _pairs(heads) + _pairs_of_rows(cropped, length)
    whole, rest = np.divmod(sizes, length)
    fitted = fit(np.bincount(rest, minlength=length))
    each = np.diff(fitted.ends, prepend=0)
    long = PolicyCount(
        cropped_tokens=int(np.maximum(sizes - length, 0).sum()),
        split_documents=int((sizes > length).sum()),
    )
    best = replace(
        long,
        rows=int(whole.sum()) + fitted.rows,
        padding_tokens=int((each * fitted.free).sum()),
        attention_pairs=_pairs_of_rows(sizes, length)
        + int((each * fitted.free * (fitted.free + 1) // 2).sum()),
    )
    rows = int(whole.sum() + np.count_nonzero(rest))
    pad = replace(
        long,
        rows=rows,
        padding_tokens=rows * length - int(sizes.sum()),
        attention_pairs=rows * length * (length + 1) // 2,
    )
    return {
        Policy.CUT: cut,
        Policy.DOCUMENT_PACKING: replace(cut, attention_pairs=apart),
        Policy.BEST_FIT_PACKING: best,
        Policy.PAD: pad,
    }


def _pairs(sizes: np.ndarray) -> int:
    """Return the pairs of causal attention within pieces of these sizes."""
    return int((sizes * (sizes + 1) // 2).sum())


def _pairs_of_rows(sizes: np.ndarray, length: int) -> int:
    """Return the pairs of causal attention within rows that are cut from pieces of these sizes."""
    whole, rest = np.divmod(sizes, length)
    return int(whole.sum()) * (length * (length + 1) // 2) + _pairs(rest)
