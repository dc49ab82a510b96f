"""Models that cannot be compressed, or not so far, and how each remedy is followed."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from remedy_inputs import GOOD, weights
from remedy_python import Call, settings
from shell import Case, run

from headrace.compress.quantized_model import check_finite, formats_of
from headrace.compress.spec import NumberFormat, QuantizationSpec, SparsitySpec, sparse_spec
from headrace.core.model_config import ModelConfig
from headrace.core.strict import read_table
from headrace.export.pruned import allowed_axes
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec

NAMED = "blocks.0.mlp.down.weight"


def texts(_: Path) -> None:
    """Write a text, and another tokenizer."""
    Path("x.jsonl").write_text(GOOD)
    words = ["data", "tokenizer", "x.jsonl", "data.vocab=280", "--to", "tok.json"]
    assert run(words).code == 0


def small(_: Path) -> None:
    """Write a quantized model."""
    assert run(["compress", "demo", "--to", "int8", "--output", "small"]).code == 0


def inside(_: Path) -> None:
    """Write a quantized model into its run."""
    assert run(["compress", "demo", "--to", "int8"]).code == 0


def cut(folder: Path) -> None:
    """Write a quantized model, and cut its weights short."""
    small(folder)
    file = Path("small/int8/model.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def replanned(key: str, factor: int) -> Callable[[Path], None]:
    """Write a quantized model, and multiply a number of its plan."""

    def make(folder: Path) -> None:
        small(folder)
        file = Path("small/int8/plan.toml")
        text = re.sub(
            rf"{key} = (\d+)", lambda m: f"{key} = {factor * int(m[1])}", file.read_text()
        )
        file.write_text(text)

    return make


def retokenized(folder: Path) -> None:
    """Write a quantized model, and give it another tokenizer."""
    small(folder)
    texts(folder)
    shutil.copy("tok.json", "small/int8/tokenizer.json")


def no_torchao(patch: pytest.MonkeyPatch) -> None:
    """Let torchao be away."""
    patch.setattr("headrace.compress.quantized_model.find_spec", lambda name: None)


POINT = "small/int8 --tokens 2"
AGAIN = {"MODEL": "demo"}
COMPRESS = {
    "cli/compress:compress#1": Case("compress demo --to int8 --budget-mb 1 --max-loss 50%"),
    "cli/compress:_spec#1": Case("compress demo --to int9"),
    "cli/arguments:share_of#1 to": Case("compress demo --to 100%"),
    "cli/arguments:share_of#1": Case("compress demo --to int8 --max-loss 1"),
    "cli/compress:_with_text#1": Case(
        "compress hf --to int8", weights(texts), fills={"PATH": "x.jsonl"}
    ),
    "cli/compress:_with_text#2": Case(
        "compress hf --to int8 data.sources=x.jsonl data.tokenizer=tok.json", weights(texts)
    ),
    "core/folders:refuse_no_model#3": Case(
        "train {tiny} goal.steps=1 model.pretrained=small/int8 data.tokenizer=hf",
        weights(small),
        fills={"FOLDER of the weights that it was made of": "hf"},
    ),
    "export/start:beginning#1": Case(
        "compress hf --to int8 data.sources=x.jsonl --checkpoint best", weights(texts)
    ),
    "inference/load:_quantized#1": Case("report runs/demo/compressed/int8", inside),
    "export/opened:open_any#1": Case("eval small/int8 --checkpoint best", small),
    "cli/arguments:share_of#1 by": Case("prune demo --by 30"),
    "cli/prune:_axes#1": Case("prune demo --only head"),
    "compress/pruning:shapes_within#1": Case("prune demo --by 90%"),
    "compress/quantized_model:formats_of#2": Case("compress demo --to int4"),
    "compress/quantized_model:check_installed#1": Case(
        "compress demo --to int8",
        fake=no_torchao,
        prose={"pip install 'headrace[quant]'": "it is installed where this runs"},
        lifted=True,
    ),
    "export/compression:check_reached#1": Case("compress demo --to int8 --budget-mb 0.0163"),
    "export/compression:check_reached#2": Case("compress demo --to int4 --group 16 --max-loss 0%"),
    "export/compression:_check_budget#1": Case("compress demo --to int8 --budget-mb 0.001"),
    "export/point:closed_point#1": Case(f"sample {POINT}", retokenized, fills=AGAIN),
    "export/point:fill_#1": Case(f"sample {POINT}", replanned("layers", 2), fills=AGAIN),
    "export/point:_check_stored#1": Case(f"sample {POINT}", replanned("ffn", 2), fills=AGAIN),
    "export/point:_record#1": Case(f"sample {POINT}", cut, fills=AGAIN),
}
"""Each error by its site."""


def wrong(table: type[NumberFormat | QuantizationSpec | SparsitySpec], **values: object) -> Call:
    """A table that is refused, and read again with the values of its remedy."""

    def mended(remedy: str) -> None:
        said = {key: _value(text) for key, text in settings(remedy).items()}
        read_table(table, {**values, **said})

    return Call(lambda _: read_table(table, values), mended)


def _value(text: str) -> object:
    if text.replace(".", "", 1).isdigit():
        return float(text) if "." in text else int(text)
    return {"true": True}.get(text, text)


def model(ffn: int = 32) -> Decoder:
    """Return a small model of random weights."""
    config = ModelConfig(vocab=64, dim=16, layers=1, heads=2, ffn=ffn)
    return Decoder(config, baseline_parts(config), MaskSpec())


def excepted(name: str) -> None:
    """Look for the matrix of an exception."""
    formats_of(model(), QuantizationSpec(name="own", exceptions={name: NumberFormat()}))


def pruned(to: str) -> None:
    """Look for the matrices that are pruned of a model whose rows are no whole fours."""
    pattern = "2:4" if to == "2:4" else "unstructured"
    assert sparse_spec(spec := SparsitySpec(pattern=pattern)).name == to
    assert formats_of(model(30), sparse_spec(spec))


def earlier(remedy: str) -> None:
    """Take weights that are finite, as the remedy says."""
    assert remedy == "the weights of an earlier checkpoint"
    check_finite(NAMED, torch.zeros(2, 2))


def without_heads(axis: str) -> None:
    """Ask for a part of a model whose config.json has no width of a head."""
    config = ModelConfig(
        vocab=64,
        dim=16,
        heads=2,
        norm="layer_norm",
        position="learned",
        activation="gelu",
        bias=True,
        tied_embeddings=True,
    )
    made: Any = SimpleNamespace(config=config)
    assert allowed_axes(made, [axis]) == [axis]


TWO_OF_FOUR = {"pattern": "2:4"}
INT8, NF4 = {"dtype": "int8"}, {"dtype": "nf4", "group": 64}
SPECS = {
    "compress/spec:NumberFormat._check#1": wrong(NumberFormat, dtype="nf4", group=32),
    "compress/spec:NumberFormat._check#2": wrong(NumberFormat, dtype="fp32", rounding="gptq"),
    "compress/spec:NumberFormat._check#3": wrong(NumberFormat, dtype="int8", sparsity=TWO_OF_FOUR),
    "compress/spec:SparsitySpec._check_share#1": wrong(SparsitySpec, pattern="2:4", share=0.3),
    "compress/quantized_model:formats_of#3": Call(
        lambda _: pruned("2:4"), lambda remedy: pruned(remedy.removeprefix("--to "))
    ),
    "compress/spec:QuantizationSpec._check_activations#1": wrong(
        QuantizationSpec, name="own", matrices=NF4, activations="int8_asymmetric"
    ),
    "compress/quantized_model:formats_of#1": Call(
        lambda _: excepted("blocks.9.mlp.down.weight"),
        lambda remedy: excepted(remedy.removeprefix("a name as ")),
    ),
    "export/pruned:allowed_axes#1": Call(
        lambda _: without_heads("heads"),
        lambda remedy: without_heads(remedy.removeprefix("--only ")),
    ),
    "compress/quantized_model:check_finite#1": Call(
        lambda _: check_finite(NAMED, torch.tensor([[float("inf")]])), earlier
    ),
}
"""Errors that a caller in Python meets."""
