"""What buckets of gradients leave exposed is counted from what learns."""

from math import prod

from headrace.core.model_config import ModelConfig
from headrace.costs.count import baseline_ledger
from headrace.techniques.parallel.data_parallel import DataParallel


def test_gradients_of_all_tables_come_last() -> None:
    sizes = {"vocab": 311, "dim": 16, "heads": 2, "layers": 2, "ffn": 24}
    more = {"bigram_multiple": 5, "value_embeddings": 1}
    ledgers = [
        baseline_ledger(
            ModelConfig(**sizes, **keys), rows=2, length=14, precision="fp32", device="cpu"
        )
        for keys in ({}, more)
    ]
    shares = [DataParallel()._outside(ledger) for ledger in ledgers]
    tables = [311 * 16, 311 * 16 * (1 + 5 + 1)]
    for share, ledger, own in zip(shares, ledgers, tables, strict=True):
        whole = sum(prod(matrix.shape) for matrix in ledger.matrices.values())
        assert share == own / whole
