"""What is counted of a decoder, against the decoder."""

from typing import Any

import torch

from headrace.core.model_config import ModelConfig
from headrace.costs.count import baseline_ledger, parameters_in_blocks
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec


def test_learned_positions_are_as_many_as_a_row_has_tokens() -> None:
    """Check that learned positions count 14 for rows of 14 tokens, also without `model.context`."""
    config = ModelConfig(vocab=311, dim=16, heads=2, layers=2, ffn=24, position="learned")
    whole = config.model_copy(update={"context": 14})
    with torch.device("meta"):
        model = Decoder(whole, baseline_parts(whole), MaskSpec())
    held = sum(p.nbytes for p in model.parameters())
    for one in (config, whole):
        ledger = baseline_ledger(one, rows=2, length=14, precision="fp32", device="cpu")
        assert ledger.memory["parameters"].bytes == held
        assert ledger.sizes["tables"] == 16 * (311 + 14)


def test_what_is_in_blocks_has_no_table_of_tokens() -> None:
    """Further tables have a row for each token or pair, as the embedding and the output have."""
    changes: list[dict[str, Any]] = [{}, {"tied_embeddings": True}, {"value_embeddings": 1}]
    changes += [{"bigram_multiple": 1}]
    for words in changes:
        config = ModelConfig(vocab=311, dim=16, heads=2, layers=2, ffn=24, **words)
        with torch.device("meta"):
            model = Decoder(config, baseline_parts(config), MaskSpec())
        held = [p.numel() for p in model.parameters() if 311 not in p.shape]
        assert parameters_in_blocks(config) == sum(held)
