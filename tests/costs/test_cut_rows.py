"""What a rank of several that share rows keeps and computes of embeddings that read more."""

from pathlib import Path

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.count import FP32
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream
from headrace.plan.plan import Plan

SHAPE = Path(__file__).parents[2] / "benchmarks" / "plans" / "160m.toml"
READERS = ("bigram_embeddings", "embedding_smear", "embedding_norm", "value_embeddings")
ALONE = ("torch_compile",)
"""What would make other pieces of these."""


def ledger_of(*words: str, with_: tuple[str, ...] = ()) -> Ledger:
    plan = Plan.read(SHAPE.read_text(), catalogue(), overrides=words, with_=with_, without=ALONE)
    return make_ledger(plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200"))


@pytest.mark.parametrize("technique", ["context_parallel", "ulysses"])
def test_tokens_are_cut_and_tables_stay(technique: str) -> None:
    words = ("batch.micro_sequences=4", "techniques.value_embeddings.tables=2")
    whole = ledger_of(*words, with_=READERS)
    part = ledger_of(*words, "mesh.context=2", with_=(*READERS, technique))
    for name in ("pairs", "embedding_smear", "embedding_norm", "values"):
        assert part.memory[name].bytes == pytest.approx(whole.memory[name].bytes / 2), name
    for name, matrix in (
        ("embedding", "embed.weight"),
        ("embedding_pairs", "pairs.embed.weight"),
        ("embedding_values", "value_embed.0.weight"),
    ):
        table = FP32 * whole.matrices[matrix].numbers  # zeros, to which rows are added
        one, two = whole.work[f"{name}/backward"], part.work[f"{name}/backward"]
        assert isinstance(one, Stream) and isinstance(two, Stream)
        assert two.bytes - table == pytest.approx((one.bytes - table) / 2), name
        assert two.count == one.count


@pytest.mark.parametrize("reader", ["", "bigram_embeddings", "embedding_smear"])
def test_what_was_embedded_for_the_token_before_is_left_out_in_a_copy(reader: str) -> None:
    readers = (reader,) if reader else ()
    part = ledger_of("mesh.context=2", with_=("context_parallel", *readers))
    copies = {name: work for name, work in part.work.items() if "leads" in name}
    assert set(copies) == {f"embedding_leads/{p}" for p in ("forward", "backward") if reader}
    features = FP32 * part.sizes["tokens"] * part.sizes["dim"]
    assert all(isinstance(w, Stream) and w.bytes >= 2 * features for w in copies.values())
    split = ledger_of(
        *("mesh.context=2", "mesh.tensor=2"),
        with_=("context_parallel", "tensor_parallel", *readers),
    )
    assert not [name for name, work in split.work.items() if work.unknown]
