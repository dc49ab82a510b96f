"""What rows of documents would waste, estimated from the lengths: a replaceable small function.

Rows hold `T` tokens. Three ways are compared: `cut` lets one stream of all documents fall into
rows, as the baseline does; `pad` gives each document a row, and what is longer is cropped;
`best_fit` cuts long documents into parts of `T` and puts each part into the fullest row that has
room for it (packing/fit.py), so that only documents longer than a row are cut. Once the text is
tokenized, packing/ledger.py counts what is estimated here.
"""

import numpy as np

from headrace.data.inspection.record import PackingEstimate, PolicyName
from headrace.data.packing.fit import fit
from headrace.data.packing.ledger import MOST_PADDING


def estimate_packing(
    tokens: np.ndarray, documents: np.ndarray, sequence_length: int
) -> tuple[PackingEstimate, ...]:
    """Estimate what each way to make rows wastes.

    Args:
        tokens: [N] mean length of each group of documents, the document token included.
        documents: int64 [N] how many documents are of it.
        sequence_length: T.
    """
    lengths = np.maximum(1, np.rint(tokens)).astype(np.int64)
    total, count = float((lengths * documents).sum()), float(documents.sum())
    beyond = float((np.maximum(0, lengths - sequence_length) * documents).sum())
    # A document starts anywhere in a row: (L - 1) / T is the chance that a border falls inside.
    crossing = float((np.minimum(1.0, (lengths - 1) / sequence_length) * documents).sum())
    longer = float(documents[lengths > sequence_length].sum())
    padded = count * sequence_length
    whole, rests = np.divmod(lengths, sequence_length)
    histogram = np.zeros(sequence_length, dtype=np.int64)
    np.add.at(histogram, rests, documents)
    rows = int((whole * documents).sum()) + fit(histogram).rows
    return (
        _estimate("cut", -(-total // sequence_length), 0.0, 0.0, crossing / count),
        _estimate("pad", count, (padded - (total - beyond)) / padded, beyond / total, 0.0),
        _estimate("best_fit", rows, 1 - total / (rows * sequence_length), 0.0, longer / count),
    )


def best_packing(estimates: tuple[PackingEstimate, ...]) -> PolicyName:
    """Return the way that splits the fewest documents among those that waste next to nothing."""
    frugal = [one for one in estimates if one.padding + one.cropped <= MOST_PADDING]
    return min(frugal, key=lambda one: (one.split, one.padding + one.cropped)).policy


def _estimate(
    policy: PolicyName, rows: float, padding: float, cropped: float, split: float
) -> PackingEstimate:
    return PackingEstimate(
        policy=policy, rows=round(rows), padding=max(0.0, padding), cropped=cropped, split=split
    )
