"""A model made here, as a GGUF file: llama.cpp computes and reads and writes the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import WORDS
from tiny_gguf import model, write

from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.core.limits import TokenizerPattern
from headrace.data.tokenizer import Tokenizer, train_tokenizer
from headrace.export.gguf import Origin, digest_of
from headrace.export.gguf_graph import graph_of
from headrace.export.gguf_tokenizer import vocabulary
from headrace.export.llama_cpp import LlamaCpp
from headrace.inference.load import open_model
from headrace.inference.sample import generate
from headrace.model.mask import Rows

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

TEXT = "The mill grinds only as fast as its narrowest channel lets water through. 1234, don't!\n"
ODD = "I'LL say 3.14159 or 1234567\r\n\n  x\t\ty   z\u00a0 \u4f60\u597d \U0001f600 ##!\n\n"
GEMMA = {
    "activation": "geglu",
    "post_norms": True,
    "embedding_scale": 64**0.5,
    "tied_embeddings": True,
    "window": 8,
}
GEMMA3 = {**GEMMA, "qk_norm": True, "window_between": 5, "local_rope_theta": 2e4, "layers": 7}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({"kv_heads": 2, "ffn": 96, "rope_theta": 5e4, "head_dim": 32}, 1e-4),
    "llama3": ({"bias": True, "rope_scaling": {"kind": "llama3", "factor": 4.0}}, 1e-4),
    "qwen2": ({"qkv_bias": True, "kv_heads": 2, "rope_scaling": {"kind": "linear"}}, 1e-4),
    "qwen3": ({"qk_norm": True, "kv_heads": 1, "rope_scaling": {"kind": "yarn"}}, 1e-4),
    # llama.cpp takes GELU from a table of 16 bits.
    "gpt2": (
        {
            "norm": "layer_norm",
            "activation": "gelu_tanh",
            "position": "learned",
            "context": 48,
            "bias": True,
            "tied_embeddings": True,
        },
        5e-3,
    ),
    "gemma2": (
        {**GEMMA, "window_between": 1, "attention_cap": 50.0, "logit_cap": 30.0, "layers": 3},
        2e-2,
    ),
    "gemma3": (GEMMA3, 1e-2),
}
PATTERNS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen")]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT * 20], vocab=300, pattern="gpt4")


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_llama_cpp_computes_what_the_model_computes(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    keys, most = MODELS[name]
    ours = model(keys)
    write(ours, tokenizer, tmp_path / "a.gguf")
    theirs = LlamaCpp(tmp_path / "a.gguf", TEXT, 4)
    assert theirs.origin == Origin("toy", 3, "seal", {"data": "digest"})
    ids = theirs.encode(TEXT)
    assert ids == [tokenizer.document_token, *tokenizer.encode_batch([TEXT])[0].tolist()]
    rows = Rows(torch.arange(len(ids))[None])
    with torch.no_grad():
        every = ours.logits(torch.tensor([ids]), rows)[0, :, : tokenizer.vocab].log_softmax(-1)
    for end in (1, 2, 13, len(ids)):
        found = theirs.log_probabilities(ids[:end])
        assert sorted(found) == list(range(tokenizer.vocab))
        expected = every[end - 1]
        got = torch.tensor([found[i] for i in range(tokenizer.vocab)])
        torch.testing.assert_close(got, expected, rtol=0, atol=most)
    prompt = torch.tensor([ids[:9]])
    written = theirs.continue_(ids[:9], 12)
    stop = tokenizer.document_token
    how = {"temperature": 0, "stop": stop, "entries": tokenizer.vocab}
    sampled = generate(ours, prompt, new_tokens=12, **how)[0, 9:].tolist()
    assert [i for i in sampled if i != stop] == [i for i in written.ids if i != stop]
    assert len(written.ids) > 1
    assert tokenizer.decode(i for i in written.ids if i != stop) == written.text


@pytest.mark.parametrize("pattern", ["gpt4", *PATTERNS])
def test_llama_cpp_reads_the_same_tokens(pattern: TokenizerPattern, tmp_path: Path) -> None:
    own = train_tokenizer([(TEXT + ODD) * 20], vocab=400, pattern=pattern)
    write(model({"vocab": 448}), own, tmp_path / "a.gguf")
    theirs = LlamaCpp(tmp_path / "a.gguf", "", 1)
    for text in (TEXT, ODD, ODD[::-1], "<|endoftext|>", "", " ", "a  \n  "):
        theirs._context = 0  # longer than its rows
        assert theirs.encode(text)[1:] == own.encode_batch([text])[0].tolist(), text


def test_what_llama_cpp_does_otherwise_is_refused(tokenizer: Tokenizer) -> None:
    gpt2 = {**MODELS["gpt2"][0], "activation": "gelu"}
    yarn = {"kind": "yarn", "factor": 2.0, "original_length": 32, "beta_slow": 2.0}
    for keys, told, mend in (
        ({"window": 8}, "window = 8", "model.window=0"),
        (gpt2, "activation = 'gelu'", "model.activation=gelu_tanh"),
        ({**GEMMA, "attention_cap": 50.0}, "window_between = 0", "model.window_between=1"),
        ({**GEMMA3, "query_scale": 0.5}, "query_scale = 0.5", "model.query_scale=1.0"),
        ({"qk_norm": True, "rope_scaling": {"kind": "llama3"}}, "llama3", "kind=none"),
        ({"rope_scaling": yarn}, "from 32 to 2 turns", ""),
    ):
        ours = model(keys)
        with pytest.raises(UnsupportedError) as refused:
            graph_of(ours.config, ours.position)
        assert told in refused.value.message and mend in refused.value.remedy.text
    for spec, told in (
        ({"normalizer": {"type": "Lowercase"}}, "rewrites text by Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text by Whitespace"),
    ):
        changed = Tokenizer(json.dumps({**tokenizer.spec, **spec}))
        with pytest.raises(UnsupportedError, match=told):
            vocabulary(changed)


def test_quantized_matrices_are_those_of_the_reference(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Rows of 50 are no blocks and stay F16, told by name; tables keep 8 bits under Q4_0."""
    import gguf

    ours = model({"ffn": 50, "tied_embeddings": True})
    for quantize in ("f16", "q8_0", "q4_0"):
        written = write(ours, tokenizer, file := tmp_path / f"{quantize}.gguf", quantize)
        reader = gguf.GGUFReader(file)
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        assert len(written.kept) == (0 if quantize == "f16" else 2), written.kept
        assert all("ffn_down" in name for name in written.kept)
        table = by_name["token_embd.weight"]
        assert table.tensor_type.name == ("F16" if quantize == "f16" else "Q8_0")
        own = ours.embed.weight.detach()[: tokenizer.vocab]
        again = gguf.quants.dequantize(table.data, table.tensor_type)
        torch.testing.assert_close(torch.from_numpy(again).float(), own, rtol=2e-2, atol=5e-3)
        (out,) = (t for n, t in by_name.items() if n == "blk.1.attn_output.weight")
        assert out.tensor_type.name == quantize.upper()
        stored = reader.fields["headrace.sha256"].contents()
        assert stored == digest_of(file)


@pytest.mark.slow
def test_an_exported_run_writes_the_same_greedy_text(
    tmp_path: Path, plan_file: Path, run_cli: Callable[..., Any], zygote: Any
) -> None:
    words = ["model.dim=32", "data.tokenizer_pattern=gpt4", "goal.steps=30", "name=a"]
    words.append("data.sequence_length=32")
    assert run_cli(tmp_path, "train", str(plan_file), *words).code == 0
    assert zygote.run(tmp_path, "export", "a", "--to", "gguf").code == 0
    file = "runs/a/gguf/a-F16.gguf"
    starts = ["", *(" ".join(WORDS[i : i + 3]) for i in range(19))]
    for prompt in starts:
        ask = ["--prompt", prompt, "--json"]
        theirs = json.loads(zygote.run(tmp_path, "run", file, "--max-tokens", "8", *ask).out)
        greedy = ["--temperature", "0", "--tokens", "8"]
        ours = json.loads(zygote.run(tmp_path, "sample", "a", *greedy, *ask).out)
        assert theirs["text"] == ours["text"]
        assert theirs["run"] == "runs/a" and theirs["tokens_per_s"] > 0
        assert theirs["distance"]["largest_nats"] < 0.02
        assert theirs["distance"]["same_choice"] == 1
    transformers = pytest.importorskip("transformers")
    reader = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "runs/a/gguf", gguf_file="a-F16.gguf", dtype=torch.float32
    )
    build = open_model(tmp_path / "runs" / "a", catalogue())
    ids = torch.tensor([[build.prepared.tokenizer.document_token, 5, 70, 270, 33]])
    with torch.no_grad():
        ours = build.model.logits(ids, Rows(torch.arange(5)[None]))
        theirs = reader(ids).logits
    torch.testing.assert_close(theirs, ours[..., : theirs.size(-1)], rtol=0, atol=1e-2)
    moved = (tmp_path / file).rename(tmp_path / "elsewhere.gguf")
    told = zygote.run(tmp_path, "run", str(moved), "--max-tokens", "2")
    assert told.code == 0 and "not compared" in told.err
