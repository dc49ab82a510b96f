"""A model made here, exported: transformers opens it and computes and writes the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.data.tokenizer import train_tokenizer
from headrace.export.hf import export_hf
from headrace.inference.sample import generate
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.init import random_source
from headrace.model.mask import MaskSpec, Rows

transformers = pytest.importorskip("transformers")

TEXT = "The mill grinds only as fast as its narrowest channel lets water through. 1234, don't!\n"
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"kv_heads": 2, "ffn": 50, "rope_theta": 50_000.0},
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 12, "kv_heads": 1, "tied_embeddings": True},
    "GPT2LMHeadModel": {
        "norm": "layer_norm",
        "activation": "gelu_tanh",
        "position": "learned",
        "context": 48,
        "bias": True,
        "tied_embeddings": True,
    },
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(family: str) -> Decoder:
    config = ModelConfig(
        vocab=320, dim=40, layers=2, heads=4, init_std=0.2, output_init="plain", **FAMILIES[family]
    )
    model = Decoder(config, baseline_parts(config), MaskSpec())
    source = random_source(config, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source(name, parameter.shape))
    return model


def test_transformers_reads_what_we_write(family: str, ours: Decoder, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT * 20], vocab=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    out = tmp_path / "exported"
    export_hf(
        dict(ours.named_parameters()),
        ours.config,
        tmp_path / "tokenizer.json",
        out,
        sequence_length=48,
        shard_bytes=30_000,
    )
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert type(theirs).__name__ == family
    assert not any(loading.values()), loading
    assert theirs.dtype == torch.float32

    reader = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer.encode_batch([TEXT])[0].tolist()
    assert reader(TEXT)["input_ids"] == ids
    assert reader.decode(ids) == TEXT
    assert reader.eos_token_id == tokenizer.document_token == theirs.config.eos_token_id

    prompt = torch.tensor([[tokenizer.document_token, *ids[:9]]])
    with torch.no_grad():
        expected = theirs(prompt).logits
        found = ours.logits(prompt, Rows(torch.arange(10)[None]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    written = theirs.generate(prompt, max_new_tokens=30, do_sample=False)
    stop = tokenizer.document_token
    sampled = generate(ours, prompt, new_tokens=30, temperature=0, stop=stop)
    assert torch.equal(sampled, written)
    assert reader.decode(sampled[0]) == reader.decode(written[0])
